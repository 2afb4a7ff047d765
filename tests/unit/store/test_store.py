"""The Store over hand-turned lanes: what each verb promises, one promise a test."""

from contextlib import suppress

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.lookup import Progress
from kvtier.core.steps import whole
from kvtier.core.tenant import UNOWNED
from kvtier.testing import DictTier
from tests.clock import Clock
from tests.stores import AwayTier, held, keys, over, save, shown, spilled


def test_a_run_is_matched_up_to_its_first_gap():
    store, _ = over()
    save(store, keys(1, 2))
    assert store.lookup(keys(1, 2, 3)).progress == Progress(2, 0)
    assert store.lookup(keys(9, 2)).progress == Progress(0, 0)


def test_of_a_run_longer_than_ram_the_beginning_is_served_though_the_end_is_there():
    run = keys(1, 2, 3, 4, 5)
    store, (lane,) = over(DictTier(64, held=held(run)), slots=3)
    save(store, run[2:])
    with store.load(run) as lease:
        lane.run()
        assert lease.poll() == Progress(3, 0)
        assert shown(lease) == run[:3]
    store.check(idle=True)


def test_saving_again_reserves_nothing():
    store, _ = over()
    assert save(store, keys(1, 2)) == 2
    assert save(store, keys(1, 2, 3)) == 1


def test_an_uncommitted_save_is_never_served():
    store, _ = over()
    lease = store.save(keys(1))
    assert store.load(keys(1)).poll() == Progress(0, 0)
    lease.close()
    assert store.lookup(keys(1)).progress == Progress(0, 0)
    store.check(idle=True)


def test_what_is_in_ram_is_claimed_at_once_as_a_load_would_claim_it():
    told = []
    for at_once in (True, False):
        store, (lane,) = over(DictTier(64))
        save(store, keys(1, 2, 3))
        save(store, keys(7))
        lane.run()
        run = keys(1, 2, 3)
        lease = store.load_ready(run, 1) if at_once else store.load(run, 1)
        assert lease is not None
        assert lease.ready == (2 if at_once else 0)
        assert lease.poll() == Progress(2, 0)
        assert shown(lease) == run[1:] == lease.keys
        lease.close()
        store.check(idle=True)
        told.append((lease.sources, list(store._directory.order), store.stats()))
    assert told[0] == told[1]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_run_of_which_a_chunk_is_not_in_ram_is_not_claimed_at_once(lost):
    run = keys(1, 2, 3)
    store, (lane,) = over(DictTier(64, held=held(run)))
    save(store, [*run[:lost], *run[lost + 1 :]])
    order, counts = list(store._directory.order), store.counts.copy()
    assert store.load_ready(run) is None
    assert (list(store._directory.order), store.counts) == (order, counts)
    lane.run()
    store.check(idle=True)


def test_a_run_that_would_hold_the_lock_for_long_is_not_claimed_at_once():
    run = keys(*range(2049))
    store, _ = over(slots=len(run))
    save(store, run)
    assert store.load_ready(run) is None
    with store.load_ready(run[:-1]) or pytest.fail("all of it is in RAM") as lease:
        assert lease.poll() == Progress(2048, 0)


def test_of_a_run_of_which_nothing_is_known_one_call_tells_and_notes_as_much_as_two():
    told = []
    for at_once in (True, False):
        store, (lane,) = over(DictTier(64))
        save(store, keys(1, 2))
        save(store, keys(7))
        lane.run()
        run = keys(1, 2, 3, 4)
        if at_once:
            result, lease = store.load_unknown(run, 2)
        else:
            result, lease = store.lookup(run[2:]), store.load(run, 2, most=0)
        assert lease.poll() == result.progress == Progress(0, 0) and lease.views() == []
        lease.close()
        store.check(idle=True)
        looked = sum(store.timings.of("lookup").counts)
        told.append((result, list(store._directory.order), store.stats(), looked))
    assert told[0] == told[1]


@pytest.mark.parametrize("known", ["", "RAM", "a tier", "a shared tier", "too long"])
def test_a_run_that_may_be_known_is_looked_up(known):
    tier = DictTier(64, shared=known == "a shared tier")
    store, (lane,) = over(tier)
    save(store, keys(7) if known != "RAM" else keys(1))
    if known == "a tier":
        save(store, keys(1))
        lane.run()
        for other in range(20, 24):
            save(store, keys(other))
    run = keys(*range(1, 600 if known == "too long" else 3))
    order, counts = list(store._directory.order), store.counts.copy()
    assert (store.load_unknown(run) is None) == bool(known)
    if known:
        assert (list(store._directory.order), store.counts) == (order, counts)


def test_a_lease_ends_once():
    store, _ = over()
    lease = store.save(keys(1))
    lease.commit()
    lease.close()
    assert store.lookup(keys(1)).ready == 1
    with pytest.raises(StateError):
        lease.commit()


def test_a_prompt_longer_than_the_pool_keeps_its_beginning():
    store, _ = over(slots=2)
    assert save(store, keys(1, 2, 3)) == 2
    assert store.lookup(keys(1, 2, 3)).progress == Progress(2, 0)
    assert store.stats()["save_refused"] == 1


def test_spilled_chunks_outlive_eviction_and_come_back_whole():
    store, (lane,) = over(DictTier(8), slots=2)
    first, second = keys(1, 2), keys(3, 4)
    save(store, first)
    lane.run()
    save(store, second)
    assert store.lookup(first).progress == Progress(0, 2)
    with store.load(first) as lease:
        assert lease.poll() == Progress(0, 2)
        lane.run()
        assert lease.poll() == Progress(2, 0)
        assert shown(lease) == first
        assert lease.sources == ["dict", "dict"]
    assert store.load(first).sources == []
    again = store.load(first)
    again.poll()
    assert again.sources == ["ram", "ram"]


def test_a_failed_promotion_makes_the_match_shorter():
    tier = DictTier(8)
    store, (lane,) = over(tier, slots=3)
    run = keys(1, 2, 3)
    save(store, run)
    lane.run()
    save(store, keys(7, 8, 9))
    del tier.held[run[1]]
    with store.load(run) as lease:
        assert lease.poll() == Progress(0, 3)
        lane.run()
        assert lease.poll() == Progress(1, 0)
    assert store.lookup(run).progress == Progress(1, 0), "what cannot be read is not offered again"


def test_the_next_tier_is_asked_when_one_fails():
    fast, slow = DictTier(8, name="fast"), DictTier(8, name="slow")
    store, lanes = over(fast, slow, slots=1)
    save(store, keys(1))
    for lane in lanes:
        lane.run()
    save(store, keys(2))
    fast.held.clear()
    with store.load(keys(1)) as lease:
        for lane in lanes:
            lane.run()
        assert lease.poll() == Progress(1, 0)


def test_what_cannot_be_read_now_is_a_miss_now_and_there_later():
    run, tier = keys(1, 2), AwayTier(8)
    store, (lane,) = spilled(run, tier)
    tier.away = True
    with store.load(run) as lease:
        lane.run()
        assert lease.poll() == Progress(0, 0)
    assert tier.reads == 2, "each is tried once"
    assert store.lookup(run).progress == Progress(0, 2)
    tier.away = False
    with store.load(run) as lease:
        lane.run()
        assert shown(lease) == [] and lease.poll() == Progress(2, 0)
        assert shown(lease) == run
    store.check(idle=True)


def test_a_tier_that_stays_away_costs_no_slots_and_is_tried_again_by_one_read():
    run, clock = keys(1, 2, 3, 4), Clock()
    tier = AwayTier(8, clock)
    store, (lane,) = spilled(run, tier)
    tier.away = True
    for _ in range(3):
        with store.load(run):
            lane.run()
    assert tier.reads == 3, "after three faults it is left alone"
    there = keys(*range(70, 74))
    save(store, there)
    for _ in range(3):
        with store.load(run) as lease:
            assert lease.poll() == Progress(0, 0)
    assert store.lookup(there).ready == 4, "nobody left RAM for it"
    tier.away = False
    clock.now += 60
    for ready in (1, 4):
        with store.load(run) as lease:
            lane.run()
            assert lease.poll() == Progress(ready, 0)
    assert tier.reads == 3 + 1 + 3


def test_a_machine_that_is_away_is_left_alone_and_the_tier_s_others_are_not():
    tier = AwayTier(16)
    singles = [keys(number) for number in (1, 2, 3, 4, 5, 6)]
    store, (lane,) = spilled([key for (key,) in singles], tier)
    tier.lost = frozenset(single[0] for single in singles[:5])
    for single in singles[:5]:
        with store.load(single) as lease:
            lane.run()
            assert lease.poll() == Progress(0, 0)
    assert tier.reads == 3, "the machine is left alone"
    with store.load(singles[5]) as lease:
        lane.run()
        assert lease.poll() == Progress(1, 0), "the other one is not"


def test_a_chunk_that_no_tier_can_read_now_is_tried_once_in_each():
    fast, slow = AwayTier(8, name="fast"), AwayTier(8, name="slow")
    run = keys(1)
    store, lanes = spilled(run, fast, slow)
    fast.away = slow.away = True
    with store.load(run) as lease:
        for lane in lanes:
            lane.run()
        assert lease.poll() == Progress(0, 0)
    assert (fast.reads, slow.reads) == (1, 1)
    slow.away = False
    with store.load(run) as lease:
        for lane in lanes:
            lane.run()
        assert lease.poll() == Progress(1, 0)
    store.invalidate_all()
    for lane in lanes:
        lane.run()
    assert not fast.held and not slow.held, "a clear reaches what could not be read"
    store.check(idle=True)


class Bug(DictTier):
    """Raises where ``raises`` says, as a tier must not."""

    raises = ""

    def read(self, key, into):
        if self.raises == "read":
            raise RuntimeError
        return super().read(key, into)

    def write(self, key, data, owner=UNOWNED):
        if self.raises == "write":
            raise RuntimeError
        return super().write(key, data, owner)


def run_all(lane):
    """As a lane does: work that raises does not end it."""
    while len(lane):
        with suppress(RuntimeError):
            lane.run()


def test_a_tier_that_raises_costs_a_miss_and_leaves_nothing_in_progress():
    tier = Bug(8)
    store, (lane,) = over(tier, slots=1)
    tier.raises = "write"
    save(store, keys(1))
    run_all(lane)
    store.check(idle=True)
    tier.raises = ""
    save(store, keys(2))
    lane.run()
    save(store, keys(3))
    lane.run()
    tier.raises = "read"
    with store.load(keys(2)) as lease:
        run_all(lane)
        assert lease.poll() == Progress(0, 0)
    store.check(idle=True)
    assert store.lookup(keys(2)).progress == Progress(0, 1), "it may be there later"


def test_a_full_lane_costs_a_shorter_match_not_a_wait():
    store, (lane,) = over(DictTier(8), slots=3, bound=1)
    run = keys(1, 2, 3)
    for end in (1, 2, 3):
        save(store, run[:end])
        lane.run()
    save(store, keys(7, 8, 9))
    with store.load(run) as lease:
        assert lease.poll() == Progress(0, 1)
    lane.run()
    store.check(idle=True)


def test_chunks_that_only_a_shared_tier_knows_are_found_by_load():
    run = keys(1, 2)
    store, (lane,) = over(DictTier(8, shared=True), slots=4)
    store.tiers[0].held.update(held(run))  # another server wrote them
    assert store.lookup(run).progress == Progress(0, 0)
    with store.load(run) as lease:
        assert lease.poll().coming == 1, "not known yet"
        lane.run()
        assert lease.poll() == Progress(2, 0)
        assert shown(lease) == run


def test_what_a_tier_kept_is_known_at_start():
    run = keys(1, 2)
    tier = DictTier(8, held=held(run))
    store, _ = over(tier)
    assert store.lookup(run).progress == Progress(0, 2)


def test_a_shrunken_tier_gives_up_its_coldest():
    run = keys(1, 2, 3)
    tier = DictTier(2, held=held(run[::-1]))
    store, (lane,) = over(tier)
    lane.run()
    assert set(tier.held) == set(run[:2])
    assert store.lookup(run).progress == Progress(0, 2)


def test_forgotten_chunks_leave_every_place():
    tier = DictTier(8)
    store, (lane,) = over(tier)
    save(store, keys(1, 2))
    lane.run()
    store.invalidate(keys(1, 2)[1:])
    lane.run()
    assert store.lookup(keys(1, 2)).progress == Progress(1, 0)
    assert set(tier.held) == set(keys(1))
    store.invalidate_all()
    lane.run()
    assert not tier.held and store.lookup(keys(1)).progress == Progress(0, 0)
    store.check(idle=True)


def test_a_chunk_evicted_before_its_write_is_counted_and_not_written():
    tier = DictTier(8)
    store, (lane,) = over(tier, slots=1)
    save(store, keys(1))
    save(store, keys(2))
    lane.run()
    assert set(tier.held) == set(keys(2))
    assert store.stats()["dict_spill_late"] == 1


def test_a_store_whose_tier_has_a_write_to_come_is_not_at_rest():
    store, (lane,) = over(DictTier(8))
    save(store, keys(1))
    store.check()
    with pytest.raises(StateError, match="not at rest: work for dict waits"):
        store.check(idle=True)
    assert whole(store.checking()) == ""
    assert "not at rest: work for dict waits" in whole(store.checking(True))
    lane.run()
    assert whole(store.checking(True)) == ""
    store.check(idle=True)


def test_close_runs_queued_writes_and_tells_tiers_their_order():
    class Closing(DictTier):
        order: list[ChunkKey]

        def close(self, coldest_first=()):
            self.order = list(coldest_first)

    tier = Closing(8)
    store, _ = over(tier)
    run = keys(1, 2)
    save(store, run)
    assert store.close() and store.close()
    assert tier.order == run[::-1], "the leaf is the coldest"


def test_wait_returns_at_once_when_something_has_arrived():
    store, (lane,) = over(DictTier(8), slots=1)
    save(store, keys(1))
    lane.run()
    save(store, keys(2))
    with store.load(keys(1)):
        lane.run()
        store.wait(timeout_s=600)
