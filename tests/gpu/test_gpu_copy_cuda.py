"""The copy tests of ``tests/unit`` on a CUDA device, and what exists there only: streams, events, pinned memory."""

from __future__ import annotations

import pytest
import torch

from kvtier import gpu
from kvtier.gpu import PagedBlocks, pin, regions_of, slot_tensor, unpin
from kvtier.pool import Pool
from tests.unit.test_gpu_copy import (  # noqa: F401 - collected here again, with the place below
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


@pytest.fixture
def place() -> tuple[torch.device, bool]:
    return torch.device("cuda"), False


@pytest.fixture
def pool() -> Pool:
    return Pool(2, BLOCKS_PER_CHUNK * ROW_BYTES)


def keep_busy() -> None:
    """Queue work on the current stream that is still running when the next call is queued."""
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        square = square @ square / 4096


def engine(value: int) -> tuple[torch.Tensor, PagedBlocks]:
    cache = torch.full((BLOCKS, ROW_BYTES), value, dtype=torch.uint8, device="cuda")
    return cache, PagedBlocks(regions_of({"layer.0": cache}, BLOCKS), BLOCKS_PER_CHUNK)


def test_save_sees_what_the_current_stream_wrote_before_it(pool: Pool) -> None:
    cache, paged = engine(1)
    part = slot_tensor(pool.view(0))
    keep_busy()
    cache.fill_(2)

    paged.save([(part, 0, list(range(BLOCKS_PER_CHUNK)))]).wait()

    assert bool((part == 2).all())


def test_later_work_of_the_current_stream_sees_the_load(pool: Pool) -> None:
    cache, paged = engine(1)
    part = slot_tensor(pool.view(0))
    part.fill_(9)
    addresses = pin(pool.buffer, pool.slot_bytes)

    copy = paged.load([(part, 0, list(range(BLOCKS_PER_CHUNK)))])
    total = cache[:BLOCKS_PER_CHUNK].sum(dtype=torch.int64)

    assert int(total) == 9 * BLOCKS_PER_CHUNK * ROW_BYTES
    copy.wait()
    unpin(addresses)


def test_load_waits_for_earlier_readers_of_its_blocks(pool: Pool) -> None:
    cache, paged = engine(3)
    part = slot_tensor(pool.view(0))
    part.fill_(9)
    keep_busy()
    total = cache[:BLOCKS_PER_CHUNK].sum(dtype=torch.int64)

    paged.load([(part, 0, list(range(BLOCKS_PER_CHUNK)))]).wait()

    assert int(total) == 3 * BLOCKS_PER_CHUNK * ROW_BYTES


def test_a_copy_is_done_when_its_stream_got_there_and_not_before(pool: Pool) -> None:
    _, paged = engine(1)
    keep_busy()
    copy = paged.save([(slot_tensor(pool.view(0)), 0, list(range(BLOCKS_PER_CHUNK)))])

    assert not copy.done()
    copy.wait()
    assert copy.done()


def test_a_pinned_region_works_and_can_be_pinned_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_PIN_PIECE", pool.slot_bytes)
    _, paged = engine(4)
    for _ in range(2):
        addresses = pin(pool.buffer, pool.slot_bytes)
        assert len(addresses) == pool.slots
        paged.save([(slot_tensor(pool.view(1)), 0, list(range(BLOCKS_PER_CHUNK)))]).wait()
        assert bytes(pool.view(1)[:8]) == b"\4" * 8
        unpin(addresses)


def test_refused_pinning_leaves_no_error_behind(pool: Pool) -> None:
    first = pin(pool.buffer, pool.slot_bytes)

    assert pin(pool.buffer, pool.slot_bytes) == []  # already registered: the driver refuses
    assert int(torch.ones(3, device="cuda").sum()) == 3
    unpin(first)
