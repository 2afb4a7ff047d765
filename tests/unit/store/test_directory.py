"""The state machine, transition by transition. The random walk over all of them is
tests/property."""

from collections import Counter
from contextlib import nullcontext

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.pool import Pool
from kvtier.core.steps import whole
from kvtier.store.directory import Directory
from kvtier.store.entry import FILLING, GONE, Entry
from kvtier.store.lower.lower_tier import Core
from kvtier.store.observer import Left, Observer
from kvtier.store.purge import Purge
from tests.stores import filled, taken


def in_use(directory):
    return len(directory._entries) + len(directory._gone)


def key(name):
    return ChunkKey(name.encode().ljust(40, b"."))


A, B, C, D = (key(name) for name in "ABCD")


def ready(directory, *keys):
    entries = [filled(directory, one) for one in keys]
    directory.ordered(keys)
    return entries


def test_a_chunk_is_found_only_when_ready():
    directory = Directory(2)
    entry = directory.reserve(A, ())
    assert entry is not None and entry.state is FILLING
    assert directory.ready_run([A]) == 0 and directory.held_run([A]) == 0
    directory.filled((entry,))
    assert directory.ready_run([A, B]) == 1
    directory.check(idle=True)


def test_a_failed_fill_leaves_nothing():
    directory = Directory(1)
    entry = taken(directory, A)
    directory.fill_failed(entry)
    assert directory.get(A) is None and directory.usage()["ram_free"] == 1


def test_the_leaf_of_the_coldest_run_leaves_first():
    directory = Directory(4)
    ready(directory, A, B)
    ready(directory, C, D)
    directory.ordered([A, B])
    left = [directory.reserve(key(str(index)), ()) for index in range(3)]
    assert None not in left
    assert [directory.get(one) is not None for one in (A, B, C, D)] == [True, False, False, False]


def test_a_run_never_pushes_out_itself():
    directory = Directory(2)
    ready(directory, A, B)
    assert directory.reserve(C, {A, B, C}) is None
    assert directory.ready_run([A, B]) == 2


@pytest.mark.parametrize("lacks", ["nothing", "the last", "one inside", "one that is filled"])
def test_a_run_is_pinned_whole_or_not_at_all(lacks):
    directory, run = Directory(4), [A, B, C]
    first, *_ = ready(directory, *(key for key in run if lacks == "nothing" or key != C))
    directory.pin(first)
    if lacks == "one that is filled":
        assert directory.reserve(C, ()) is not None
    elif lacks == "one inside":
        ready(directory, C)
        directory.invalidate(B)
    order, pins = list(directory.order), directory.usage()
    entries = directory.pin_all(run)
    assert (entries is not None) == (lacks == "nothing")
    assert list(directory.order) == order
    if entries is None:
        assert directory.usage() == pins and first.pins == 1
        return
    assert [entry.key for entry in entries] == run
    assert [entry.pins for entry in entries] == [2, 1, 1]
    for entry in (*entries, first):
        directory.unpin((entry,))
    directory.check(idle=True)


def test_a_run_of_one_chunk_or_of_none_can_be_pinned_whole():
    directory = Directory(1)
    assert directory.pin_all([]) == []
    assert directory.pin_all([A]) is None
    entries = ready(directory, A)
    assert directory.pin_all([A]) == entries


def test_pinned_chunks_stay_until_the_last_pin():
    directory = Directory(1)
    (entry,) = ready(directory, A)
    directory.pin(entry)
    directory.pin(entry)
    directory.unpin((entry,))
    assert directory.reserve(B, ()) is None
    directory.unpin((entry,))
    assert directory.reserve(B, ()) is not None
    assert entry.state is GONE


def test_a_forgotten_chunk_keeps_its_slot_while_it_is_read():
    directory = Directory(1)
    (entry,) = ready(directory, A)
    directory.pin(entry)
    directory.invalidate(A)
    assert directory.get(A) is None
    assert directory.reserve(B, ()) is None, "the slot is still being read"
    assert in_use(directory) == 1
    directory.check()
    directory.unpin((entry,))
    assert directory.reserve(B, ()) is not None


def test_a_waiter_of_a_failed_fill_frees_the_slot():
    directory = Directory(1, [1])
    directory.tiers[0].found([A])
    entry = taken(directory, A, origin=0)
    directory.pin(entry)
    directory.fill_failed(entry)
    assert entry.state is GONE and directory.usage()["ram_free"] == 0
    directory.unpin((entry,))
    directory.check(idle=True)
    assert directory.usage()["ram_free"] == 1


def test_a_full_tier_gives_up_its_coldest_leaf():
    directory = Directory(3, [2])
    entries = ready(directory, A, B, C)
    for entry in entries[:2]:
        assert directory.spill_begun(entry, 0) == []
        directory.spill_ended(entry, 0, stored=True)
    directory.ordered([A, B])
    assert directory.spill_begun(entries[2], 0) == [B]
    assert directory.held_run([A, B]) == 2, "B is still in RAM"
    assert list(directory.holders(B)) == []
    directory.tiers[0].deleted([B])
    directory.spill_ended(entries[2], 0, stored=True)
    directory.check(idle=True)
    assert sorted(directory.tiers[0].order) == [A, C]


def test_nothing_is_written_twice_or_while_it_leaves():
    directory = Directory(2, [1])
    a, b = ready(directory, A, B)
    assert directory.spill_begun(a, 0) == []
    assert directory.spill_begun(a, 0) is None, "is being written"
    directory.spill_ended(a, 0, stored=True)
    assert directory.spill_begun(a, 0) is None, "is held"
    assert directory.spill_begun(b, 0) == [A]
    assert directory.spill_begun(a, 0) is None, "is being deleted"


def test_a_chunk_forgotten_while_written_is_not_kept_below():
    directory = Directory(1, [1])
    (entry,) = ready(directory, A)
    directory.spill_begun(entry, 0)
    directory.invalidate(A)
    assert directory.spill_ended(entry, 0, stored=True) is False
    assert list(directory.holders(A)) == []
    directory.tiers[0].deleted([A])
    directory.check(idle=True)


def test_forget_names_every_tier_that_must_delete():
    directory = Directory(1, [1, 1])
    directory.tiers[0].found([A])
    directory.tiers[1].found([A])
    assert directory.invalidate(A) == [0, 1]
    assert directory.held_run([A]) == 0


def test_what_is_promoted_is_whose_it_was_and_nobodys_is_who_asked_for_its():
    directory = Directory(2, [2])
    directory.tiers[0].found([A, B], [7, 0])
    entries = [directory.reserve(key, (), origin=0, owner=8) for key in (A, B)]
    assert [entry and entry.owner for entry in entries] == [7, 8]
    purge = Purge(
        Core(nullcontext(), directory, Pool(2, 4096), Counter(), float), (), directory.keys
    )
    assert whole(purge.finding(8)) == {B}
    assert whole(purge.finding(7)) == {A, B}, "in the tier B is nobody's still"


def test_found_chunks_beyond_an_owners_quota_are_given_back_coldest_first():
    directory = Directory(1, [4], share=0.5)
    assert directory.tiers[0].found([A, B, C], [7, 7, 7]) == [A]
    directory.tiers[0].deleted([A])
    assert directory.tiers[0].found([D], [7]) == [B]
    directory.tiers[0].deleted([B])
    assert directory.tiers[0].found([A, B], [0, 0]) == [], "nobody has no quota"
    directory.check(idle=True)


QUIET, GREEDY = 7, 8
SHARED = [key(str(number)) for number in range(8)]


def test_in_a_part_of_ram_an_owner_with_its_quota_of_the_part_gives_first():
    directory = Directory(8, share=0.5)
    for key, owner in zip(SHARED, (QUIET, GREEDY, GREEDY, GREEDY), strict=False):
        filled(directory, key, owner=owner)
    assert not directory.resize(4, 8)
    directory.check(idle=True)
    filled(directory, SHARED[4], owner=QUIET)
    assert directory.get(SHARED[0]) is not None and directory.get(SHARED[1]) is None
    filled(directory, SHARED[5], owner=GREEDY)
    assert directory.get(SHARED[0]) is not None and directory.get(SHARED[2]) is None
    filled(directory, SHARED[6], owner=QUIET)
    assert directory.get(SHARED[0]) is None, "who has its quota of the part gives itself"
    assert directory.crowded[0] == 3, "each of them would use more room"


def test_in_a_part_of_a_tier_an_owner_with_its_quota_of_the_part_gives_first():
    directory = Directory(8, [8], share=0.5)
    directory.tiers[0].found(SHARED[:4], (QUIET, GREEDY, GREEDY, GREEDY))
    assert directory.tiers[0].limit(4, 8) == []
    for key, owner, victim in (
        (SHARED[4], QUIET, SHARED[1]),
        (SHARED[5], GREEDY, SHARED[2]),
        (SHARED[6], QUIET, SHARED[0]),
    ):
        entry = filled(directory, key, owner=owner)
        assert directory.spill_begun(entry, 0) == [victim]
        directory.spill_ended(entry, 0, stored=True)
        directory.tiers[0].deleted([victim])
        directory.check(idle=True)
    assert directory.crowded[1] == 3


def test_an_owner_with_its_quota_of_the_whole_asks_for_no_more_room():
    directory = Directory(8, [8], share=0.5)
    for key in SHARED[:5]:
        entry = filled(directory, key, owner=GREEDY)
        victims = directory.spill_begun(entry, 0)
        directory.spill_ended(entry, 0, stored=True)
        directory.tiers[0].deleted(victims or ())
    directory.tiers[0].limit(4, 8)
    entry = filled(directory, SHARED[5], owner=GREEDY)
    assert directory.spill_begun(entry, 0) == [SHARED[1]]
    assert directory.crowded == [0, 0]


def test_unwanted_chunks_leave_known_or_not_but_not_while_they_are_written():
    directory = Directory(1, [4])
    directory.tiers[0].found([A])
    entry = filled(directory, B)
    assert directory.spill_begun(entry, 0) == []
    assert directory.tiers[0].leave_all([A, B, C]) == [A, C]
    assert directory.tiers[0].leave_all([A, B, C]) == [], "they are being deleted"
    assert not directory.tiers[0].takes(C), "nor may anybody write them meanwhile"
    directory.tiers[0].deleted([A, C])
    directory.spill_ended(entry, 0, stored=True)
    assert list(directory.tiers[0].order) == [B]
    directory.check(idle=True)


def test_found_chunks_beyond_the_capacity_are_given_back_coldest_first():
    directory = Directory(1, [2])
    assert directory.tiers[0].found([A, B, C]) == [A]
    assert list(directory.tiers[0].order) == [B, C]


@pytest.mark.parametrize("step", ["reserve twice", "unpin unpinned", "fill ready", "pin gone"])
def test_broken_promises_are_loud(step):
    directory = Directory(2)
    (entry,) = ready(directory, A)
    with pytest.raises(StateError):
        if step == "reserve twice":
            directory.reserve(A, ())
        elif step == "unpin unpinned":
            directory.unpin((entry,))
        elif step == "fill ready":
            directory.filled((entry,))
        else:
            directory.invalidate(A)
            directory.pin(entry)


def test_check_sees_what_is_not_at_rest():
    directory = Directory(1)
    directory.reserve(A, ())
    directory.check()
    assert not any(directory.checking())
    with pytest.raises(StateError, match="not at rest"):
        directory.check(idle=True)


def test_a_write_makes_a_chunk_no_hotter_and_evictions_pass_it_over():
    directory = Directory(2, [8])
    _, coldest = ready(directory, A, B)
    assert directory.spill_begun(coldest, 0) == []
    entry = directory.reserve(C, ())
    assert entry is not None and (directory.get(A), directory.get(B)) == (None, coldest)
    directory.filled((entry,))
    directory.spill_ended(coldest, 0, stored=True)
    assert directory.reserve(D, ()) is not None
    assert directory.get(B) is None, "it kept its place"
    directory.check()


def test_a_reader_that_leaves_during_a_write_makes_the_chunk_the_hottest():
    directory = Directory(2, [8])
    _, coldest = ready(directory, A, B)
    directory.pin(coldest)
    assert directory.spill_begun(coldest, 0) == []
    directory.unpin((coldest,))
    directory.check()
    directory.spill_ended(coldest, 0, stored=True)
    directory.check(idle=True)
    assert directory.reserve(C, ()) is not None
    assert directory.get(A) is None and directory.get(B) is coldest


def test_what_leaves_soon_is_named_once_coldest_first():
    directory = Directory(4)
    entries = ready(directory, A, B, C, D)
    assert directory.next_out() == entries[:1:-1], "half of RAM, leaf first"
    assert directory.next_out() == []
    assert directory.next_out(None)[::-1] == entries[:2]
    assert directory.evicted_unoffered == 0


def test_what_is_read_does_not_leave_soon():
    directory = Directory(4)
    entries = ready(directory, A, B, C, D)
    directory.pin(entries[3])
    assert directory.next_out() == entries[2:0:-1]


def test_what_leaves_soon_is_named_once_where_it_is_the_owners_coldest_too():
    directory, entries = Directory(4, share=0.5), list[Entry]()
    for key in (A, B):
        entry = filled(directory, key, owner=1)
        entries.append(entry)
    assert directory.absent([A, C, B, D]) == [C, D]
    ready(directory, C, D)
    assert directory.next_out(1) == entries


def test_a_slot_that_must_be_given_back_is_not_used_again():
    directory = Directory(4)
    entries = [directory.reserve(each, ()) for each in (A, B, C, D)]
    assert not directory.resize(2, 10), "nothing can leave now"
    for entry in entries[:2]:
        assert entry is not None
        directory.fill_failed(entry)
        assert directory.reserve(key("E"), ()) is None
    leaving = directory.slots.leaving(10)
    assert len(leaving) == 2
    directory.slots.gave_back(leaving)
    assert directory.slots.occupied == 2
    directory.resize(3)
    assert directory.reserve(key("E"), ()) is not None
    assert directory.reserve(key("F"), ()) is None
    directory.check()


def test_an_entry_knows_which_tiers_have_exactly_its_bytes_and_what_only_writes_it():
    directory = Directory(2, (2, 2))
    (own,) = ready(directory, A)
    promoted = directory.reserve(B, (), 1)
    assert promoted is not None
    directory.filled((promoted,), 1)
    assert (own.copies, promoted.copies) == (0, 0b10)
    assert directory.spill_begun(own, 1) == [] and own.writes == 1
    assert directory.spill_ended(own, 1, stored=True)
    assert (own.copies, own.writes) == (0b10, 0)
    assert [tier.place for tier in directory.tiers] == [1, 2]
    directory.check(idle=True)


def test_evictions_are_counted_and_those_that_nobody_was_told_of():
    directory = Directory(3)
    ready(directory, A, B, C)
    assert len(directory.next_out()) == 2
    for name in "DEF":
        directory.reserve(key(name), ())
    assert (directory.evicted, directory.evicted_unoffered) == (3, 1)


def test_what_a_reader_has_becomes_hot_when_something_has_to_leave():
    directory = Directory(4)
    read = ready(directory, A, B)
    ready(directory, C)
    ready(directory, D)
    for entry in read:
        directory.pin(entry)
    assert directory.reserve(key("E"), ()) is not None
    assert list(directory.order) == [D, B, A] and directory.get(C) is None


def test_pins_of_a_run_and_slots_of_an_owner_are_counted_in_both_directions():
    directory = Directory(4, share=0.5)
    entries = [filled(directory, each, owner=7) for each in (A, B)]
    for _ in range(2):
        assert directory.pin_ready([A, B, C]) == entries
        directory.check()
    for entry in (*entries, *entries):
        directory.unpin((entry,))
    directory.check(idle=True)
    for each in (A, B):
        directory.invalidate(each)
    directory.check(idle=True)
    assert directory.reserve(C, (), owner=7) is not None


def test_the_pinned_run_ends_where_a_chunk_is_missing():
    directory = Directory(4)
    first, _ = ready(directory, A, B)
    assert directory.pin_ready([A, C, B]) == [first]


def test_ready_chunks_are_named_and_a_run_ends_where_one_is_missing():
    directory = Directory(4, (2,))
    ready(directory, A)
    directory.reserve(B, ())
    directory.tiers[0].hold(C)
    assert directory.held_run([A, C]) == 2 and directory.held_run([A, D, C]) == 1


def test_an_owner_hears_of_its_own_chunks_that_leave_for_the_second_half_of_its_quota():
    directory = Directory(12, share=0.5)
    entries = [filled(directory, key(name), owner=1) for name in "ABCDEF"]
    assert directory.next_out() == []
    assert directory.next_out(1) == entries[:3]
    few = Directory(8, share=0.5)
    for name in "AB":
        filled(few, key(name), owner=1)
        assert few.next_out(1) == []


def test_at_most_512_chunks_are_looked_through_for_what_leaves_soon():
    directory = Directory(2200, share=0.5)
    for owner in (0, 1):
        for number in range(1100):
            filled(directory, key(f"{owner}/{number}"), owner=owner)
    assert len(directory.next_out()) == 512
    assert len(directory.next_out(1)) == 512


def test_where_no_owner_has_a_quota_all_hear_of_the_same_chunks():
    directory = Directory(2)
    entries = [filled(directory, each, owner=1) for each in (A, B)]
    assert directory.next_out(1) == entries[:1]
    directory.check(idle=True)


def test_chunks_without_an_owner_have_no_quota():
    directory = Directory(2, [2], share=0.5)
    ready(directory, A, B)
    assert directory.tiers[0].found([A, B]) == []
    assert directory.held_run([A, B]) == directory.ready_run([A, B]) == 2
    directory.check(idle=True)


def test_a_chunk_that_found_no_free_room_is_counted_in_its_place():
    directory = Directory(1, [1, 1])
    for each, victims in ((A, []), (B, [A])):
        (entry,) = ready(directory, each)
        assert directory.spill_begun(entry, 1) == victims
        directory.spill_ended(entry, 1, stored=True)
    assert directory.crowded == [1, 0, 1]


def test_chunks_are_counted_by_state_and_named_by_place():
    directory = Directory(4, [2])
    directory.tiers[0].found([A, D])
    (read, _), filling = ready(directory, A, B), directory.reserve(C, ())
    assert filling is not None
    directory.pin(read)
    counts = {"ram_free": 1, "ram_ready": 2, "ram_filling": 1, "ram_pinned": 1}
    assert directory.usage() == counts
    assert sorted(directory.keys()) == [A, A, B, C, D]


def test_fewer_slots_are_reached_in_steps_and_more_slots_at_once():
    directory = Directory(4)
    ready(directory, A, B, C, D)
    assert directory.resize(3) and in_use(directory) == 4, "nothing has to leave in this step"
    assert directory.resize(2, 1) and in_use(directory) == 3
    assert not directory.resize(2, 1) and in_use(directory) == 2
    directory.slots.gave_back(directory.slots.leaving(4))
    assert not directory.resize(4) and directory.usage()["ram_free"] == 2


def test_what_is_over_leaves_first_and_a_part_that_fits_asks_for_no_more():
    directory = Directory(2)
    ready(directory, A)
    ready(directory, C)
    directory.over([C])
    assert directory.reserve(D, ()) is not None
    assert directory.get(C) is None and directory.get(A) is not None
    assert not Directory(2).resize(1, 1)


def test_what_is_over_is_not_named_before_it_is_asked_for_or_stored_again():
    directory = Directory(2)
    a, b = ready(directory, A, B)
    directory.over([A, B])
    assert directory.next_out(None)[::-1] == []
    directory.used([A])
    assert directory.next_out(None)[::-1] == [a]
    directory.ordered([B])
    assert directory.next_out(None)[::-1] == [b]


def test_what_is_filled_at_that_moment_is_not_over_and_what_only_a_tier_has_is():
    directory = Directory(2, [2])
    directory.tiers[0].found([C, B])
    entry = taken(directory, A)
    directory.over([A, B])
    directory.filled((entry,))
    assert directory.next_out(None)[::-1] == [entry]
    assert directory.tiers[0].found([D]) == [B]


def test_what_is_used_leaves_after_the_rest_of_every_place():
    directory = Directory(2, [2])
    directory.tiers[0].found([A, B])
    ready(directory, A)
    ready(directory, B)
    directory.used([A])
    assert directory.tiers[0].found([C]) == [B]
    ready(directory, C)
    assert directory.ready_run([A]) == 1 and directory.get(B) is None


def test_what_is_kept_leaves_after_the_rest_of_every_place_until_its_time_is_over():
    directory = Directory(2, [2])
    directory.tiers[0].found([A, B])
    ready(directory, A)
    ready(directory, B)
    directory.keep([A], 10)
    for now, each, victim in ((9, C, B), (9, D, C), (10, key("E"), D), (10, key("F"), A)):
        directory.tick(now)
        assert directory.tiers[0].found([each]) == [victim]
        ready(directory, each)
        assert directory.get(victim) is None
    directory.check()


class Heard(Observer):
    def __init__(self):
        self.events: list[object] = []

    def came(self, place, key):
        self.events.append(("came", place, key))

    def left(self, place, key, how):
        self.events.append(("left", place, key, how))

    def missing(self, key, how):
        self.events.append(("missing", key, how))

    def used(self, run):
        self.events.append(("used", *run))

    def stored(self, run):
        self.events.append(("stored", *run))


def test_observers_hear_what_comes_to_ram_what_leaves_it_and_how_and_what_is_used():
    directory, heard = Directory(1), Heard()
    directory.observers.add(heard)
    ready(directory, A)
    directory.used([A, B])
    ready(directory, B)
    directory.invalidate(B)
    assert heard.events == [
        ("came", 0, A),
        ("stored", A),
        ("used", A, B),
        ("left", 0, A, Left.EVICTED),
        ("came", 0, B),
        ("stored", B),
        ("left", 0, B, Left.FORGOTTEN),
        ("missing", B, Left.FORGOTTEN),
    ]


def test_a_chunk_that_stays_in_a_tier_for_another_owner_is_not_told_to_be_missing():
    directory, heard = Directory(1, [1]), Heard()
    directory.tiers[0].found([A], [7])
    directory.observers.add(heard)
    assert directory.invalidate(A, 8) == []
    assert heard.events == []
