"""Loads by layer through the connector's two halves, over a real NVMe tier and a hand-turned lane: who gets them, what
the blocks hold when a layer is asked for, and that what was computed from a bad chunk never counts."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.core.chunk import PAGE_BYTES, ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.store.layerwise import cut
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from kvtier.tiers.nvme.tier import NvmeTier
from tests.clock import Clock
from tests.nvme_place import flip, room
from tests.unit.still_model import StillModel

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, PER_CHUNK, ROW = 4, 16, 2, 2048
PART = PER_CHUNK * ROW
SLOT = LAYERS * PART
BLOCK_TOKENS, CHUNK_TOKENS = 16, 32
LAYOUT = ChunkLayout(fingerprint({"model": "by layer"}), CHUNK_TOKENS, BLOCK_TOKENS, (LAYERS * ROW,))
CUTS = (tuple(PART * part for part in range(1, LAYERS + 1)), tuple(range(1, LAYERS + 1)))
CHUNKS = 3
PROMPT = list(range(CHUNKS * CHUNK_TOKENS + 1))
KEYS = LAYOUT.keys(PROMPT)
TARGET = [5, 4, 9, 8, 2, 3]
"""Blocks that the request gets."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """vLLM warns while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvtier.connectors.vllm.worker")
        importlib.import_module("kvtier.connectors.vllm.scheduler")


class Engine:
    """Both halves, and vLLM's calls in its order."""

    def __init__(self, path: Path) -> None:
        from kvtier.connectors.vllm.scheduler import SchedulerHalf
        from kvtier.connectors.vllm.worker import WorkerHalf
        from kvtier.load_policy.decide import Judge

        self.path, self.tier = path, NvmeTier(path, room(16, SLOT), SLOT)
        self.bytes = torch.randint(0, 256, (CHUNKS, SLOT), dtype=torch.uint8, generator=torch.manual_seed(7))
        for key, chunk in zip(KEYS, self.bytes, strict=True):
            assert self.tier.write(key, memoryview(chunk.numpy()))
        self.lane, self.clock = ManualLane(), Clock(100.0)
        self.store = Store(Pool(8, SLOT), [(self.tier, self.lane)], clock=self.clock)
        self.store._directory.found(0, KEYS[::-1])
        judge = Judge(60.0, always=True, clock=self.clock)
        self.scheduler = SchedulerHalf(self.store, LAYOUT, ((0, True),), judge, save_decode=True, cuts=CUTS)
        self.worker = WorkerHalf(0, BLOCKS, PER_CHUNK, StillModel)
        self.cache = {f"layer.{number}": torch.zeros(BLOCKS, ROW, dtype=torch.uint8) for number in range(LAYERS)}
        self.worker.register(self.cache)
        self.request = SimpleNamespace(
            request_id="a", all_token_ids=PROMPT, num_tokens=len(PROMPT), num_prompt_tokens=len(PROMPT),
            skip_reading_prefix_cache=False, cache_salt=None, lora_request=None, mm_features=[], prompt_embeds=None,
            kv_transfer_params=None,
        )  # fmt: skip

    def begin(self) -> Any:
        """The request is matched, gets blocks and is scheduled; the step's metadata."""
        assert self.scheduler.matched(self.request, 0) == (CHUNKS * CHUNK_TOKENS, False)
        blocks = SimpleNamespace(get_block_ids=lambda: ([*TARGET, 10],))
        self.scheduler.allocated(self.request, blocks, CHUNKS * CHUNK_TOKENS)
        return self.step({"a": 1}, new=True)

    def step(self, scheduled: dict[str, int], *, new: bool = False) -> Any:
        first = SimpleNamespace(req_id="a", block_ids=([*TARGET, 10],), num_computed_tokens=CHUNKS * CHUNK_TOKENS)
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        return self.scheduler.step(
            SimpleNamespace(
                scheduled_new_reqs=[first] if new else [], scheduled_cached_reqs=cached,
                num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
            )
        )  # fmt: skip

    def loaded(self, layer: int) -> bool:
        """The layer's blocks hold what was stored."""
        rows = self.bytes[:, layer * PART : (layer + 1) * PART].reshape(-1, ROW)
        return bool((self.cache[f"layer.{layer}"][TARGET] == rows).all())

    def end(self, metadata: Any) -> Any:
        self.worker.save(metadata)
        self.bad = self.worker.bad_blocks()
        report = self.worker.report()
        self.scheduler.report(report)
        return report


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "nvme")
    yield engine
    engine.scheduler.finished(engine.request)
    engine.lane.run()
    engine.store.check(idle=True)
    engine.worker.close()
    engine.store.close()


def test_layers_are_in_the_blocks_when_they_are_asked_for_and_no_later(engine: Engine) -> None:
    metadata = engine.begin()
    (job,) = metadata.loads
    assert job.flow.regions == CUTS[1]
    engine.worker.load(metadata)
    for layer in range(LAYERS):
        for _ in range(CHUNKS):
            engine.lane.turn()
        assert not engine.loaded(layer)
        engine.worker.layer(f"layer.{layer}")
        assert engine.loaded(layer)
        assert not any(engine.loaded(later) for later in range(layer + 1, LAYERS))
    report = engine.end(metadata)
    assert dict(report.done) == {job.number: 1}
    assert engine.bad == set()
    assert report.loaded_blocks == len(TARGET)
    assert engine.store.match(KEYS) == (CHUNKS, 0)


def test_a_bad_byte_in_the_last_layer_is_found_before_the_answer_counts(engine: Engine) -> None:
    place = engine.tier._places[KEYS[1]] % engine.tier.capacity
    flip(engine.path / "slots.kvtier", place * SLOT + SLOT - 1)
    metadata = engine.begin()
    engine.worker.load(metadata)
    for _ in range(CHUNKS * (LAYERS - 1)):
        engine.lane.turn()
    engine.worker.layer("layer.2")  # what is there looks well; the forward pass is on its way
    engine.lane.run()
    engine.worker.layer("layer.3")
    report = engine.end(metadata)
    assert not report.done
    assert engine.bad == set(TARGET)
    assert report.failures == {0: 1}, "nothing computed from it is saved until the scheduler knows"
    assert engine.tier.counts["corrupt"] == 1
    assert engine.store.match(KEYS) == (1, 0), "the bad chunk is gone, its neighbours are not"


def test_with_a_draft_model_errors_are_known_when_vllm_asks_for_them(engine: Engine) -> None:
    """vLLM then asks before it calls ``wait_for_save``, and the draft model's layer comes after both."""
    place = engine.tier._places[KEYS[2]] % engine.tier.capacity
    flip(engine.path / "slots.kvtier", place * SLOT)
    metadata = engine.begin()
    engine.worker.load(metadata)
    for _ in range(CHUNKS * (LAYERS - 1)):
        engine.lane.turn()
    engine.worker.layer("layer.2")
    engine.lane.run()
    assert engine.worker.bad_blocks() == set(TARGET)
    engine.worker.layer("layer.3")
    assert not engine.end(metadata).done


def test_a_draft_models_layer_that_nobody_asked_for_yet_is_loaded(engine: Engine) -> None:
    metadata = engine.begin()
    engine.worker.load(metadata)
    engine.lane.run()
    engine.worker.layer("layer.2")
    assert engine.worker.bad_blocks() == set()
    assert engine.loaded(LAYERS - 1)
    assert engine.end(metadata).done


def test_layers_that_never_come_are_given_up_at_the_deadline(engine: Engine) -> None:
    metadata = engine.begin()
    metadata.loads[0].flow.until = 0.0
    engine.worker.load(metadata)
    engine.worker.layer("layer.0")
    report = engine.end(metadata)
    assert dict(report.failed) == {metadata.loads[0].number: 1}
    assert engine.bad == set(TARGET)
    assert engine.store.match(KEYS).coming == CHUNKS, "slow is not bad: the tier keeps them"


def test_a_forward_pass_that_never_asked_for_its_layers_does_not_count(engine: Engine) -> None:
    metadata = engine.begin()
    engine.worker.load(metadata)
    engine.lane.run()
    engine.end(metadata)
    assert engine.bad == set(TARGET)


def test_an_unknown_layer_waits_for_all(engine: Engine) -> None:
    metadata = engine.begin()
    engine.worker.load(metadata)
    engine.lane.run()
    engine.worker.layer("a layer that shares another's cache")
    assert all(engine.loaded(layer) for layer in range(LAYERS))
    engine.end(metadata)
    assert engine.bad == set()


def test_a_busy_engine_goes_on_with_others_until_all_is_in_ram(engine: Engine) -> None:
    engine.step({"b": 1})
    assert engine.scheduler.matched(engine.request, 0) == (None, False)
    engine.lane.run()
    assert engine.scheduler.matched(engine.request, 0) == (CHUNKS * CHUNK_TOKENS, False)
    blocks = SimpleNamespace(get_block_ids=lambda: ([*TARGET, 10],))
    engine.scheduler.allocated(engine.request, blocks, CHUNKS * CHUNK_TOKENS)
    metadata = engine.step({"a": 1, "b": 1}, new=True)
    assert metadata.loads[0].flow is None
    engine.worker.load(metadata)
    assert engine.loaded(LAYERS - 1)
    engine.end(metadata)


def test_an_engine_whose_other_requests_are_done_is_idle(engine: Engine) -> None:
    engine.step({"b": 1})
    engine.scheduler.finished(SimpleNamespace(request_id="b"))
    metadata = engine.begin()
    assert metadata.loads[0].flow is not None
    engine.worker.load(metadata)
    engine.end(metadata)


def test_one_load_by_layer_at_a_time(engine: Engine) -> None:
    assert engine.scheduler.matched(engine.request, 0) == (CHUNKS * CHUNK_TOKENS, False)
    blocks = SimpleNamespace(get_block_ids=lambda: ([*TARGET, 10],))
    engine.scheduler.allocated(engine.request, blocks, CHUNKS * CHUNK_TOKENS)
    other = SimpleNamespace(**(vars(engine.request) | {"request_id": "b"}))
    assert engine.scheduler.matched(other, 0) == (None, False)
    engine.scheduler.finished(other)
    metadata = engine.step({"a": 1}, new=True)
    engine.worker.load(metadata)
    engine.lane.run()
    engine.worker.layer("layer.3")
    engine.end(metadata)


def test_only_one_rank_that_can_load_layers_gets_cuts() -> None:
    from kvtier.connectors.vllm.layout import layer_cuts
    from kvtier.connectors.vllm.metadata import RankLayout

    rank = RankLayout(LAYERS * ROW, {"row_bytes": [ROW] * LAYERS}, loads_regions=True)
    assert layer_cuts({(0, 0): rank}, LAYOUT) == cut([PART * n for n in range(1, LAYERS + 1)], PAGE_BYTES, SLOT)
    assert layer_cuts({(0, 0): rank, (0, 1): rank}, LAYOUT) is None
    assert layer_cuts({(0, 0): RankLayout(LAYERS * ROW, {"row_bytes": [ROW] * LAYERS})}, LAYOUT) is None
    assert layer_cuts({(0, 0): RankLayout(ROW, {"row_bytes": [LAYERS * ROW]}, loads_regions=True)}, LAYOUT) is None
