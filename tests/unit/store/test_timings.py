"""What a Store times, by a clock that stands still: from where to where, and under which tier."""

import pytest

from kvtier.core.report import BOUNDS
from kvtier.store.observers.timings import Histogram
from kvtier.store.reports.status import read
from tests.clock import Clock
from tests.stores import SlowTier, keys, over


class Bench:
    def __init__(self, slots=4, capacity=8):
        self.clock = Clock()
        self.tier = SlowTier(self.clock, 0.5, capacity)
        self.store, (self.lane,) = over(self.tier, slots=slots, clock=self.clock)

    def save(self, keys, seconds=0.0):
        with self.store.save(keys) as lease:
            self.clock.now += seconds
            lease.commit()
        self.lane.run()


@pytest.fixture
def bench():
    return Bench()


def only(histogram):
    """The one duration that was counted."""
    assert sum(histogram.counts) == 1, histogram.counts
    return sum(histogram.sums)


def test_a_save_lasts_until_its_slots_are_filled(bench):
    bench.save(keys(1, 2), seconds=0.25)
    assert only(bench.store.timings.of("save")) == 0.25
    bench.store.save(keys(7)).close()
    bench.save(keys(1, 2))
    assert sum(bench.store.timings.of("save").counts) == 1, (
        "what was given up, and what was there already, is not a save"
    )


def test_a_spill_is_the_write_of_one_chunk(bench):
    bench.save(keys(1, 2))
    spills = bench.store.timings.of("spill", bench.tier.name)
    assert (sum(spills.counts), sum(spills.sums)) == (2, 1.0)


def test_a_lookup_is_counted_whether_it_finds_anything_or_not(bench):
    bench.store.lookup(keys(1, 2))
    bench.save(keys(1, 2))
    bench.store.lookup(keys(1, 2))
    assert sum(bench.store.timings.of("lookup").counts) == 2


def test_a_load_lasts_until_it_is_closed_and_its_wait_until_all_is_there(bench):
    bench.save(keys(1))
    with bench.store.load(keys(1)) as lease:
        assert lease.poll().ready == 1
        bench.clock.now += 2.0
        lease.poll()
    timings = bench.store.timings
    assert (only(timings.of("load", "ram")), only(timings.of("load_wait"))) == (2.0, 0.0)
    assert sum(timings.of("load", bench.tier.name).counts) == 0


def test_a_load_that_needs_a_lower_tier_is_that_tiers_and_its_promotions_have_their_queue_in_them(
    bench,
):
    bench.save(keys(1))
    bench.save(keys(3, 4, 5, 6))  # all of RAM
    with bench.store.load(keys(1)) as lease:
        assert lease.poll().coming == 1
        bench.clock.now += 1.0  # in the queue
        bench.lane.run()
        assert lease.poll() == (1, 0)
        bench.clock.now += 4.0  # the copy
    timings, name = bench.store.timings, bench.tier.name
    assert only(timings.of("promotion", name)) == 1.5
    assert (
        only(timings.of("load_wait")),
        only(timings.of("load", name)),
        sum(timings.of("load", "ram").counts),
    ) == (1.5, 5.5, 0)


def test_evictions_are_counted_where_they_happen():
    bench = Bench(slots=2, capacity=3)
    bench.save(keys(1, 2))
    bench.save(keys(3, 4))
    ram, below = read(bench.store).tiers
    assert (ram.evicted, below.evicted) == (2, 1)
    assert (
        (ram.stores - ram.evicted, below.stores - below.evicted) == (ram.held, below.held) == (2, 3)
    )
    bench.store.invalidate(keys(3, 4))
    assert read(bench.store).tiers[0].evicted == 2, "what is dropped on purpose is not evicted"


def test_a_duration_is_counted_in_the_place_whose_bounds_hold_it():
    for place, bound in enumerate(BOUNDS):
        for seconds in (bound * 0.51, bound * 0.99):
            histogram = Histogram()
            histogram.add(seconds)
            assert histogram.counts.index(1) == place
            assert histogram.sums[place] == seconds
