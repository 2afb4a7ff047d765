"""The copy tests of ``tests/unit`` on a CUDA device, and what exists there only: streams, events, locked memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, Pinning, regions_of, slot_tensor
from kvtier.testing import ManualLane
from tests.unit.gpu.test_gpu_copy import (  # noqa: F401 - collected here again, with the place below
    device,
    make,
    test_a_load_may_end_inside_its_chunk,
    test_a_save_takes_whole_chunks_only,
    test_a_wrong_load_moves_no_byte,
    test_an_engine_in_inference_mode_is_served,
    test_jobs_of_one_call_do_not_disturb_each_other,
    test_merged_and_separate_layers_give_the_same_slot,
    test_random_jobs_against_a_plain_model,
    test_slot_is_region_major_whatever_blocks_the_chunk_lay_in,
    test_what_was_saved_is_loaded_and_nothing_else_moves,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKS, ROW_BYTES, BLOCKS_PER_CHUNK = 64, 1 << 20, 32


CHUNK = list(range(BLOCKS_PER_CHUNK))


@pytest.fixture(params=["locked", "not locked"])
def place(request: pytest.FixtureRequest) -> Any:
    """What is said to be locked and is not is copied by the driver through a buffer of its own: right, only slower."""
    return torch.device("cuda"), lambda: {"pinned": lambda _: request.param == "locked"}


@pytest.fixture
def pool() -> Pool:
    return Pool(8, BLOCKS_PER_CHUNK * ROW_BYTES)


@pytest.fixture(params=["locked", "not locked"])
def pinning(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Pinning]:
    """Of the pool: all of it, or nothing."""
    lane = ManualLane()
    pinning = Pinning(torch.device("cuda", 0), lane=lane, piece_bytes=2 * pool.slot_bytes)
    if request.param == "locked":
        pinning.begin(pool.buffer, pool.slot_bytes)
        lane.run()
        assert pinning.covers(slot_tensor(pool.buffer))
    yield pinning
    torch.cuda.synchronize()
    pinning.end(pool.buffer)


def keep_busy() -> None:
    """Queue work on the current stream that is still running when the next call is queued."""
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        square = square @ square / 4096


def engine(value: int, pinning: Pinning) -> tuple[torch.Tensor, PagedBlocks]:
    cache = torch.full((BLOCKS, ROW_BYTES), value, dtype=torch.uint8, device="cuda")
    return cache, PagedBlocks(regions_of({"layer.0": cache}, BLOCKS), BLOCKS_PER_CHUNK, pinned=pinning.covers)


def test_save_sees_what_the_current_stream_wrote_before_it(pool: Pool, pinning: Pinning) -> None:
    cache, paged = engine(1, pinning)
    part = slot_tensor(pool.view(0))
    keep_busy()
    cache.fill_(2)

    paged.save([(part, 0, CHUNK)]).wait()

    assert bool((part == 2).all())


def test_saved_blocks_may_be_overwritten_at_once(pool: Pool, pinning: Pinning) -> None:
    cache, paged = engine(1, pinning)
    parts = [slot_tensor(pool.view(slot)) for slot in range(8)]

    copy = paged.save([(part, 0, CHUNK) for part in parts])
    cache.fill_(9)
    copy.wait()

    assert all(bool((part == 1).all()) for part in parts)
    assert bool((cache == 9).all())


def test_what_follows_a_load_that_is_done_sees_it(pool: Pool, pinning: Pinning) -> None:
    cache, paged = engine(1, pinning)
    part = slot_tensor(pool.view(0))
    part.fill_(9)

    copy = paged.load([(part, 0, CHUNK)])
    copy.wait()
    total = cache[:BLOCKS_PER_CHUNK].sum(dtype=torch.int64)

    assert int(total) == 9 * BLOCKS_PER_CHUNK * ROW_BYTES
    assert copy.done()
    assert copy.seconds


def test_load_waits_for_earlier_readers_of_its_blocks(pool: Pool, pinning: Pinning) -> None:
    cache, paged = engine(3, pinning)
    part = slot_tensor(pool.view(0))
    part.fill_(9)
    keep_busy()
    total = cache[:BLOCKS_PER_CHUNK].sum(dtype=torch.int64)

    paged.load([(part, 0, CHUNK)]).wait()

    assert int(total) == 3 * BLOCKS_PER_CHUNK * ROW_BYTES


def test_a_copy_is_done_when_its_stream_got_there_and_not_before(pool: Pool, pinning: Pinning) -> None:
    _, paged = engine(1, pinning)
    keep_busy()
    copy = paged.save([(slot_tensor(pool.view(0)), 0, CHUNK)])

    assert not copy.done()
    copy.wait()
    assert copy.done()


def test_a_region_can_be_locked_again_after_its_end(pool: Pool) -> None:
    lane = ManualLane()
    pinning = Pinning(torch.device("cuda", 0), lane=lane)
    for _ in range(2):
        pinning.begin(pool.buffer, pool.slot_bytes)
        lane.run()
        assert pinning.covers(slot_tensor(pool.buffer))
        pinning.end(pool.buffer)


def test_a_lane_locks_while_copies_run_and_a_refusal_harms_nothing(pool: Pool) -> None:
    first, second = (Pinning(torch.device("cuda", 0), piece_bytes=pool.slot_bytes) for _ in range(2))
    _, paged = engine(4, first)
    part = slot_tensor(pool.view(7))
    first.begin(pool.buffer, pool.slot_bytes)
    while not first.covers(part):
        paged.save([(part, 0, CHUNK)]).wait()
    second.begin(pool.buffer, pool.slot_bytes)  # locked already: the driver refuses
    second.close()

    assert not second.covers(part)
    assert int(torch.ones(3, device="cuda").sum()) == 3
    second.end(pool.buffer)
    first.end(pool.buffer)
    first.close()
    assert bool((part == 4).all())
