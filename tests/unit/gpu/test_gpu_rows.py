"""Staging memory and the rows that move through it: budgets, launches, and the kernel beside
torch's way."""

import importlib
import logging
import mmap
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.core.errors import LayoutError
from kvtier.gpu import PagedBlocks, regions_of
from kvtier.gpu.regions import merged, widest_word
from kvtier.gpu.rows import TorchRows, rows_of
from kvtier.gpu.staged import StagedCopier
from kvtier.gpu.staging import (
    Budget,
    Ring,
    StagingBatch,
    StagingSegment,
    StagingSlot,
    budget,
    rings,
)
from tests.unit.paged_engines import BLOCKS, BLOCKS_PER_CHUNK, ENGINES
from tests.unit.paged_streams import Held, Inline
from tests.unit.triton_interpreter import interpreted

CPU = torch.device("cpu")
MIB = 1 << 20
_NO_RESERVE = 0x4000
"""Linux's ``MAP_NORESERVE``."""


def launches(plan, chunks):
    """Launches of a load of so many chunks."""
    places = [StagingSlot(torch.zeros(1), [])] * plan.loading
    return len(plan.pieces) * -(-chunks // Ring(places).batch)


@pytest.mark.parametrize("layers", [28, 32, 61, 80])
@pytest.mark.parametrize("token_bytes", [512, 1152, 2048])
def test_a_load_of_32k_tokens_takes_64_launches_at_most(layers, token_bytes):
    """512 MiB is what a device with 4 GiB of free memory gives."""
    plan = budget([256 * token_bytes] * layers, 512 * MIB, 4096 * MIB)
    assert len(plan.pieces) == 1
    assert launches(plan, 128) <= 64


@pytest.mark.parametrize("room", [2, 3, 5, 9, 20, 24, 40, 100, 500, 10_000])
@pytest.mark.parametrize("sizes", [[1] * 6, [1, 1, 1, 1, 5, 1], [3], [2, 7, 7, 1]])
def test_staging_memory_stays_within_its_room_or_is_refused(sizes, room):
    if 2 * max(sizes) > room:
        with pytest.raises(
            LayoutError, match=f"need {2 * max(sizes)} bytes.*{room} of the 77 free bytes"
        ):
            budget(sizes, room, 77)
        return
    plan = budget(sizes, room, 77)
    assert plan.bytes <= room
    assert 1 <= plan.loading <= 12
    assert 1 <= plan.saving <= 64
    covered = [region for piece in plan.pieces for region in range(piece.first, piece.end)]
    assert covered == list(range(len(sizes)))
    for piece in plan.pieces:
        assert (piece.start, piece.size) == (
            sum(sizes[: piece.first]),
            sum(sizes[piece.first : piece.end]),
        )
        assert piece.size <= plan.place_bytes
    assert (len(plan.pieces) == 1) is (4 * sum(sizes) <= room or (sum(sizes) == max(sizes)))


@pytest.mark.parametrize(
    ("fit", "pieces", "expected"),
    [(24, 1, 13), (16, 1, 19), (6, 1, 64), (4, 1, 128), (3, 2, 128), (2, 2, 256)],
)
def test_how_many_launches_a_load_takes_is_a_matter_of_how_many_chunks_fit(fit, pieces, expected):
    """The pieces of a chunk are equally long, or the last would leave memory unused."""
    plan = budget([MIB] * 80, fit * 80 * MIB, 0)
    assert (len(plan.pieces), launches(plan, 128)) == (pieces, expected)
    assert {piece.size for piece in plan.pieces} == {80 * MIB // pieces}


def test_all_staging_memory_is_one_allocation_of_what_the_budget_says():
    plan = Budget((StagingSegment(0, 2, 0, 24),), 24, 3, 2)
    saving, loading = rings(plan, torch.int64, CPU)
    places = [*saving.take(3), *loading.take(2)]
    assert [place.address - places[0].address for place in places] == [0, 24, 48, 72, 96]
    assert places[0].words.untyped_storage().nbytes() == plan.bytes


def test_places_are_used_in_turn():
    ring = Ring(places := [StagingSlot(torch.zeros(2), []) for _ in range(3)])
    assert ring.batch == 2
    assert ring.take(2) + ring.take(2) == [places[0], places[1], places[2], places[0]]


def test_an_engine_without_room_for_staging_is_refused_at_its_start():
    engine = ENGINES["LBHNC"](CPU)
    with pytest.raises(LayoutError, match=r"need 768 bytes of device memory.*767 of the 767 free"):
        PagedBlocks(regions_of(engine.caches, BLOCKS), BLOCKS_PER_CHUNK, streams=Held(room=767))


@pytest.mark.parametrize(("way", "dmas"), [("save", 4), ("load", 3)])
@pytest.mark.parametrize("name", ["LBHNC", "keys_and_values_apart", "unequal_layers"])
def test_one_launch_moves_many_chunks_of_all_regions(way, dmas, name):
    engine = ENGINES[name](CPU)
    streams, made = Inline(), list[Any]()
    queued = list[object]()

    def do(stream, work):
        queued.append(work)
        work()

    streams.do = do  # type: ignore[method-assign]
    regions = regions_of(engine.caches, BLOCKS)
    streams.room = 16 * BLOCKS_PER_CHUNK * sum(region.rows.shape[1] for region in regions)

    def make_rows(*given):
        made.append(interpreted().KernelRows(*given))
        return made[0]

    paged = PagedBlocks(
        regions, BLOCKS_PER_CHUNK, locked=lambda _: (), streams=streams, make_rows=make_rows
    )
    assert isinstance(paged._copier, StagedCopier)
    parts = [
        torch.zeros(paged.block_bytes * BLOCKS_PER_CHUNK, dtype=torch.uint8) for _ in range(11)
    ]
    jobs = [
        (part, 0, [index % 9, (index + 1) % 9, (index + 3) % 9, (index + 4) % 9])
        for index, part in enumerate(parts)
    ]
    assert launches(paged._copier.budget, len(jobs)) == 2, "seven chunks a launch"

    getattr(paged, way)(jobs).wait()

    assert made[0].launches == 2
    assert len(queued) == 2 + dmas, "DMAs that wait for the same are queued together"


@pytest.mark.parametrize(
    ("row", "word"), [(7, torch.uint8), (6, torch.int16), (20, torch.int32), (16, torch.int64)]
)
def test_rows_of_any_width_move_in_the_widest_words_that_fit(row, word):
    memory = torch.arange(3 * 5 * row).to(torch.uint8).view(3, 5, row)
    groups = merged(list(memory))
    assert widest_word(groups) == word
    groups = [group.view(word) for group in groups]
    plan = budget([2 * row] * 3, 1000, 1000)
    (place,) = rings(plan, word, CPU)[0].take(1)
    table = torch.tensor([[4, 1], [place.address] * 2, [0, 1]])
    interpreted().KernelRows(groups, 2).gather(
        StagingBatch(0, plan.pieces[0], 0, [(place, 0, 2)]), table
    )
    assert torch.equal(place.bytes(0).view(3, 2, row), memory[:, [4, 1]])


def test_a_row_of_several_tiles_and_a_part_of_one_is_whole():
    kernel = interpreted()
    row = (2 * kernel._MOST_WORDS + 5) * 8
    memory = torch.randint(0, 255, (2, 3, row), dtype=torch.uint8)
    plan = budget([row] * 2, 10 * row, 10 * row)
    (place,) = rings(plan, torch.int64, CPU)[0].take(1)
    groups = [group.view(torch.int64) for group in merged(list(memory))]
    table = torch.tensor([[2], [place.address], [0]])
    kernel.KernelRows(groups, 1).gather(StagingBatch(0, plan.pieces[0], 0, [(place, 0, 1)]), table)
    assert torch.equal(place.bytes(0).view(2, row), memory[:, 2])


def test_blocks_and_regions_may_lie_further_apart_than_32_bits_tell():
    """Memory that nobody touches is not there: a few pages of twelve GiB are."""
    pitch, apart, row = (5 << 29) + 64, 3 << 31, 64
    backing = mmap.mmap(-1, 12 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    memory = torch.frombuffer(backing, dtype=torch.uint8)
    regions = memory.as_strided((2, 3, row), (apart, pitch, 1))
    for region in range(2):
        regions[region, 2] = 10 + region
    groups = [regions.view(torch.int64)]
    plan = budget([row] * 2, 1000, 1000)
    (place,) = rings(plan, torch.int64, CPU)[0].take(1)
    rows, batch = (
        interpreted().KernelRows(groups, 1),
        StagingBatch(0, plan.pieces[0], 0, [(place, 0, 1)]),
    )
    rows.gather(batch, torch.tensor([[2], [place.address], [0]]))
    assert place.bytes(0).tolist() == [10] * row + [11] * row
    rows.scatter(batch, torch.tensor([[1], [place.address], [0]]))
    assert [set(regions[region, 1].tolist()) for region in range(2)] == [{10}, {11}]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "target", [("cuda", 75, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str
)
@pytest.mark.parametrize("word", ["int64", "uint8"])
def test_the_kernel_compiles_for_devices_that_are_not_here(target, word, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", exc_type=ImportError)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = importlib.import_module("kvtier.gpu.kernel")._move_rows
    constants = {
        "WORD": getattr(triton.language, word),
        "WORD_BYTES": 8 if word == "int64" else 1,
        "TILE": 1024,
    }
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    source = triton.compiler.ASTSource(
        kernel, types | {"regions": "*i64", "table": "*i64"}, constants
    )
    made = triton.compile(source, target=triton.backends.compiler.GPUTarget(*target))
    assert {"cubin", "hsaco"} & made.asm.keys()


class OnCuda:
    """Stands for a group on a CUDA device: only asked where it lies."""

    is_cuda, device = True, "cuda:0"


@pytest.mark.parametrize(
    "missing", [True, False], ids=["not installed", "does not serve the device"]
)
def test_where_triton_does_not_serve_torch_does_and_it_is_said(missing, monkeypatch, caplog):
    serves_nothing: Any = None if missing else SimpleNamespace(KernelRows=lambda *_: 1 / 0)
    monkeypatch.setitem(sys.modules, "kvtier.gpu.kernel", serves_nothing)
    groups: Any = [OnCuda()]
    with caplog.at_level(logging.WARNING):
        assert isinstance(rows_of(groups, 4), TorchRows)
    assert "Triton serves no copies on cuda:0" in caplog.text


def test_wrong_bytes_of_the_kernel_are_found_before_it_serves(monkeypatch):
    kernel = interpreted()
    monkeypatch.setattr(kernel.KernelRows, "_launch", lambda *_: None)
    with pytest.raises(RuntimeError, match="moves wrong bytes on cpu"):
        kernel.KernelRows([torch.zeros(1, 2, 8, dtype=torch.int64)], 1)


def test_triton_is_not_imported_on_a_cpu():
    script = """
import sys, torch, kvtier, kvtier.gpu
from kvtier.gpu import PagedBlocks, regions_of
PagedBlocks(regions_of({"a": torch.zeros(4, 8)}, 4), 2)
assert "kvtier.gpu.kernel" not in sys.modules
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
