"""A quota by itself: how much an owner may have, and whose chunk leaves for one more."""

from collections import Counter

from kvtier.core.tenant import UNOWNED
from kvtier.store.quota import Quota

ONE, OTHER = 1, 2


def quota(counts):
    """4 chunks of the whole place, and 2 of the part that the Store has now."""
    made = Quota(0.5, 8, counts.__getitem__)
    made.resize(4, counts)
    return made


def test_the_smallest_share_is_one_chunk():
    assert Quota(0.01, 10, Counter[int]().__getitem__).whole == 1


def test_an_owner_gives_while_it_has_more_than_its_part():
    counts = Counter({ONE: 3})
    made = quota(counts)
    assert made.giver(OTHER) == ONE
    counts[ONE] = 2
    assert made.giver(OTHER) == UNOWNED


def test_more_chunks_are_left_where_room_is_free():
    counts = Counter({ONE: 1})
    made = quota(counts)
    assert (made.left(ONE, 0), made.left(ONE, 2), made.left(ONE, 9)) == (1, 2, 3)
    counts[ONE] = 3
    assert (made.left(ONE, 0), made.left(ONE, 9)) == (0, 1)


def test_where_a_giver_has_nothing_that_can_leave_the_coldest_of_all_leaves():
    made = quota(Counter({ONE: 3}))
    coldest = {ONE: "of one", UNOWNED: "of all"}
    assert made.victim(OTHER, False, coldest.get) == "of one"
    del coldest[ONE]
    assert made.victim(OTHER, False, coldest.get) == "of all"


def test_for_an_owner_whose_quota_is_spent_no_other_owners_chunk_leaves():
    assert quota(Counter({ONE: 4})).victim(ONE, True, {UNOWNED: "of all"}.get) is None
