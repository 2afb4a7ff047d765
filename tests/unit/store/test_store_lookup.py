"""What the Store forecasts of its tiers, by a clock that tests turn: measured reads, queues, and
trial reads."""

import pytest

from kvtier.core.lookup import LookupResult, Progress
from tests.clock import Clock
from tests.stores import SlowTier, held, keys, over, save, spilled


@pytest.fixture
def clock():
    return Clock()


def test_a_forecast_agrees_with_match_and_the_first_step_is_what_is_there(clock):
    store, _ = over(clock=clock)
    save(store, keys(1, 2))
    assert store.lookup(keys(1, 2, 3)) == LookupResult([(2, 0.0)], why="cold")
    assert store.lookup(keys(7)) == LookupResult([(0, 0.0)], why="cold")
    assert store.lookup([]) == LookupResult([(0, 0.0)])


def test_of_each_chunk_by_itself_it_is_known_what_a_lookup_would_find(clock):
    run = keys(1, 2, 3, 4)
    tier = SlowTier(clock, 0.5)
    store, (lane,) = spilled(run, tier, clock=clock)
    every = [*run, *keys(900, 77)]

    def found():
        return [bool(store.lookup([key]).known) for key in every]

    assert store.known(every) == [True] * 5 + [False] == found()
    with store.load(run, most=2):
        assert store.known(every) == [True] * 5 + [False] == found(), "on their way up"
        lane.run()
    with store.save(keys(77)):
        assert store.known(keys(77)) == [False], "not filled yet"
    shared, _ = over(SlowTier(clock, 0.5, shared=True), clock=clock)
    assert shared.known(run) == [False] * 4, "only asking would tell"


def test_reads_are_timed_and_what_is_queued_before_is_counted(clock):
    run = keys(1, 2, 3, 4)
    store, (lane,) = spilled(run, SlowTier(clock, 0.5), clock=clock)
    assert store.lookup(run).steps == [(0, 0.0), (4, pytest.approx(2.0))]
    with store.load(run, most=3):
        assert store.lookup(run).steps == [(0, 0.0), (4, pytest.approx(2.0))], (
            "three on their way, one behind them"
        )
        lane.turn()
        assert store.lookup(run).steps == [(1, 0.0), (4, pytest.approx(1.5))]
        lane.run()
    assert store.lookup(run).ready == 3


def test_each_tier_is_a_step_of_its_own(clock):
    fast, slow = SlowTier(clock, 0.1, name="fast"), SlowTier(clock, 2.0, name="slow")
    run = keys(1, 2, 3)
    fast.held, slow.held = held(run[:2]), held(run)
    store, lanes = over(fast, slow, clock=clock)
    assert store.lookup(run).steps == [(0, 0.0), (2, None), (3, None)], (
        "nothing was read or written yet"
    )
    with store.load(run):
        for lane in lanes:
            lane.run()
    save(store, keys(7, 8, 9, 10))
    assert store.lookup(run).steps == [(0, 0.0), (2, pytest.approx(0.2)), (3, pytest.approx(2.0))]


def test_a_claim_of_a_part_moves_nothing_of_the_rest(clock):
    run = keys(1, 2, 3, 4)
    tier = SlowTier(clock, 0.5)
    store, (lane,) = spilled(run, tier, clock=clock)
    with store.load(run, most=2) as lease:
        lane.run()
        assert lease.poll() == Progress(2, 0)
    assert tier.reads == run[:2]
    assert store.stats()["load_asked"] == 4, "the whole prompt was asked for"
    with store.load(run, most=0) as lease:
        assert lease.poll() == Progress(0, 0)
    store.check(idle=True)


def test_a_declined_hit_leaves_no_pin_and_no_slot(clock):
    run = keys(1, 2, 3)
    store, (lane,) = spilled(run, SlowTier(clock, 9.0), clock=clock)
    for _ in range(3):
        store.lookup(run)
        store.load(run, most=0)
        store.decline(run, "slower")
        lane.run()
        store.check(idle=True)
    assert store.stats()["declined_slower"] == 9


def test_reads_that_nobody_waits_for_any_more_are_not_made(clock):
    run = keys(1, 2, 3)
    tier = SlowTier(clock, 5.0)
    store, (lane,) = spilled(run, tier, clock=clock)
    lease = store.load(run)
    lane.turn()
    again = store.load(run[:1])
    lease.close()
    lane.run()
    assert tier.reads == run[:1]
    assert again.poll() == Progress(1, 0)
    again.close()
    store.check(idle=True)
    assert store.lookup(run).progress == Progress(1, 2), "they can be had as before"


def test_a_tier_that_is_declined_is_tried_now_and_then_and_believed_when_it_is_fast_again(clock):
    run = keys(1, 2, 3, 4)
    tier = SlowTier(clock, 8.0)
    store, (lane,) = spilled(run, tier, clock=clock)
    for _ in range(50):
        store.decline(run, "slower")
        lane.run()
    assert tier.reads == run[:1], "one read, however often it is declined"
    tier.seconds = 0.001
    for _ in range(4):
        clock.now += 60
        store.decline(run[1:], "slower")
        lane.run()
    assert len(tier.reads) == 5
    assert (store.lookup(run).steps[-1][1] or 99) < 0.1
    store.check(idle=True)


def test_a_shared_tier_that_is_not_asked_is_tried_too(clock):
    run = keys(1, 2)
    tier = SlowTier(clock, 0.25, shared=True)
    store, (lane,) = over(tier, clock=clock)
    tier.held.update(held(run))  # another server wrote them
    asking = store.lookup(run).asking
    assert asking is not None and asking.answer_s is None and asking.odds == 1.0
    store.decline(run, "unasked")
    lane.run()
    assert store.lookup(run).progress == Progress(0, 1)
    assert tier.reads == run[:1]
    asking = store.lookup(run).asking
    assert asking is not None
    assert [asking.answer_s, asking.arrive_s] == pytest.approx([0.25, 0.5])
    store.check(idle=True)


def test_a_trial_with_no_room_on_the_lane_is_made_later(clock):
    run = keys(1, 2)
    tier = SlowTier(clock, 0.5)
    store, (lane,) = spilled(run, tier, clock=clock)
    lane.closed = True
    store.decline(run, "slower")
    lane.closed = False
    clock.now += 60
    store.decline(run, "slower")
    lane.run()
    assert tier.reads == run[:1]
