"""Blocks <-> slots on CPU tensors, by both copiers: the host's own and the staged one that GPUs
use.

``tests/gpu`` runs the same tests on a CUDA device by giving its own ``place`` fixture.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier.core.errors import StateError
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, regions_of, slot_tensor
from kvtier.gpu.blocks import plan
from kvtier.gpu.regions import merged
from tests.unit.paged_engines import (
    BLOCKS,
    BLOCKS_PER_CHUNK,
    ENGINES,
    LAYERS,
    ORDERS,
    Engine,
    as_bytes,
    fill,
    keys_and_values_apart,
    one_backing,
)
from tests.unit.paged_streams import Held, Inline
from tests.unit.triton_interpreter import interpreted

WHOLE, IN_PIECES = 10000, 1600
"""Bytes of staging memory: for some chunks of the engines here, or for two regions of the
largest."""

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "host": dict,
    "staged": lambda: {"streams": Inline(), "locked": lambda _: ()},
    "staged, slots not locked": lambda: {"streams": Inline()},
    ("staged, slots locked in two pieces"): lambda: {
        "streams": Inline(),
        "locked": lambda part: (len(part) // 3,),
    },
    "staged, chunks in pieces": lambda: {"streams": held(3, IN_PIECES), "locked": lambda _: ()},
    "staged, chunks in pieces, not locked": lambda: {"streams": held(5, IN_PIECES)},
    "staged, in any order": lambda: {"streams": held(6, WHOLE), "locked": lambda _: ()},
    "staged, in any order, not locked": lambda: {"streams": held(4, WHOLE)},
    "kernel": lambda: {
        "streams": Inline(),
        "locked": lambda _: (),
        "make_rows": interpreted().KernelRows,
    },
    "kernel, chunks in pieces": lambda: {
        "streams": held(7, IN_PIECES),
        "locked": lambda _: (),
        "make_rows": interpreted().KernelRows,
    },
}


def held(seed, room):
    return Held(room=room, dice=random.Random(seed))


@pytest.fixture(params=WAYS)
def place(request):
    return torch.device("cpu"), WAYS[request.param]


@pytest.fixture
def device(place):
    return place[0]


@pytest.fixture
def make(place):
    def paged_blocks(engine):
        return PagedBlocks(regions_of(engine.caches, BLOCKS), BLOCKS_PER_CHUNK, **place[1]())

    return paged_blocks


def slot_part(paged):
    return torch.zeros(paged.block_bytes * BLOCKS_PER_CHUNK, dtype=torch.uint8)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    ("saved", "loaded"), [([7, 2, 3, 0], [1, 8, 5, 6]), ([4, 5, 6, 7], [0, 1, 2, 3])]
)
def test_what_was_saved_is_loaded_and_nothing_else_moves(make, device, name, first, saved, loaded):
    engine = ENGINES[name](device)
    fill(engine)
    paged = make(engine)
    part = slot_part(paged)
    expected = ENGINES[name](device)
    for mine, theirs in zip(expected.backings, engine.backings, strict=True):
        mine.copy_(theirs)
    for layer in engine.caches:
        for source, target in list(zip(saved, loaded, strict=True))[first:]:
            expected.block(layer, target).copy_(engine.block(layer, source))

    paged.save([(part, 0, saved)]).wait()
    paged.load([(part, first, loaded[first:])]).wait()

    for got, wanted in zip(engine.memory(), expected.memory(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("blocks", [[7, 2, 3, 0], [3, 4, 5, 6]])
def test_slot_is_region_major_whatever_blocks_the_chunk_lay_in(make, device, blocks):
    engine = one_backing(ORDERS["LBNHC"], device)
    fill(engine)
    paged = make(engine)
    part = slot_part(paged)

    paged.save([(part, 0, blocks)]).wait()

    rows = [
        engine.block(layer, block).transpose(1, 2) for layer in engine.caches for block in blocks
    ]
    assert as_bytes(part) == b"".join(as_bytes(row) for row in rows)


def test_merged_and_separate_layers_give_the_same_slot(make, device):
    together = one_backing(ORDERS["LBHNC"], device)
    fill(together)
    clones = {name: cache.clone() for name, cache in together.caches.items()}
    apart = Engine(clones, list(clones.values()))
    parts = []
    for engine, strided_copies in ((together, 1), (apart, LAYERS)):
        paged = make(engine)
        assert len(merged([region.rows for region in paged._regions])) == strided_copies
        parts.append(slot_part(paged))
        paged.save([(parts[-1], 0, [8, 1, 0, 5])]).wait()

    assert torch.equal(*parts)


@pytest.mark.parametrize("order", ORDERS)
def test_layers_of_one_backing_move_in_one_strided_copy(device, order):
    regions = regions_of(one_backing(ORDERS[order], device).caches, BLOCKS)

    groups = merged([region.rows for region in regions])

    assert [tuple(group.shape) for group in groups] == [
        (len(regions), BLOCKS, regions[0].rows.shape[1])
    ]


@pytest.mark.parametrize(
    ("blocks", "runs", "scattered"),
    [
        ([7, 8, 9, 3, 5, 4], [(2, 7, 3), (5, 3, 1), (6, 5, 1), (7, 4, 1)], True),
        ([7, 8, 9, 3, 4, 5], [(2, 7, 3), (5, 3, 3)], False),
        ([4], [(2, 4, 1)], False),
    ],
)
def test_neighbouring_blocks_move_together(blocks, runs, scattered):
    found, index = plan(2, blocks)

    assert found == runs
    assert (index is not None) is scattered


def test_a_copy_keeps_the_slots_memory():
    engine = one_backing(ORDERS["LBHNC"], torch.device("cpu"))
    paged = PagedBlocks(regions_of(engine.caches, BLOCKS), BLOCKS_PER_CHUNK)
    memory = bytearray(paged.block_bytes * BLOCKS_PER_CHUNK)

    copy = paged.save([(slot_tensor(memoryview(memory)), 0, [0, 1, 2, 3])])

    with pytest.raises(BufferError):
        memory.append(0)
    del copy
    memory.append(0)


def _no_change(part):
    return part


@pytest.mark.parametrize(
    ("change", "first", "blocks", "words"),
    [
        (_no_change, 0, [0, 1, 2, 9], "0 .. 8"),
        (_no_change, 0, [0, 1, 2, -1], "-1 .. 3"),
        (_no_change, 1, [0, 1, 2, 3], "4 blocks from block 1"),
        (_no_change, -1, [0, 1], "from block -1"),
        (_no_change, 2, [], "0 blocks from block 2"),
        (lambda part: part[1:], 0, [0, 1, 2, 3], "expected 1152"),
        (lambda part: part.view(torch.int8), 0, [0, 1, 2, 3], "of torch.int8"),
        (lambda part: part.repeat_interleave(2)[::2], 0, [0, 1, 2, 3], "dense uint8"),
    ],
)
def test_a_wrong_load_moves_no_byte(make, device, change, first, blocks, words):
    engine = one_backing(ORDERS["LBHNC"], device)
    fill(engine)
    before = engine.memory()
    paged = make(engine)
    part = slot_part(paged)

    with pytest.raises(StateError, match=words):
        paged.load([(part, 0, [0, 1, 2, 3]), (change(part), first, blocks)])

    assert torch.equal(engine.memory()[0], before[0])


@pytest.mark.parametrize(("first", "blocks"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (0, [0, 1, 2, 9])])
def test_a_save_takes_whole_chunks_only(make, device, first, blocks):
    engine = one_backing(ORDERS["LBHNC"], device)
    fill(engine)
    paged = make(engine)
    part = slot_part(paged)

    with pytest.raises(StateError):
        paged.save([(part, 0, [0, 1, 2, 3]), (part, first, blocks)])

    assert not part.any()


def test_slot_tensor_is_the_pools_memory():
    pool = Pool(2, 4096)
    slot_tensor(pool.view(1)).fill_(7)

    assert bytes(pool.view(1)) == b"\7" * 4096
    assert bytes(pool.view(0)) == bytes(4096)
    with pytest.raises(StateError, match="read-only"):
        slot_tensor(pool.view(0).toreadonly())


def test_random_jobs_against_a_plain_model(make, device):
    """Saves and loads of two chunks a call, of which loads begin and end anywhere inside. The
    model is a dict of bytes by slot and by block."""
    dice = random.Random(5)
    engine = keys_and_values_apart(device)
    fill(engine)
    paged = make(engine)
    parts = [slot_part(paged) for _ in range(3)]
    slots: dict[int, list[bytes]] = {}
    blocks = {block: content(engine, block) for block in range(BLOCKS)}
    for _ in range(40):
        chosen = dice.sample(range(BLOCKS), 2 * BLOCKS_PER_CHUNK)
        chunks = chosen[:BLOCKS_PER_CHUNK], chosen[BLOCKS_PER_CHUNK:]
        if len(slots) < len(parts) or dice.random() < 0.5:
            saved = dict(zip(dice.sample(range(len(parts)), 2), chunks, strict=True))
            copy = paged.save([(parts[slot], 0, ids) for slot, ids in saved.items()])
            slots |= {slot: [blocks[block] for block in ids] for slot, ids in saved.items()}
        else:
            jobs = []
            for ids in chunks:
                slot = dice.randrange(len(parts))
                first, end = sorted(dice.sample(range(BLOCKS_PER_CHUNK + 1), 2))
                jobs.append((parts[slot], first, ids[first:end]))
                blocks |= dict(zip(ids[first:end], slots[slot][first:end], strict=True))
            copy = paged.load(jobs)
        copy.wait()
        assert copy.done()
        assert blocks == {block: content(engine, block) for block in range(BLOCKS)}


def content(engine, block):
    return b"".join(as_bytes(engine.block(layer, block)) for layer in engine.caches)


def test_an_engine_in_inference_mode_is_served(make, device):
    with torch.inference_mode():
        engine = one_backing(ORDERS["LBHNC"], device)
        fill(engine)
        paged = make(engine)
    part = slot_part(paged)
    wanted = content(engine, 1)

    paged.save([(part, 0, [0, 1, 2, 3])]).wait()
    paged.load([(part, 0, [8, 7, 6, 5])]).wait()

    assert content(engine, 7) == wanted
