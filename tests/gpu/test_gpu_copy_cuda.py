"""The copy tests of ``tests/unit`` on a CUDA device, and what exists there only: streams, events,
locked memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier.bench.gpu.copies import device_work
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, Pinning, regions_of, slot_tensor
from kvtier.gpu.rows import TorchRows
from kvtier.gpu.staged import StagedCopier
from kvtier.gpu.staging import CudaStreams
from kvtier.testing import ManualLane
from tests.unit.gpu.test_gpu_copy import (  # noqa: F401 - collected here again, with the place below
    IN_PIECES,
    device,
    make,
    test_a_save_takes_whole_chunks_only,
    test_a_wrong_load_moves_no_byte,
    test_an_engine_in_inference_mode_is_served,
    test_merged_and_separate_layers_give_the_same_slot,
    test_random_jobs_against_a_plain_model,
    test_slot_is_region_major_whatever_blocks_the_chunk_lay_in,
    test_what_was_saved_is_loaded_and_nothing_else_moves,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

CUDA = torch.device("cuda", 0)
BLOCKS, ROW_BYTES, BLOCKS_PER_CHUNK = 64, 1 << 20, 32


CHUNK = list(range(BLOCKS_PER_CHUNK))


class Small(CudaStreams):
    """Staging memory for two of the largest region: chunks go in pieces."""

    room = free = IN_PIECES


WAYS: dict[str, dict[str, Any]] = {
    "kernel, locked": {"locked": lambda _: ()},
    "kernel, not locked": {},
    "kernel, in pieces": {"locked": lambda _: (), "streams": Small},
    "kernel, locked in two pieces": {"locked": lambda part: (len(part) // 3,)},
    "torch, locked": {"locked": lambda _: (), "make_rows": TorchRows},
    "torch, in pieces, not locked": {"streams": Small, "make_rows": TorchRows},
}


@pytest.fixture(params=WAYS)
def place(request):
    """What is said to be locked and is not is copied by the driver through a buffer of its own:
    right, only slower."""
    given = WAYS[request.param]
    return CUDA, lambda: given | ({"streams": given["streams"](CUDA)} if "streams" in given else {})


@pytest.fixture
def pool():
    return Pool(8, BLOCKS_PER_CHUNK * ROW_BYTES)


@pytest.fixture(params=["locked", "not locked"])
def pinning(request, pool):
    """Of the pool: all of it, or nothing."""
    lane = ManualLane()
    pinning = Pinning(CUDA, lane=lane, piece_bytes=2 * pool.slot_bytes, rest=lambda _: None)
    if request.param == "locked":
        pinning.begin(pool.buffer, pool.slot_bytes)
        lane.run()
        assert locked(pinning, pool)
    yield pinning
    torch.cuda.synchronize()
    pinning.end(pool.buffer)


def locked(pinning, pool):
    return all(pinning.cuts(slot_tensor(pool.view(slot))) is not None for slot in range(pool.slots))


def keep_busy():
    """Queue work on the current stream that is still running when the next call is queued."""
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        square = square @ square / 4096


def engine(value, pinning):
    cache = torch.full((BLOCKS, ROW_BYTES), value, dtype=torch.uint8, device="cuda")
    return cache, PagedBlocks(
        regions_of({"layer.0": cache}, BLOCKS), BLOCKS_PER_CHUNK, locked=pinning.cuts
    )


def test_save_sees_what_the_current_stream_wrote_before_it(pool, pinning):
    cache, paged = engine(1, pinning)
    part = slot_tensor(pool.view(0))
    keep_busy()
    cache.fill_(2)

    paged.save([(part, 0, CHUNK)]).wait()

    assert bool((part == 2).all())


def test_saved_blocks_may_be_overwritten_at_once(pool, pinning):
    cache, paged = engine(1, pinning)
    parts = [slot_tensor(pool.view(slot)) for slot in range(8)]

    copy = paged.save([(part, 0, CHUNK) for part in parts])
    paged.settle()
    cache.fill_(9)
    copy.wait()

    assert all(bool((part == 1).all()) for part in parts)
    assert bool((cache == 9).all())


def test_what_follows_a_load_that_is_done_sees_it(pool, pinning):
    cache, paged = engine(1, pinning)
    part = slot_tensor(pool.view(0))
    part.fill_(9)

    copy = paged.load([(part, 0, CHUNK)])
    copy.wait()
    total = cache[:BLOCKS_PER_CHUNK].sum(dtype=torch.int64)

    assert int(total) == 9 * BLOCKS_PER_CHUNK * ROW_BYTES
    assert copy.done()
    assert copy.seconds


def test_load_waits_for_earlier_readers_of_its_blocks(pool, pinning):
    cache, paged = engine(3, pinning)
    part = slot_tensor(pool.view(0))
    part.fill_(9)
    keep_busy()
    total = cache[:BLOCKS_PER_CHUNK].sum(dtype=torch.int64)

    paged.load([(part, 0, CHUNK)]).wait()

    assert int(total) == 3 * BLOCKS_PER_CHUNK * ROW_BYTES


def test_a_copy_is_done_when_its_stream_got_there_and_not_before(pool, pinning):
    _, paged = engine(1, pinning)
    keep_busy()
    copy = paged.save([(slot_tensor(pool.view(0)), 0, CHUNK)])

    assert not copy.done()
    copy.wait()
    assert copy.done()


def test_a_region_can_be_locked_again_after_its_end(pool):
    lane = ManualLane()
    pinning = Pinning(CUDA, lane=lane, rest=lambda _: None)
    for _ in range(2):
        pinning.begin(pool.buffer, pool.slot_bytes)
        lane.run()
        assert locked(pinning, pool)
        pinning.end(pool.buffer)


def test_a_lane_locks_while_copies_run_and_a_refusal_harms_nothing(pool):
    first, second = (Pinning(CUDA, piece_bytes=pool.slot_bytes) for _ in range(2))
    _, paged = engine(4, first)
    part = slot_tensor(pool.view(7))
    first.begin(pool.buffer, pool.slot_bytes)
    while first.cuts(part) is None:
        paged.save([(part, 0, CHUNK)]).wait()
    second.begin(pool.buffer, pool.slot_bytes)  # locked already: the driver refuses
    second.close()

    assert second.cuts(part) is None
    assert int(torch.ones(3, device="cuda").sum()) == 3
    second.end(pool.buffer)
    first.end(pool.buffer)
    first.close()
    assert bool((part == 4).all())


# ---- launches, staging memory, addresses ---------------------------------------------------------


def layers(count=28, row=4096, blocks=2048):
    """32k tokens in blocks of 16, in one allocation."""
    cache = torch.zeros(count, blocks, row, dtype=torch.uint8, device=CUDA)
    regions = regions_of({f"layer.{index}": one for index, one in enumerate(cache)}, blocks)
    return PagedBlocks(regions, 16, locked=lambda _: ())


def copier(paged):
    assert isinstance(paged._copier, StagedCopier)
    return paged._copier


@pytest.mark.parametrize("way", ["save", "load"])
def test_32k_tokens_take_64_launches_at_most(way):
    pytest.importorskip("triton", exc_type=ImportError)
    paged = layers()
    part = torch.zeros(paged.block_bytes * 16, dtype=torch.uint8).pin_memory()
    jobs = [(part, 0, range(16 * chunk, 16 * chunk + 16)) for chunk in range(128)]
    move = getattr(paged, way)
    move(jobs[:1]).wait()
    rows = copier(paged).rows
    assert type(rows).__name__ == "KernelRows", "the kernel does not serve here"
    before = rows.launches

    seen = device_work(lambda: move(jobs).wait(), CUDA)

    assert rows.launches - before <= 64
    if seen.kernels is not None:
        assert seen.kernels == rows.launches - before
        assert seen.copies == 128 + 1, "one for the block ids"


def test_staging_memory_is_what_the_budget_says():
    before = torch.cuda.memory_allocated()
    cache = torch.zeros(2048, 4096, dtype=torch.uint8, device="cuda")
    engine_bytes = torch.cuda.memory_allocated() - before
    paged = PagedBlocks(regions_of({"layer.0": cache}, 2048), 16, locked=lambda _: ())
    plan, room = copier(paged).budget, CudaStreams(CUDA).room
    taken = torch.cuda.memory_allocated() - before - engine_bytes
    assert plan.bytes <= taken <= plan.bytes + (1 << 20)
    assert plan.bytes <= room + (64 << 20), "what is free has changed a little since"


def test_layers_more_than_4_gib_apart_are_reached():
    if torch.cuda.mem_get_info()[0] < 11 << 30:
        pytest.skip("needs 11 GiB of device memory")
    blocks, row = 300, 16 << 20
    cache = torch.empty(2, blocks, row, dtype=torch.uint8, device="cuda")
    for layer in range(2):
        for value, block in enumerate((0, 150, 298, 299)):
            cache[layer, block] = 1 + value + 10 * layer
    paged = PagedBlocks(regions_of({"a": cache[0], "b": cache[1]}, blocks), 4, locked=lambda _: ())
    part = torch.zeros(paged.block_bytes * 4, dtype=torch.uint8)

    paged.save([(part, 0, [299, 0, 298, 150])]).wait()
    cache[:, 140:145] = 0
    paged.load([(part, 0, [140, 141, 142, 143])]).wait()

    for layer in range(2):
        rows = cache[layer, 140:145].to(torch.int64)
        assert rows.amin(1).tolist() == rows.amax(1).tolist()
        assert rows.amin(1).tolist() == [
            4 + 10 * layer,
            1 + 10 * layer,
            3 + 10 * layer,
            2 + 10 * layer,
            0,
        ]


def test_nothing_is_locked_while_a_graph_is_captured(pool):
    lane = ManualLane()
    pinning = Pinning(CUDA, lane=lane, piece_bytes=pool.slot_bytes, rest=lambda _: None)
    numbers, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    pinning.begin(pool.buffer, pool.slot_bytes)
    with torch.cuda.graph(graph):
        pinning.look()
        lane.run()
        numbers.add_(1)
    assert not any(
        pinning.cuts(slot_tensor(pool.view(slot))) is not None for slot in range(pool.slots)
    )
    pinning.look()
    lane.run()
    graph.replay()
    assert int(numbers.sum()) == 8
    assert locked(pinning, pool)
    pinning.end(pool.buffer)


def test_a_slot_with_other_memory_is_not_copied_from_the_pages_that_the_device_had(pool):
    lane, slot = ManualLane(), slot_tensor(pool.view(0))
    pinning = Pinning(CUDA, lane=lane, rest=lambda _: None)
    pinning.begin(pool.buffer, pool.slot_bytes, is_lent=True)
    slot.fill_(1)
    assert pinning.cuts(slot) is None, "it is locked when a copy first needs it"
    lane.run()
    assert pinning.cuts(slot) is not None

    pool.give_back(0)
    slot.fill_(2)
    pinning.renew(slot)
    assert pinning.cuts(slot) is None
    lane.run()
    assert pinning.cuts(slot) is not None
    there = torch.empty(len(slot), dtype=torch.uint8, device=CUDA)
    there.copy_(slot, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((there == 2).all())
    pinning.end(pool.buffer)
