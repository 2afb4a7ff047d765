"""The connector's worker half over a device that holds its work back: what is confirmed when, what failures spoil."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, Pinning, regions_of
from kvtier.load_policy.prefill import Prefill
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from tests.clock import Clock
from tests.unit.gpu.test_gpu_pinning import Driver
from tests.unit.paged_streams import Held
from tests.unit.still_model import StillModel

pytestmark = pytest.mark.vllm

BLOCKS, PER_CHUNK, ROW = 8, 2, 2048
SLOT = PER_CHUNK * ROW
BLOCK_TOKENS, CHUNK_TOKENS = 16, 32


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """vLLM warns while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvtier.connectors.vllm.worker")
        importlib.import_module("kvtier.connectors.vllm.scheduler")


class Rank:
    """A worker half with its device, and steps of vLLM in short. ``Held`` replaces the host copier of CPU tensors."""

    def __init__(self, *, held: bool = True) -> None:
        from kvtier.connectors.vllm.metadata import PoolAddress
        from kvtier.connectors.vllm.worker import WorkerHalf

        self.pool = Pool(4, SLOT)
        self.address = PoolAddress(self.pool.path, None, 4, SLOT, PER_CHUNK, ((0, True),))
        self.cache = torch.zeros(BLOCKS, ROW, dtype=torch.uint8)
        self.streams = Held()
        self.half = WorkerHalf(0, BLOCKS, PER_CHUNK, StillModel)
        self.half.register({"layer.0": self.cache})
        regions = regions_of({"layer.0": self.cache}, BLOCKS)
        if held:
            self.half._paged = PagedBlocks(regions, PER_CHUNK, pinned=lambda _: True, streams=self.streams)
            self.streams.run()
        self.number = 0

    def job(self, number: int, slots: list[int], blocks: list[int]) -> Any:
        from kvtier.connectors.vllm.metadata import Job

        return Job(number, self.address, slots, blocks)

    def step(self, loads: Any = (), saves: Any = (), seen: int = 0, forward: Callable[[], None] | None = None) -> Any:
        """vLLM's calls of one step, in its order; the report."""
        from kvtier.connectors.vllm.metadata import StepMetadata

        self.number += 1
        metadata = StepMetadata(self.address, list(loads), list(saves), self.number, {0: seen})
        return self.planned(metadata, forward)

    def planned(self, metadata: Any, forward: Callable[[], None] | None = None) -> Any:
        self.half.load(metadata)
        if forward is not None:
            self.streams.do(self.streams.engine, forward)
        self.half.save(metadata)
        self.bad = self.half.bad_blocks()
        return self.half.report()

    def fill(self, block: int, value: int) -> Callable[[], None]:
        def forward() -> None:
            self.cache[block : block + PER_CHUNK] = value

        return forward

    def held(self, slot: int) -> set[int]:
        return set(bytes(self.pool.view(slot)))

    def mend(self) -> None:
        for stream in self.streams.all:
            stream.error = None


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.streams.run()
    rank.half.close()
    rank.pool.close()


def test_on_cpu_tensors_every_copy_is_confirmed_by_its_own_step() -> None:
    rank = Rank(held=False)
    rank.fill(2, 7)()
    saved = rank.step(saves=[rank.job(1, [0], [2, 3])])
    assert dict(saved.done) == {1: 1}
    assert rank.held(0) == {7}
    loaded = rank.step([rank.job(2, [0], [6, 7])])
    assert dict(loaded.done) == {2: 1}
    assert loaded.loaded_blocks == 2
    assert 0 < loaded.load_s < 60
    assert bool((rank.cache[6:8] == 7).all())
    rank.half.close()


def test_a_slots_pages_are_mapped_when_it_is_first_used_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, touched, touch = Rank(held=False), list[tuple[int, int, int]](), Pool.touch

    def noted(pool: Pool, slot: int, begin: int, end: int) -> None:
        touched.append((slot, begin, end))
        touch(pool, slot, begin, end)

    monkeypatch.setattr(Pool, "touch", noted)
    for number, slots in enumerate(([0], [1, 0], [1])):
        rank.step(saves=[rank.job(number, slots, [2, 3, 4, 5][: 2 * len(slots)])])
    rank.step([rank.job(9, [3], [6, 7])])
    assert touched == [(0, 0, SLOT), (1, 0, SLOT), (3, 0, SLOT)]
    rank.half.close()


def test_a_save_is_confirmed_by_the_first_step_that_finds_its_dma_through(rank: Rank) -> None:
    assert not rank.step(saves=[rank.job(1, [0], [2, 3])], forward=rank.fill(2, 7)).done
    assert not rank.step(forward=rank.fill(2, 9)).done
    rank.streams.run()

    report = rank.step()
    assert dict(report.done) == {1: 1}
    assert report.step == 3
    assert rank.held(0) == {7}
    assert not rank.step().done


def test_a_load_is_confirmed_when_through_and_is_told_at_the_rate_of_the_last_one(rank: Rank) -> None:
    seen: list[int] = []
    rank.pool.view(1)[:] = b"\5" * SLOT
    first = rank.step([rank.job(1, [1], [4, 5])], forward=lambda: seen.append(int(rank.cache[4:6].sum())))
    assert not first.done
    assert (first.loaded_blocks, first.load_s) == (0, 0.0), "nothing is known of this device yet"
    rank.streams.run()
    assert seen == [5 * SLOT]

    copy = rank.half._under_way[0].copy
    second = rank.step([rank.job(2, [1, 2], [0, 1, 2, 3])])
    assert dict(second.done) == {1: 1}
    assert second.loaded_blocks == 0, "step 2 was loaded for before the first was confirmed"
    third = rank.step([rank.job(3, [1, 2], [0, 1, 2, 3])])
    assert third.loaded_blocks == 4
    assert copy.seconds
    assert third.load_s == pytest.approx(copy.seconds * 2)


def test_a_load_that_the_host_can_see_to_be_wrong_is_known_before_the_forward_pass(rank: Rank) -> None:
    from kvtier.connectors.vllm.metadata import StepMetadata

    metadata = StepMetadata(rank.address, [rank.job(1, [99], [4, 5])], [rank.job(2, [0], [4, 5])], 1, {0: 0})
    rank.half.load(metadata)
    assert rank.half._bad_blocks == {4, 5}
    rank.half.save(metadata)
    assert rank.half.bad_blocks() == {4, 5}
    report = rank.half.report()
    assert dict(report.failed) == {1: 1, 2: 1}
    assert report.failures == {0: 1}


def test_what_is_saved_after_a_load_that_failed_on_the_device_fails_too_until_the_scheduler_knows(rank: Rank) -> None:
    rank.step(saves=[rank.job(1, [0], [0, 1])], forward=rank.fill(0, 3))
    rank.streams.run()
    rank.step([rank.job(2, [1], [4, 5])], saves=[rank.job(3, [2], [4, 5])])
    rank.streams.all[4].error = RuntimeError("CUDA error: injected")  # the stream that scatters
    assert rank.half._under_way[0].is_load
    rank.streams.run()

    report = rank.step(saves=[rank.job(4, [3], [6, 7])])
    assert rank.bad == {4, 5}
    assert dict(report.failed) == {2: 1, 3: 1, 4: 1}
    assert not report.done
    assert report.failures == {0: 1}
    rank.mend()
    assert dict(rank.step(saves=[rank.job(5, [3], [6, 7])]).failed) == {5: 1}, "planned before the scheduler knew"
    rank.step(saves=[rank.job(6, [3], [6, 7])], seen=1)
    rank.streams.run()
    assert dict(rank.step(seen=1).done) == {6: 1}


def test_nothing_is_loaded_or_saved_after_the_weights_were_replaced_until_the_scheduler_knows(rank: Rank) -> None:
    rank.step(saves=[rank.job(1, [0], [0, 1])], forward=rank.fill(0, 3))
    rank.streams.run()
    rank.half._model.other = True  # type: ignore[union-attr]
    report = rank.step([rank.job(2, [0], [4, 5])], saves=[rank.job(3, [2], [4, 5])])
    rank.streams.run()
    assert report.replaced
    assert rank.bad == {4, 5}
    assert dict(report.failed) == {2: 1, 3: 1} and dict(report.done) == {1: 1}
    assert not rank.cache[4:6].any(), "old KV is in the blocks"
    late = rank.step(saves=[rank.job(4, [3], [6, 7])])
    assert dict(late.failed) == {4: 1} and not late.replaced, "planned before the scheduler knew"
    rank.step(saves=[rank.job(5, [3], [6, 7])], seen=max(report.failures.values()))
    rank.streams.run()
    assert dict(rank.step(seen=9).done) == {5: 1}


def test_what_new_weights_computed_is_not_saved_under_the_old_ones_keys(rank: Rank) -> None:
    rank.half._model.other = True  # type: ignore[union-attr]
    report = rank.step(saves=[rank.job(1, [0], [0, 1])], forward=rank.fill(0, 3))
    rank.streams.run()
    assert dict(report.failed) == {1: 1} and report.failures == {0: 1}
    assert not dict(rank.step().done)


def test_a_load_that_begins_inside_a_chunk_takes_the_next_one_from_its_beginning() -> None:
    from kvtier.connectors.vllm.metadata import Job

    rank = Rank(held=False)
    for block, value in enumerate((11, 12, 21, 22)):
        rank.cache[block] = value
    rank.step(saves=[rank.job(1, [0, 1], [0, 1, 2, 3])])
    rank.step([Job(2, rank.address, [0, 1], [5, 6, 7], first=1)])
    assert [int(rank.cache[block][0]) for block in (5, 6, 7)] == [12, 21, 22]
    rank.half.close()
    rank.pool.close()


def test_what_one_rank_says_of_its_weights_is_said_of_all() -> None:
    from kvtier.connectors.vllm.metadata import StepReport

    for one, other in ((True, False), (False, True), (False, False)):
        merged = StepReport(replaced=one).aggregate(StepReport(replaced=other))
        assert merged.replaced is (one or other)


def test_saves_begun_after_a_load_that_fails_on_the_device_fail_though_their_copies_are_through(rank: Rank) -> None:
    from kvtier.connectors.vllm.worker import _UnderWay

    def broken() -> bool:
        raise RuntimeError("CUDA error: injected")

    load, save = rank.job(1, [0], [4, 5]), rank.job(2, [1], [4, 5])
    bad: Any = SimpleNamespace(done=broken, seconds=None)
    good: Any = SimpleNamespace(done=lambda: True, seconds=None)
    rank.half._under_way.extend([_UnderWay(load, bad, is_load=True), _UnderWay(save, good, is_load=False)])
    report = rank.half.report()
    assert (dict(report.failed), dict(report.done)) == ({1: 1, 2: 1}, {})


def test_every_rank_s_word_on_a_job_counts() -> None:
    from kvtier.connectors.vllm.metadata import StepReport

    one = StepReport(done=Counter({1: 1, 2: 1}), failed=Counter({3: 1}), failures={0: 1})
    other = StepReport(done=Counter({1: 1}), failed=Counter({2: 1, 3: 1}), failures={0: 2, 1: 1})
    merged = one.aggregate(other)
    assert (merged.done, merged.failed) == (Counter({1: 2, 2: 1}), Counter({2: 1, 3: 2}))
    assert merged.failures == {0: 2, 1: 1}


def test_a_worker_tells_what_its_model_resolved_to(rank: Rank) -> None:
    told = rank.half.layout()
    assert told is not None
    assert (told.model, told.weights) == ({}, None)
    assert told.description["backends"] == ["test"]


def test_a_save_that_failed_on_the_device_spoils_no_other(rank: Rank) -> None:
    rank.step(saves=[rank.job(1, [0], [0, 1])])
    rank.streams.all[2].error = RuntimeError("CUDA error: injected")  # the stream of DMAs to slots
    rank.streams.run()
    rank.mend()
    rank.step(saves=[rank.job(2, [1], [2, 3])], forward=rank.fill(2, 8))
    rank.streams.run()
    report = rank.step()
    assert dict(report.failed) | dict(report.done) == {2: 1}
    assert rank.held(1) == {8}


def test_a_pool_stays_mapped_and_locked_while_copies_are_under_way(rank: Rank) -> None:
    driver, lane = Driver(), ManualLane()
    rank.half._pinning = Pinning(None, runtime=driver, lane=lane)
    rank.step(saves=[rank.job(1, [0], [2, 3])], forward=rank.fill(2, 7))
    lane.run()
    gone, rank.address = rank.address, None  # type: ignore[assignment]
    rank.step()
    assert set(rank.half._pools) == {gone}
    assert driver.held
    rank.streams.run()
    assert dict(rank.step().done) == {1: 1}
    rank.step()
    assert not rank.half._pools
    assert not driver.held
    assert rank.held(0) == {7}


def test_closing_waits_for_copies_under_way(rank: Rank) -> None:
    rank.step(saves=[rank.job(1, [0], [2, 3])], forward=rank.fill(2, 7))
    rank.half.close()
    assert not rank.half._pools
    assert rank.held(0) == {7}


# ---- both halves -------------------------------------------------------------------------------------------------


def output(request: Any | None = None, blocks: list[int] | None = None) -> Any:
    """vLLM's plan of a step: all of a new request, or nothing."""
    new = [] if request is None else [
        SimpleNamespace(req_id=request.request_id, block_ids=[blocks], num_computed_tokens=0)
    ]  # fmt: skip
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    tokens = {} if request is None else {request.request_id: request.num_tokens}
    return SimpleNamespace(
        scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )  # fmt: skip


def prompt() -> Any:
    tokens = [*range(CHUNK_TOKENS + 1)]
    return SimpleNamespace(
        request_id="one", num_tokens=len(tokens), num_prompt_tokens=len(tokens), all_token_ids=tokens,
        skip_reading_prefix_cache=False, prompt_embeds=None, lora_request=None, cache_salt=None, mm_features=None,
        kv_transfer_params=None,
    )  # fmt: skip


@pytest.mark.parametrize("through", [True, False])
def test_an_idle_engine_takes_steps_until_its_chunks_are_ready_and_not_for_ever(rank: Rank, through: bool) -> None:
    from kvtier.connectors.vllm.scheduler import SchedulerHalf
    from kvtier.load_policy.decide import Judge

    clock, layout = Clock(100.0), ChunkLayout(fingerprint({"model": "t"}), CHUNK_TOKENS, BLOCK_TOKENS, (SLOT,))
    store = Store(rank.pool, [], clock=clock)
    judge = Judge(60.0, prefill=Prefill(1 / 64), clock=clock)
    scheduler = SchedulerHalf(store, layout, ((0, True),), judge, save_decode=True)
    request, keys = prompt(), layout.keys([*range(CHUNK_TOKENS)])
    assert scheduler.matched(request, 0) == (0, False)
    assert not scheduler.expects_reports()

    scheduler.report(rank.planned(scheduler.step(output(request, [4, 5, 6])), rank.fill(4, 6)))
    scheduler.finished(request)
    assert scheduler.expects_reports()
    assert store.match(keys).ready == 0
    if through:
        rank.streams.run()
        scheduler.report(rank.planned(scheduler.step(output())))
        assert store.match(keys).ready == 1
        store.check(idle=True)
    else:
        clock.now += 60
        scheduler.report(rank.planned(scheduler.step(output())))
        assert store.match(keys).ready == 0
    assert not scheduler.expects_reports()
