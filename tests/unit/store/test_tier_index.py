"""What one tier holds, by itself: what it tells its observers, and whose chunks count."""

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.order import Segments
from kvtier.store.observer import Left, Observer, Observers
from kvtier.store.tier_index import TierIndex

A, B, C = (ChunkKey(name.encode().ljust(40, b".")) for name in "ABC")
PLACE, OWNER, OTHER = 3, 7, 8


class Seen(Observer):
    def __init__(self):
        self.events: list[tuple[object, ...]] = []

    def came(self, place, key):
        self.events.append(("came", place, key))

    def left(self, place, key, how):
        self.events.append(("left", place, key, how))

    def missing(self, key, how):
        self.events.append(("missing", key, how))


def index(seen=None, capacity=4):
    return TierIndex(PLACE, capacity, Segments, 0.5, Observers(*[seen] if seen else ()))


def test_it_tells_what_came_what_left_and_how_and_what_a_read_did_not_find():
    seen = Seen()
    tier = index(seen)
    for key in (A, B, C):
        tier.hold(key)
    tier.lost(A)
    tier.lost(A, Left.CORRUPT)
    tier.leave(B)
    tier.leave(B)
    tier.evict(C)
    assert seen.events == [
        *(("came", PLACE, key) for key in (A, B, C)),
        ("left", PLACE, A, Left.EVICTED),
        ("missing", A, Left.CORRUPT),
        ("left", PLACE, B, Left.FORGOTTEN),
        ("left", PLACE, C, Left.EVICTED),
    ]
    assert not tier.order and tier.leaving == {B, C}


def test_a_chunk_without_an_owner_is_nobodys_and_what_is_not_held_is_not_named():
    tier = index()
    tier.hold(A)
    tier.hold(C, OWNER)
    assert tier.unowned([A, B, C]) == [A]


def test_an_owners_chunks_that_are_being_written_count_and_those_of_others_do_not():
    tier = index()
    tier.hold(A, OWNER)
    assert not tier.quota.spent(OWNER)
    tier.writing[B] = OTHER
    assert not tier.quota.spent(OWNER)
    tier.writing[C] = OWNER
    assert tier.quota.spent(OWNER) and not tier.quota.spent(OTHER)
