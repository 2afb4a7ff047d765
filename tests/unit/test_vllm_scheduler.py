"""The connector's scheduler half over a real Store with hand-turned lanes and clock: what of a hit it takes, and when
it gives up waiting."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.chunk import ChunkLayout, fingerprint
from kvtier.forecast import Prefill
from kvtier.pool import Pool
from kvtier.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.clock import Clock

pytestmark = pytest.mark.vllm

SLOT = 4096
BLOCK, CHUNK = 16, 32
LAYOUT = ChunkLayout(fingerprint({"model": "test"}), CHUNK, BLOCK, (SLOT,))
PER_TOKEN = 1 / 64
"""A chunk of 32 tokens takes half a second to compute."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """vLLM warns while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvtier.connectors.vllm.scheduler")


class SlowTier(DictTier):
    """Reads take ``seconds`` of the test's clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(64)
        self.clock, self.seconds, self.reads = clock, 0.0, 0

    def read(self, key: Any, into: memoryview) -> bool:
        self.reads += 1
        self.clock.now += self.seconds
        return super().read(key, into)


class Bench:
    """A scheduler half with its store, and vLLM's calls in short."""

    def __init__(self, *, always: bool = False, known: bool = True, slots: int = 8) -> None:
        from kvtier.connectors.vllm.judge import Judge
        from kvtier.connectors.vllm.scheduler import SchedulerHalf

        self.clock = Clock(100.0)
        self.tier, self.lane = SlowTier(self.clock), ManualLane()
        self.store = Store(Pool(slots, SLOT), [(self.tier, self.lane)], clock=self.clock)
        self.judge = Judge(60.0, always=always, prefill=Prefill(PER_TOKEN if known else None), clock=self.clock)
        self.half = SchedulerHalf(self.store, LAYOUT, ((0, True),), self.judge, save_decode=True)

    def hold(self, tokens: list[int], read_s: float, ready: int = 0) -> None:
        """The tier holds the prompt's chunks, RAM the first ``ready``; the last read of it took ``read_s``."""
        keys = LAYOUT.keys(tokens)
        self.tier.held.update({key: bytes(SLOT) for key in keys})
        probe = LAYOUT.keys([7] * CHUNK)
        self.tier.held[probe[0]] = bytes(SLOT)
        self.store._directory.found(0, [*keys[::-1], *probe])
        self.tier.seconds = read_s
        with self.store.load(probe):
            self.lane.run()
        self.store.load(keys, most=ready).close()
        with self.store.load(keys, most=ready):
            self.lane.run()
        self.tier.reads = 0

    def matched(self, request: Any) -> int | None:
        tokens, later = self.half.matched(request, 0)
        assert not later
        return tokens

    def waits_until_idle(self, request: Any) -> int | None:
        while (tokens := self.matched(request)) is None:
            assert len(self.lane), "it waits for nothing"
            self.lane.turn()
        return tokens

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.store.stats().items() if name.startswith("declined")}


def prompt(chunks: int, request_id: str = "one") -> Any:
    tokens = [*range(chunks * CHUNK + 1)]
    return SimpleNamespace(
        request_id=request_id, num_tokens=len(tokens), num_prompt_tokens=len(tokens), all_token_ids=tokens,
        skip_reading_prefix_cache=False, prompt_embeds=None, lora_request=None, cache_salt=None, mm_features=None,
    )  # fmt: skip


def done(bench: Bench, request: Any) -> None:
    """The request ends; nothing of it is left."""
    bench.half.finished(request)
    bench.lane.run()
    bench.store.check(idle=True)


def test_a_hit_that_is_slower_than_computing_is_declined_at_once_and_leaves_nothing() -> None:
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.6)
    assert bench.matched(request) == 0
    assert bench.counts() == {"declined_slower": 6}
    assert bench.half.new_counts() == {"declined_slower": 6}
    bench.store.check(idle=True)
    assert bench.matched(request) == 0, "vLLM may ask again"
    assert bench.counts() == {"declined_slower": 6}, "and it is counted once"
    done(bench, request)
    assert bench.tier.reads == 1, "one trial read"


def test_a_hit_that_is_faster_is_waited_for_and_taken_whole() -> None:
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    assert bench.matched(request) is None
    assert bench.waits_until_idle(request) == 6 * CHUNK
    assert bench.counts() == {}
    done(bench, request)


def test_what_is_in_ram_is_taken_and_the_slow_rest_left() -> None:
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.6, ready=2)
    assert bench.matched(request) == 2 * CHUNK
    assert bench.counts() == {"declined_slower": 4}
    done(bench, request)


def test_always_takes_all_whatever_it_takes() -> None:
    bench, request = Bench(always=True), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=5.0)
    assert bench.waits_until_idle(request) == 6 * CHUNK
    done(bench, request)


def test_a_stalled_tier_costs_one_deadline_and_is_then_left() -> None:
    bench = Bench()
    first, second = prompt(6, "first"), prompt(6, "second")
    bench.hold(first.all_token_ids[:-1], read_s=0.1)
    asked_at = bench.clock.now
    assert bench.matched(first) is None
    bench.clock.now = asked_at + 6 * 0.1 * 3 - 0.01
    assert bench.matched(first) is None
    bench.clock.now = asked_at + 6 * 0.1 * 3 + 0.01
    assert bench.matched(first) == 0, "three times what was forecast"
    assert bench.counts() == {"declined_deadline": 6}

    bench.tier.seconds = 30.0
    bench.lane.run()  # only the trial read is still wanted
    assert bench.tier.reads == 1
    assert bench.matched(second) == 0
    assert bench.counts() == {"declined_deadline": 6, "declined_slower": 6}
    bench.half.finished(first)
    done(bench, second)


def test_no_load_is_waited_for_longer_than_computing_takes() -> None:
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.3)
    asked_at = bench.clock.now
    assert bench.matched(request) is None
    bench.lane.turn()
    bench.clock.now = asked_at + 6 * CHUNK * PER_TOKEN + 0.01
    assert bench.matched(request) == CHUNK, "what came in time is taken"
    assert bench.counts() == {"declined_deadline": 5}
    done(bench, request)


def test_a_cut_that_the_server_does_not_answer_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    assert bench.matched(request) is None
    bench.lane.turn()
    bench.clock.now += 60
    load = bench.store.load
    monkeypatch.setattr(bench.store, "load", lambda keys, start, most: load(keys, start, most=0))
    assert bench.matched(request) == 0, "no slot is promised that is not there"
    done(bench, request)


def test_an_engine_of_unknown_speed_takes_a_hit_and_learns_from_its_steps() -> None:
    bench, request = Bench(known=False), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=5.0)
    assert bench.matched(request) is None
    done(bench, request)
    for _ in range(3):
        number = bench.judge.planned([(1000, 0)])
        bench.clock.now += 1000 * PER_TOKEN
        bench.judge.ended(number, 0, 0.0, 0.0)
    bench.tier.seconds = 0.0
    assert bench.matched(prompt(6, "two")) == 0
    bench.store.check(idle=False)


def test_a_chunk_that_cannot_be_read_after_all_is_counted_as_refused() -> None:
    bench, request = Bench(), prompt(4)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    keys = LAYOUT.keys(request.all_token_ids[:-1])
    assert bench.matched(request) is None
    del bench.tier.held[keys[1]]
    assert bench.waits_until_idle(request) == CHUNK
    assert bench.counts() == {"declined_refused": 3}
    done(bench, request)


def test_chunks_that_came_meanwhile_are_taken_when_vllm_asks_again() -> None:
    bench, request = Bench(), prompt(4)
    assert bench.matched(request) == 0
    with bench.store.save(LAYOUT.keys(request.all_token_ids[:-1])) as lease:
        lease.commit()
    assert bench.matched(request) == 4 * CHUNK
    done(bench, request)


def test_a_step_tells_the_judge_what_it_computes() -> None:
    from kvtier.connectors.vllm.metadata import StepReport

    bench, request = Bench(known=False), prompt(40)
    new = SimpleNamespace(req_id="one", block_ids=([*range(80)],), num_computed_tokens=0)
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    bench.matched(request)
    for _ in range(2):
        output = SimpleNamespace(
            scheduled_new_reqs=[new], scheduled_cached_reqs=none, num_scheduled_tokens={"one": 1024},
            total_num_scheduled_tokens=1024,
        )  # fmt: skip
        metadata = bench.half.step(output)
        bench.clock.now += 20.0
        bench.half.report(StepReport(step=metadata.number, load_s=1.0, loaded_blocks=2, save_s=3.0))
    hit = prompt(6, "two")
    bench.hold(hit.all_token_ids[:-1], read_s=0.6)
    assert bench.matched(hit) == 0, "1,024 tokens take 16 s: a chunk is computed in half a second"


def test_counts_add_up_in_vllms_log() -> None:
    from kvtier.connectors.vllm.stats import TierStats

    both = TierStats(data={"declined_slower": 2}).aggregate(TierStats(data={"declined_slower": 1, "loaded_ram": 4}))
    assert both.reduce() == {"declined_slower": 3, "loaded_ram": 4}
    both.reset()
    assert both.is_empty()
