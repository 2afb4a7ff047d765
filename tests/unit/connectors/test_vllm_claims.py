"""What is promised to a request of a model with windows, over a real Store with hand-turned lanes:
a hit that has all of every group, the longest there is, and nothing that is not in RAM."""

from types import SimpleNamespace

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.core.pool import Pool
from kvtier.load_policy.decide import LoadPolicy
from kvtier.load_policy.prefill import Prefill, PrefillTime
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from tests.clock import Clock
from tests.unit.connectors.test_vllm_scheduler import SlowTier

claims = pytest.importorskip("kvtier.connectors.vllm.scheduler_side.claims")
groups = pytest.importorskip("kvtier.connectors.vllm.groups")
partial_tails = pytest.importorskip("kvtier.connectors.vllm.scheduler_side.partial_tails")
prompts = pytest.importorskip("kvtier.connectors.vllm.scheduler_side.prompts")

pytestmark = pytest.mark.vllm
CHUNK, SLOT, CHUNKS = 512, 4096, 9
TOKENS = [*range(CHUNKS * CHUNK + 40)]
LAYOUT = ChunkLayout(bytes(32), CHUNK, CHUNK, (SLOT,))
LAST = CHUNKS * CHUNK


class Bench:
    """A prompt of nine chunks, whose ends at 2,048, 4,096 and 4,608 tokens are kept, over RAM and
    one tier."""

    def __init__(self, *, shared=False, always=False):
        self.clock, self.lane = Clock(100.0), ManualLane()
        self.tier = SlowTier(self.clock, shared=shared)
        self.geometry = groups.Geometry(
            (groups.Group(0, groups.Kind.FULL, 16), groups.Group(1, groups.Kind.WINDOW, 16, 512)),
            CHUNK,
        )
        self.keys = LAYOUT.keys(TOKENS)
        self.store = self.made()
        self.load_policy = LoadPolicy(
            60.0, always=always, prefill=Prefill(PrefillTime(1e-3)), clock=self.clock
        )
        self.request = SimpleNamespace(
            request_id="one", num_tokens=len(TOKENS), num_prompt_tokens=len(TOKENS)
        )

    def made(self):
        return Store(Pool(128, SLOT), [(self.tier, self.lane)], clock=self.clock)

    def behind(self, end):
        return [self.geometry.key(piece, self.keys) for piece in self.geometry.behind(end)]

    def save(self, chunks=CHUNKS, *ends):
        trunk = [self.geometry.key(piece, self.keys) for piece in self.geometry.trunk(0, chunks)]
        with self.store.save([*trunk, *(key for end in ends for key in self.behind(end))]) as lease:
            lease.commit()

    def restart(self):
        """All is in the tier, and nothing in RAM."""
        self.lane.run()
        self.store = self.made()

    def raise_to_ram(self, end):
        """All that a hit of so many tokens needs."""
        with self.store.load(self.geometry.run(self.keys, 0, end).keys):
            self.lane.run()

    def slow_down(self, read_s):
        """A read of the tier takes so long from now on, and that is known."""
        self.clock.now += 60.0
        probe = LAYOUT.keys([7] * CHUNK)
        self.tier.held[probe[0]] = bytes(SLOT)
        self.store._directory.tiers[0].found(probe)
        self.tier.seconds = read_s
        with self.store.load(probe):
            self.lane.run()

    def asks(self, computed=0):
        """The first answer to a new request."""
        self.prompt = prompts.Prompt(self.request, None)
        self.claims = claims.Claims(
            self.store,
            self.geometry,
            self.load_policy,
            partial_tails.PartialTails(self.store, self.geometry, 0),
        )
        return self.again(computed)

    def again(self, computed=0):
        told = self.claims.promise(self.prompt, self.keys, computed, busy=False, first=True)
        if told:
            assert self.prompt.claim.lease.poll().ready == self.prompt.claim.run.length, (
                "all of it is in RAM"
            )
        return told

    def waits(self):
        """What is promised when all that was asked for has come."""
        while (told := self.again()) is None:
            assert len(self.lane), "it waits for nothing"
            self.lane.turn()
        return told

    def ends(self):
        self.prompt.claim.drop()
        self.lane.run()
        self.store.check(idle=True)


@pytest.mark.parametrize(
    ("lost", "promised"),
    [((), LAST), ((LAST,), 4096), ((LAST, 4096), 2048), ((LAST, 4096, 2048), 0)],
)
def test_a_missing_window_makes_the_hit_shorter_before_it_is_promised(lost, promised):
    bench = Bench()
    bench.save(CHUNKS, 2048, 4096, LAST)
    bench.store.invalidate([key for end in lost for key in bench.behind(end)[:1]])
    assert bench.asks() == promised
    bench.ends()


def test_at_the_deadline_the_longest_end_that_is_in_ram_is_promised():
    bench = Bench()
    bench.save(CHUNKS, 2048, LAST)
    bench.restart()
    bench.raise_to_ram(2048)
    assert bench.asks() is None
    bench.clock.now += 100.0
    assert bench.again() == 2048
    assert bench.again() == 2048, "it waits no more"
    bench.ends()


def test_a_shorter_hit_that_is_tried_next_has_no_new_deadline():
    bench = Bench()
    bench.save(CHUNKS, 4096, LAST)
    bench.restart()
    del bench.tier.held[bench.behind(LAST)[0]]
    assert bench.asks() is None
    deadline = bench.prompt.claim.deadline
    bench.clock.now = deadline - 0.2
    while bench.prompt.claim.lease.poll().coming:
        bench.lane.turn()
    assert bench.again() is None, "the hit of 4,096 tokens is on its way"
    assert bench.prompt.claim.run.end == 4096
    bench.clock.now = deadline
    assert bench.again() == 0, "it waits no longer than the first would have"
    bench.ends()


@pytest.mark.parametrize(
    ("read_s", "promised"),
    [
        pytest.param(0.1, None, id="six reads are faster than computing 2,560 tokens"),
        pytest.param(0.5, 2048, id="faster than computing all, slower than computing the rest"),
        pytest.param(1.0, 2048, id="slower than computing all"),
    ],
)
def test_the_hit_that_is_served_soonest_is_promised(read_s, promised):
    bench = Bench()
    bench.save(CHUNKS, 2048, LAST)
    bench.restart()
    bench.raise_to_ram(2048)
    bench.slow_down(read_s)
    assert bench.asks() == promised
    assert bench.prompt.claim.declined == ({} if promised is None else {"slower": 1})
    assert bench.waits() == (promised or LAST)
    bench.ends()


@pytest.mark.parametrize(("read_s", "promised"), [(0.1, None), (1.0, 4096)])
def test_a_slow_window_makes_the_hit_shorter_where_all_else_is_in_ram(read_s, promised):
    bench = Bench()
    bench.save(CHUNKS, 2048, 4096, LAST)
    bench.restart()
    bench.raise_to_ram(4096)
    with bench.store.load(bench.keys):
        bench.lane.run()
    bench.slow_down(read_s)
    assert bench.asks() == promised
    bench.ends()


def test_a_shared_tier_is_asked_for_one_end_after_the_other():
    bench = Bench(shared=True, always=True)
    bench.save(CHUNKS, 2048)
    bench.restart()
    kept = dict(bench.tier.held)
    bench.tier.held.clear()
    bench.store = bench.made()  # knows of nothing: others have written it
    bench.tier.held.update(kept)
    assert bench.asks() is None
    assert bench.waits() == 2048
    bench.ends()


def _asks(name, tokens):
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def test_loads_are_granted_as_far_as_all_that_have_not_begun_fit_together():
    full = groups.Geometry((groups.Group(0, groups.Kind.FULL, 16),), CHUNK)
    granted = claims.Granted(full, 100, 64)
    large, small, tiny = _asks("large", 60 * 16), _asks("small", 41 * 16), _asks("tiny", 16)
    assert granted.fits(large)
    granted.add(large)
    assert not granted.fits(small), "41 blocks beside 60 of 100"
    assert not granted.fits(tiny), "it would fit, and would overtake the other"
    granted.gone("large")
    assert granted.fits(tiny), "nobody holds blocks"
    granted.add(tiny)
    assert granted.fits(small)
    granted.gone("small")
    assert granted.fits(_asks("other", 99 * 16)), "whom the others waited for has ended"
    assert not granted.fits(_asks("other", 99 * 16 + 1))


def test_groups_of_which_nothing_is_kept_take_blocks_too():
    full = groups.Group(0, groups.Kind.FULL, 16)
    window, ring = groups.Uncached(16, 40), groups.Uncached(4, blocks=1)
    granted = claims.Granted(groups.Geometry((full,), CHUNK, (window, ring)), 41, 88)
    granted.add(_asks("one", 20 * 16))
    assert not granted.fits(_asks("other", 5 * 16)), "20 + 9 + 1 blocks, and 5 + 6 + 1"
    granted.gone("other")
    assert granted.fits(_asks("shorter", 4 * 16)), "20 + 9 + 1 blocks, and 4 + 5 + 1"
