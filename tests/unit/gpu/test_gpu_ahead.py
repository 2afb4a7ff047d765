"""Loads that run ahead of the forward pass: what a layer finds, whatever order the device runs its streams in, and that
a forward pass which asks for no layer does not count."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.core.errors import StateError
from kvtier.gpu import Copy, PagedBlocks, regions_of
from kvtier.gpu.staged import StagedCopier
from tests.unit.paged_streams import Held
from tests.unit.still_model import StillModel

LAYERS, BLOCKS, PER_CHUNK, ROW = 5, 12, 2, 16
ENDS = (2, 3, 5)
CHUNK = LAYERS * PER_CHUNK * ROW


class Machine:
    """An engine whose keys and values lie apart in two allocations, its streams, and slots full of random bytes."""

    def __init__(self, *, chunks: int = 4, room: int = 1 << 20, locked: bool = True, seed: int | None = None) -> None:
        self.streams = Held(room, None if seed is None else random.Random(seed))
        self.front, self.back = torch.zeros(3, BLOCKS, ROW), torch.zeros(2, BLOCKS, ROW)
        self.layers = [one.to(torch.uint8) for one in (*self.front, *self.back)]
        regions = regions_of({f"layer.{number}": layer for number, layer in enumerate(self.layers)}, BLOCKS)
        self.paged = PagedBlocks(regions, PER_CHUNK, pinned=lambda _: locked, streams=self.streams)
        self.streams.run()
        draw = torch.Generator().manual_seed(seed or 0)
        self.slots = [torch.randint(1, 255, (CHUNK,), dtype=torch.uint8, generator=draw) for _ in range(chunks)]
        self.seen: dict[int, bool] = {}

    @property
    def copier(self) -> StagedCopier:
        assert isinstance(self.paged._copier, StagedCopier)
        return self.paged._copier

    def load(self, blocks: list[int]) -> Copy:
        """One slot after the other, into these blocks."""
        jobs = [(slot, 0, blocks[at * PER_CHUNK : (at + 1) * PER_CHUNK]) for at, slot in enumerate(self.slots)]
        return self.paged.load_ahead(jobs, ENDS)

    def look(self, layer: int, blocks: list[int]) -> None:
        """Queue the forward pass's look at a layer: whether these blocks hold what the slots have for it."""
        rows = torch.stack([slot.view(LAYERS, PER_CHUNK, ROW)[layer] for slot in self.slots]).view(-1, ROW)
        self.streams.do(
            self.streams.engine,
            lambda: self.seen.update({layer: bool((self.layers[layer][blocks] == rows).all())}),
        )


BLOCKS_OF = [7, 2, 9, 8, 0, 11, 4, 5]


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_a_layer_that_was_asked_for_is_there_in_any_order_of_the_device(seed: int, locked: bool) -> None:
    machine = Machine(seed=seed, room=0 if seed % 2 else 1 << 20, locked=locked)
    copy = machine.load(BLOCKS_OF)
    for layer in range(LAYERS):
        copy.need(layer + 1)
        machine.look(layer, BLOCKS_OF)
    machine.streams.run()
    assert machine.seen == dict.fromkeys(range(LAYERS), True)
    assert copy.done()
    assert copy.seconds


def test_the_first_layers_are_computed_while_the_last_ones_are_on_their_way() -> None:
    machine = Machine()
    before = machine.streams.turns
    copy = machine.load(BLOCKS_OF)
    copy.need(1)
    machine.look(0, BLOCKS_OF)
    machine.look(4, BLOCKS_OF)
    assert machine.streams.turns == before, "the host waited for the device"
    while not machine.seen:
        assert machine.streams.turn(machine.streams.engine) or machine.streams.turn()
    machine.streams.run(machine.streams.engine)
    assert machine.seen == {0: True, 4: False}
    assert not copy.done()
    machine.streams.run()
    assert copy.done()


def test_a_forward_pass_that_asks_for_nothing_does_not_wait() -> None:
    machine = Machine()
    copy = machine.load(BLOCKS_OF)
    machine.look(0, BLOCKS_OF)
    machine.streams.run(machine.streams.engine)
    assert machine.seen == {0: False}
    machine.streams.run()
    assert copy.done()


def test_without_page_locked_slots_the_engine_waits_for_all_of_it() -> None:
    machine = Machine(locked=False, chunks=2)
    machine.load(BLOCKS_OF[:4])
    machine.look(4, BLOCKS_OF[:4])
    machine.streams.run()
    assert machine.seen == {4: True}


def test_one_slot_that_is_not_page_locked_goes_by_a_buffer_that_is_and_the_engine_waits() -> None:
    machine = Machine(chunks=2)
    machine.copier._pinned = lambda part: part is not machine.slots[1]
    machine.load(BLOCKS_OF[:4])
    machine.look(4, BLOCKS_OF[:4])
    machine.streams.run()
    assert machine.seen == {4: True}
    assert machine.streams.host_buffers == 1


@pytest.mark.parametrize("seed", range(20))
def test_loads_that_follow_each_other_share_the_staging_buffers_and_not_their_bytes(seed: int) -> None:
    machine = Machine(seed=seed, room=0)
    first, second = machine.load(BLOCKS_OF), machine.load(BLOCKS_OF[::-1])
    for copy in (first, second):
        copy.need(LAYERS)
    for layer in range(LAYERS):
        machine.look(layer, BLOCKS_OF[::-1])
    machine.streams.run()
    assert set(machine.seen.values()) == {True}


def test_a_part_of_a_chunk_is_loaded_and_no_other_block_is_touched() -> None:
    machine = Machine(chunks=1)
    machine.paged.load_ahead([(machine.slots[0], 1, [6])], ENDS).need(LAYERS)
    machine.streams.run()
    wanted = machine.slots[0].view(LAYERS, PER_CHUNK, ROW)[:, 1]
    assert all(torch.equal(layer[6], row) for layer, row in zip(machine.layers, wanted, strict=True))
    assert not any(layer[:6].any() or layer[7:].any() for layer in machine.layers)


@pytest.mark.parametrize("ends", [(2, 3), (3, 2, 5), (2, 2, 5), ()])
def test_parts_that_do_not_end_in_order_with_the_last_region_are_refused(ends: tuple[int, ...]) -> None:
    machine = Machine(chunks=1)
    with pytest.raises(StateError, match="of 5 regions"):
        machine.paged.load_ahead([(machine.slots[0], 0, [1, 2])], ends)
    assert not any(stream.queue for stream in machine.streams.all)


def test_on_a_cpu_device_nothing_runs_ahead() -> None:
    paged = PagedBlocks(regions_of({"layer.0": torch.zeros(BLOCKS, ROW, dtype=torch.uint8)}, BLOCKS), PER_CHUNK)
    assert not paged.runs_ahead
    with pytest.raises(StateError, match="load_ahead to cpu"):
        paged.load_ahead([(torch.zeros(PER_CHUNK * ROW, dtype=torch.uint8), 0, [0, 1])], (1,))


# ---- the connector -----------------------------------------------------------------------------------------------

ROWS = 1 << 18
"""Bytes of a row in the worker's tests: parts have a least size."""
LAST = f"layer.{LAYERS - 1}"


@pytest.fixture(scope="module")
def halves() -> Any:
    """vLLM warns while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("kvtier.connectors.vllm.worker")


class Rank:
    """A worker half over a device whose work is held back."""

    def __init__(self, module: Any) -> None:
        from kvtier.connectors.vllm.layerwise import ahead_ends
        from kvtier.connectors.vllm.metadata import Job, PoolAddress, StepMetadata
        from kvtier.core.pool import Pool

        slot = LAYERS * PER_CHUNK * ROWS
        self.pool, self.streams = Pool(2, slot), Held(1 << 30)
        address = PoolAddress(self.pool.path, None, 2, slot, PER_CHUNK, ((0, True),))
        self.layers = {f"layer.{number}": torch.zeros(4, ROWS, dtype=torch.uint8) for number in range(LAYERS)}
        self.half = module.WorkerHalf(0, 4, PER_CHUNK, StillModel)
        self.half.register(self.layers)
        paged = PagedBlocks(regions_of(self.layers, 4), PER_CHUNK, pinned=lambda _: True, streams=self.streams)
        self.half._paged, self.half._ends = paged, ahead_ends(paged)
        self.streams.run()
        self.pool.view(0)[:] = b"\7" * slot
        load, save = Job(1, address, [0], [2, 3]), Job(2, address, [1], [2, 3])
        self.metadata = StepMetadata(address, [load], [save], 1, {0: 0})
        self.plain = StepMetadata(address, [Job(3, address, [0], [0, 1])], [], 2, {0: 1})
        self.seen: list[set[int]] = []

    def forward(self, *layers: str) -> None:
        """The pass looks at these layers; the hook comes before."""
        for name in layers:
            self.half.layer(name)
            self.look(name, slice(2, 4))

    def look(self, name: str, blocks: slice) -> None:
        """Queue a look at what these blocks of a layer hold."""
        rows = self.layers[name][blocks]
        self.streams.do(self.streams.engine, lambda: self.seen.append(set(rows.unique().tolist())))


@pytest.fixture
def rank(halves: Any) -> Iterator[Rank]:
    rank = Rank(halves)
    yield rank
    rank.streams.run()
    rank.half.close()
    rank.pool.close()


@pytest.mark.vllm
def test_the_worker_lets_layers_wait_for_their_own_part(rank: Rank) -> None:
    assert rank.half._ends[-1] == LAYERS
    assert 1 < len(rank.half._ends) <= 4
    rank.half.load(rank.metadata, layered=True)
    rank.forward("layer.0")
    while not rank.seen:
        assert rank.streams.turn(rank.streams.engine) or rank.streams.turn()
    assert rank.seen == [{7}]
    assert not rank.half._under_way[0].copy.done()
    rank.forward(*list(rank.layers)[1:])
    rank.half.save(rank.metadata)
    assert rank.half.bad_blocks() == set()
    rank.streams.run()
    assert rank.seen == [{7}] * LAYERS
    assert dict(rank.half.report().done) == {1: 1, 2: 1}


@pytest.mark.vllm
def test_after_the_forward_pass_everything_waits_for_all_of_a_load(rank: Rank) -> None:
    rank.half.load(rank.metadata, layered=True)
    rank.forward("layer.0")
    rank.half.forward_ended()
    rank.look(LAST, slice(2, 4))
    rank.streams.run()
    assert rank.seen == [{7}, {7}], "a draft model's layer"
    rank.half.save(rank.metadata)


@pytest.mark.vllm
def test_a_forward_pass_that_asked_for_no_layer_is_done_again_and_the_next_load_is_waited_for(rank: Rank) -> None:
    rank.half.load(rank.metadata, layered=True)
    copy = rank.half._under_way[0].copy
    rank.half.save(rank.metadata)
    assert copy.done(), "its slot is another's from now on"
    assert rank.half.bad_blocks() == {2, 3}
    report = rank.half.report()
    assert dict(report.failed) == {1: 1, 2: 1}
    assert report.failures == {0: 1}
    assert not report.done

    rank.half.load(rank.plain, layered=True)
    rank.look(LAST, slice(0, 2))
    rank.half.save(rank.plain)
    rank.streams.run()
    assert rank.seen == [{7}]
    assert dict(rank.half.report().done) == {3: 1}


@pytest.mark.vllm
def test_a_pass_that_will_not_ask_for_layers_finds_all_of_them(rank: Rank) -> None:
    rank.half.load(rank.metadata)
    rank.look(LAST, slice(2, 4))
    rank.streams.run()
    assert rank.seen == [{7}]
    rank.half.save(rank.metadata)
    assert rank.half.bad_blocks() == set()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("mode", "attention", "asks"),
    [("NONE", {}, True), ("PIECEWISE", {}, True), ("FULL", {}, False), ("NONE", None, False), (None, {}, False)],
)
def test_one_graph_and_steps_without_a_forward_pass_ask_for_no_layer(
    halves: Any, mode: str | None, attention: object, asks: bool
) -> None:
    from vllm.config import CUDAGraphMode

    from kvtier.connectors.vllm.layerwise import asks_for_layers

    kind = None if mode is None else CUDAGraphMode[mode]
    assert asks_for_layers(SimpleNamespace(cudagraph_runtime_mode=kind, attn_metadata=attention)) is asks
