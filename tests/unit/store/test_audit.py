"""The audit: slots that change behind everybody's back are found by comparison, and right chunks
are never blamed."""

import logging

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Progress
from kvtier.core.pool import Pool
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane, content
from tests.stores import assembled, keys

SLOT = 512 * 1024  # two pieces


class Bench:
    """A Store over one tier, whose lane is turned by hand."""

    def __init__(self, one_in=1, *, slots=4, shared=False):
        self.tier, self.lane = DictTier(64, shared=shared), ManualLane()
        self.store = Store(Pool(slots, SLOT), [(self.tier, self.lane)])
        self.store.audit.one_in = one_in

    def save(self, run, version=b""):
        with self.store.save(run) as lease:
            for key, view in zip(lease.keys, lease.views(), strict=True):
                view[:] = content(ChunkKey(key + version), SLOT)
            lease.commit()
        self.lane.run()

    def load(self, run):
        with self.store.load(run) as lease:
            self.lane.run()
            assert lease.poll() == Progress(len(run), 0)
        self.lane.run()
        self.store.check(idle=True)

    def flip(self, run, at):
        """One bit of the last chunk's slot changes while it is held in RAM."""
        with self.store.load(run) as lease:
            lease.poll()
            lease.views()[-1][at] ^= 1
            self.store.audit.one_in, one_in = 0, self.store.audit.one_in
        self.store.audit.one_in = one_in

    @property
    def counts(self):
        """Audited, and of them wrong."""
        counts = self.store.stats()
        return counts.get("audited", 0), counts.get("audit_mismatch", 0)


@pytest.mark.parametrize("at", [0, SLOT // 2, SLOT - 1])
def test_a_slot_that_changed_is_found_named_once_and_dropped_everywhere(at, caplog):
    bench = Bench()
    bench.save(keys(1, 2))
    bench.flip(keys(1, 2), at)
    bench.load(keys(1, 2))
    assert bench.counts == (2, 1)
    assert bench.store.lookup(keys(1, 2)).progress == Progress(1, 0)
    assert set(bench.tier.held) == set(keys(1)), "the copy below may be the wrong one as well"
    bench.save(keys(1, 2))
    bench.flip(keys(1, 2), at)
    bench.load(keys(1, 2))
    assert bench.counts == (4, 2)
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert keys(1, 2)[1].hex()[:16] in said.getMessage() and "dict" in said.getMessage()


def test_what_came_up_from_a_tier_is_compared_with_it():
    bench = Bench(slots=1)
    bench.save(keys(1))
    bench.save(keys(2))
    bench.load(keys(1))
    assert bench.counts == (1, 0)
    bench.flip(keys(1), 7)
    bench.load(keys(1))
    assert bench.counts == (2, 1)


@pytest.mark.parametrize(("one_in", "audited"), [(0, 0), (1, 12), (3, 4), (5, 2), (13, 0)])
def test_one_in_so_many_loaded_chunks_is_compared(one_in, audited):
    bench = Bench(one_in)
    bench.save(keys(1, 2, 3))
    for _ in range(4):
        bench.load(keys(1, 2, 3))
    assert bench.counts == (audited, 0)


def test_a_chunk_that_was_computed_twice_may_differ_and_is_left_alone():
    bench = Bench(slots=1)
    bench.save(keys(1), b"first")
    bench.save(keys(2))
    bench.save(keys(1), b"second")
    bench.load(keys(1))
    assert bench.counts == (0, 0)


def test_a_tier_that_others_write_to_is_left_alone():
    bench = Bench(shared=True)
    bench.save(keys(1))
    bench.load(keys(1))
    assert bench.counts == (0, 0)


def test_a_chunk_that_left_before_its_turn_and_a_full_lane_cost_nothing():
    bench = Bench()
    bench.save(keys(1))
    with bench.store.load(keys(1)) as lease:
        lease.poll()
    bench.store.invalidate(keys(1))
    bench.lane.run()
    assert bench.counts == (0, 0)
    bench.store.check(idle=True)
    bench.save(keys(1))
    bench.lane.closed = True
    bench.load(keys(1))
    assert bench.counts == (0, 0)


def test_it_is_always_on_at_a_low_rate():
    store = assembled(ram_bytes=SLOT)
    assert store.audit.one_in == 1000
    store.close()
