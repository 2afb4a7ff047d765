"""How near saves and loads on CPU tensors come to a plain memcpy of the same bytes.

    python -m kvtier.bench.micro.copy [--variants] [--out FILE]

The engine's side is one allocation ``[layer, block, row]`` as vLLM's CPU backend makes it. The
slots are a populated :class:`~kvtier.core.pool.Pool`. Both have at least 512 MiB, so that no CPU
cache holds them. One thread copies. The reference is a ``memmove`` of whole chunks between the same
two memories, in the same direction. Rounds of reference, save and load alternate, and another one
begins each time. A row is the median with the lowest and the highest. Its ``ratio`` is the median
of the ratios to the reference of the same round. Its ``limit`` is what the project asks for, as a
share of the reference's median. The clock is the thread's CPU time, so that other work on the
machine does not count.

``--variants`` measures every other way that was tried instead. ``bench/NOTES.md`` says why each was
dropped.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvtier.bench.flags import described
from kvtier.bench.report import Row, print_rows, spread, write_results
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, regions_of, slot_tensor

CHUNK_TOKENS = 256
SHARES = {16: 0.45, 128: 0.70}
"""What the project asks for, by block size: the share of memcpy's bandwidth."""
Work = Callable[[], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Geometry:
    name: str
    layers: int
    token_bytes: int
    """Bytes of one token in one layer."""
    block_tokens: int

    @property
    def row_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def blocks_per_chunk(self) -> int:
        return CHUNK_TOKENS // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.layers * self.token_bytes * CHUNK_TOKENS


GQA = [
    Geometry(f"28 layers x 2 heads x 128, bf16; blocks of {tokens}", 28, 1024, tokens)
    for tokens in (128, 64, 16)
]
MORE = [
    *(
        Geometry(f"MLA 27 layers x 576, bf16; blocks of {tokens}", 27, 1152, tokens)
        for tokens in (128, 64, 16)
    ),
    *(
        Geometry(
            f"80 layers x 8 heads x 128, bf16, 1 of 8 ranks; blocks of {tokens}", 80, 512, tokens
        )
        for tokens in (128, 16)
    ),
    Geometry("80 layers x 8 heads x 128, bf16, 1 rank; blocks of 16", 80, 4096, 16),
]


class Bench:
    """The memory of one geometry: ``chunks`` chunks of blocks in random order, and as many
    slots."""

    def __init__(
        self,
        geometry: Geometry,
        megabytes: int,
        *,
        huge: bool = False,
        in_order: bool = False,
        packed: bool = False,
    ) -> None:
        self.geometry = geometry
        self.chunks = max(2, -(-megabytes * 2**20 // geometry.chunk_bytes))
        self.bytes = self.chunks * geometry.chunk_bytes
        blocks = self.chunks * geometry.blocks_per_chunk
        backing = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            backing.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(backing, dtype=torch.uint8)
        if packed:
            self.paged = memory.view(blocks, geometry.layers, geometry.row_bytes).transpose(0, 1)
        else:
            self.paged = memory.view(geometry.layers, blocks, geometry.row_bytes)
        self.paged.random_(0, 256)
        order = list(range(blocks))
        if not in_order:
            random.Random(1).shuffle(order)
        step = geometry.blocks_per_chunk
        self.block_ids = [order[start : start + step] for start in range(0, blocks, step)]
        self.pool = Pool(self.chunks, -(-geometry.chunk_bytes // 4096) * 4096)
        for slot in range(self.chunks):
            self.pool.populate(slot, 1)
        self.parts = self.slot_parts(self.pool)
        caches = {f"layer.{layer}": rows for layer, rows in enumerate(self.paged)}
        self.copier = PagedBlocks(regions_of(caches, blocks), step)

    def slot_parts(self, pool: Pool) -> list[torch.Tensor]:
        return [
            slot_tensor(pool.view(slot)[: self.geometry.chunk_bytes]) for slot in range(self.chunks)
        ]

    def memcpy(self, *, to_slots: bool) -> Work:
        start, size = self.paged.data_ptr(), self.geometry.chunk_bytes
        pairs = [(part.data_ptr(), start + index * size) for index, part in enumerate(self.parts)]
        if not to_slots:
            pairs = [(source, target) for target, source in pairs]

        def copy_all() -> None:
            for target, source in pairs:
                ctypes.memmove(target, source, size)

        return copy_all

    def save(self) -> None:
        for part, block_ids in zip(self.parts, self.block_ids, strict=True):
            self.copier.save([(part, 0, block_ids)])

    def load(self) -> None:
        for part, block_ids in zip(self.parts, self.block_ids, strict=True):
            self.copier.load([(part, 0, block_ids)])

    def save_in_one_call(self) -> None:
        self.copier.save(
            [(part, 0, ids) for part, ids in zip(self.parts, self.block_ids, strict=True)]
        )

    def check(self) -> None:
        """Raise when a copy is wrong, because the numbers would mean nothing."""
        self.save()
        rows = self.parts[1].view(self.geometry.layers, self.geometry.blocks_per_chunk, -1)
        if not torch.equal(rows, self.paged[:, self.block_ids[1]]):
            raise SystemExit(f"{self.geometry.name}: wrong bytes in the slot")

    def close(self) -> None:
        self.parts.clear()
        self.pool.close()


class Moves(Protocol):
    bytes: int
    """How many bytes each of its works moves."""


def measure(
    bench: Moves, works: dict[str, Work], rounds: int, clock: Clock = time.thread_time
) -> dict[str, list[float]]:
    """GB/s of every work in every round. Rounds alternate. Each begins with the next work."""
    names = list(works)
    seen: dict[str, list[float]] = {name: [] for name in names}
    for work in works.values():
        work()
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            works[name]()
            seen[name].append(bench.bytes / (clock() - start) / 1e9)
    return seen


def against(
    name: str, values: Sequence[float], reference: Sequence[float], share: float | None = None
) -> Row:
    """``values`` with their ratios to ``reference`` of the same rounds."""
    value, low, high = spread(values)
    ratio = spread([mine / theirs for mine, theirs in zip(values, reference, strict=True)])[0]
    return Row(
        name, value, "GB/s", share * spread(reference)[0] if share else None, ratio, low, high
    )


def measure_geometry(
    geometry: Geometry, megabytes: int, rounds: int, *, in_order: bool = False
) -> list[Row]:
    bench = Bench(geometry, megabytes, in_order=in_order)
    bench.check()
    works: dict[str, Work] = {
        "memcpy to slots": bench.memcpy(to_slots=True),
        "memcpy from slots": bench.memcpy(to_slots=False),
        "save": bench.save,
        "load": bench.load,
    }
    seen = measure(bench, works, rounds)
    bench.close()
    to_slots, from_slots, save, load = seen.values()
    share = SHARES.get(geometry.block_tokens)
    name = geometry.name + (" in order" if in_order else "")
    rows = [
        Row(
            f"{name}: memcpy to slots",
            spread(to_slots)[0],
            "GB/s",
            min=min(to_slots),
            max=max(to_slots),
        ),
        Row(
            f"{name}: memcpy from slots",
            spread(from_slots)[0],
            "GB/s",
            min=min(from_slots),
            max=max(from_slots),
        ),
        against(f"{name}: save (ratio to memcpy)", save, to_slots, share),
        against(f"{name}: load (ratio to memcpy)", load, from_slots, share),
    ]
    print_rows(rows)
    return rows


class Tried:
    """Every other way that was tried, each for one chunk of ``bench``. :meth:`works` runs them over
    all chunks."""

    def __init__(self, bench: Bench) -> None:
        geometry = bench.geometry
        self.bench, self.layers, self.row_bytes = bench, geometry.layers, geometry.row_bytes
        self.paged, self.array = bench.paged, bench.paged.numpy()
        self.rows = [part.view(self.layers, geometry.blocks_per_chunk, -1) for part in bench.parts]
        self.arrays = [rows.numpy() for rows in self.rows]
        self.ids, self.index = bench.block_ids, [np.array(ids) for ids in bench.block_ids]
        self.indices = [torch.tensor(ids) for ids in bench.block_ids]

    def works(self, *names: str) -> dict[str, Work]:
        """By name: ``save`` or ``load`` and the way. All of them without names."""
        bench = self.bench
        found: dict[str, Work] = {
            "save: memcpy": bench.memcpy(to_slots=True),
            "save: kept": bench.save,
            "save: kept, all chunks in one call": bench.save_in_one_call,
            "load: memcpy": bench.memcpy(to_slots=False),
            "load: kept": bench.load,
        }
        both = [self.slices, self.slices_a_layer, self.torch_slices, self.memmove_rows]
        saves = [self.touch_then_slices, self.take, self.index_select, self.index_select_words]
        loads = [self.index_copy, self.index_copy_words, self.index_put, self.assign_a_layer]
        found |= {
            f"save: {one.__name__}": self.each(one, True)
            for one in [*both, *saves, self.index_select_a_layer]
        }
        found["save: advanced"] = self.each(self.advanced, True)
        found |= {
            f"load: {one.__name__}": self.each(one, False) for one in [*both, *loads, self.advanced]
        }
        return {
            name: work
            for name, work in found.items()
            if not names or name in names or "memcpy" in name
        }

    def each(self, one: Callable[[int, bool], None], save: bool) -> Work:
        def all_chunks() -> None:
            for chunk in range(self.bench.chunks):
                one(chunk, save)

        return all_chunks

    def slices(self, chunk: int, save: bool) -> None:
        """numpy, one strided copy over all layers for each block."""
        for at, block in enumerate(self.ids[chunk]):
            source, target = self.array[:, block], self.arrays[chunk][:, at]
            np.copyto(target, source) if save else np.copyto(source, target)

    def touch_then_slices(self, chunk: int, save: bool) -> None:
        """The same after reading a byte of every page."""
        self.array[:, self.index[chunk], ::4096]
        self.slices(chunk, save)

    def slices_a_layer(self, chunk: int, save: bool) -> None:
        for blocks, slot in zip(self.array, self.arrays[chunk], strict=True):
            for at, block in enumerate(self.ids[chunk]):
                np.copyto(slot[at], blocks[block]) if save else np.copyto(blocks[block], slot[at])

    def torch_slices(self, chunk: int, save: bool) -> None:
        for at, block in enumerate(self.ids[chunk]):
            source, target = self.paged[:, block], self.rows[chunk][:, at]
            target.copy_(source) if save else source.copy_(target)

    def memmove_rows(self, chunk: int, save: bool) -> None:
        slot, size = self.bench.parts[chunk].data_ptr(), self.row_bytes
        for layer in range(self.layers):
            base = self.paged[layer].data_ptr()
            for block in self.ids[chunk]:
                source = base + block * size
                ctypes.memmove(slot, source, size) if save else ctypes.memmove(source, slot, size)
                slot += size

    def take(self, chunk: int, _save: bool) -> None:
        np.take(self.array, self.index[chunk], axis=1, out=self.arrays[chunk], mode="clip")

    def advanced(self, chunk: int, save: bool) -> None:
        """numpy advanced indexing, one statement for all layers."""
        if save:
            self.arrays[chunk][...] = self.array[:, self.index[chunk]]
        else:
            self.array[:, self.index[chunk]] = self.arrays[chunk]

    def assign_a_layer(self, chunk: int, _save: bool) -> None:
        """numpy advanced indexing, one statement for each layer, as the kept load."""
        for blocks, slot in zip(self.array, self.arrays[chunk], strict=True):
            blocks[self.index[chunk]] = slot

    def index_select(self, chunk: int, _save: bool) -> None:
        torch.index_select(self.paged, 1, self.indices[chunk], out=self.rows[chunk])

    def index_select_words(self, chunk: int, _save: bool) -> None:
        words, rows = self.paged.view(torch.int64), self.rows[chunk].view(torch.int64)
        torch.index_select(words, 1, self.indices[chunk], out=rows)

    def index_select_a_layer(self, chunk: int, _save: bool) -> None:
        for blocks, slot in zip(self.paged, self.rows[chunk], strict=True):
            torch.index_select(blocks, 0, self.indices[chunk], out=slot)

    def index_copy(self, chunk: int, _save: bool) -> None:
        self.paged.index_copy_(1, self.indices[chunk], self.rows[chunk])

    def index_copy_words(self, chunk: int, _save: bool) -> None:
        words, rows = self.paged.view(torch.int64), self.rows[chunk].view(torch.int64)
        words.index_copy_(1, self.indices[chunk], rows)

    def index_put(self, chunk: int, _save: bool) -> None:
        self.paged[:, self.indices[chunk]] = self.rows[chunk]


TORCH_WAYS = ["torch_slices", "index_select", "index_select_words", "index_copy_words"]
SOME = [f"{way}: {name}" for way in ("save", "load") for name in ("kept", *TORCH_WAYS)]


def measure_variants(geometry: Geometry, megabytes: int, rounds: int) -> list[Row]:
    """All ways. Then some of them with the engine's memory in huge pages, with two threads, and
    with layers packed in a block."""
    rows = _variant_rows(Bench(geometry, megabytes), "", [], rounds)
    rows += _variant_rows(
        Bench(geometry, megabytes, huge=True), ", engine memory in huge pages", SOME, rounds
    )
    torch.set_num_threads(2)
    rows += _variant_rows(
        Bench(geometry, megabytes), ", two threads, wall clock", SOME, rounds, time.perf_counter
    )
    torch.set_num_threads(1)
    packed = ["save: kept", "load: kept", "load: slices"]
    rows += _variant_rows(
        Bench(geometry, megabytes, packed=True), ", layers packed in a block", packed, rounds
    )
    return rows


def _variant_rows(
    bench: Bench, where: str, names: Sequence[str], rounds: int, clock: Clock = time.thread_time
) -> list[Row]:
    works, rows = Tried(bench).works(*names), []
    for way in ("save", "load"):
        seen = measure(
            bench,
            {name: work for name, work in works.items() if name.startswith(way)},
            rounds,
            clock,
        )
        rows += [
            against(f"{bench.geometry.name}{where}: {name}", values, seen[f"{way}: memcpy"])
            for name, values in seen.items()
        ]
    works.clear()
    bench.close()
    print_rows(rows)
    return rows


def measure_first_touch(geometry: Geometry, megabytes: int, rounds: int) -> list[Row]:
    """What page faults cost: saves into a fresh pool, with and without ``populate``, which is not
    counted."""
    bench = Bench(geometry, megabytes)
    seen: dict[bool, list[float]] = {False: [], True: []}
    for index in range(2 * rounds):
        populated = bool(index % 2)
        pool = Pool(bench.chunks, bench.pool.slot_bytes)
        if populated:
            for slot in range(bench.chunks):
                pool.populate(slot, 1)
        bench.parts = bench.slot_parts(pool)
        start = time.thread_time()
        bench.save()
        seen[populated].append(bench.bytes / (time.thread_time() - start) / 1e9)
        bench.parts.clear()
        pool.close()
    bench.close()
    rows = [against(f"{geometry.name}: first save into a populated pool", seen[True], seen[True])]
    rows.append(
        against(
            f"{geometry.name}: first save without populate (ratio to populated)",
            seen[False],
            seen[True],
        )
    )
    print_rows(rows)
    return rows


def main() -> None:
    parser = described(__doc__)
    parser.add_argument(
        "--megabytes", type=int, default=576, help="bytes of slots, and as many of blocks"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--variants", action="store_true", help="measure the dropped ways instead")
    parser.add_argument(
        "--out", default=None, help="default: bench/results/copy.json (copy_variants.json)"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    if given.variants:
        for geometry in (GQA[0], GQA[-1]):
            rows += measure_variants(geometry, given.megabytes, given.rounds)
    else:
        for geometry in (*GQA, *MORE):
            rows += measure_geometry(geometry, given.megabytes, given.rounds)
        rows += measure_geometry(GQA[-1], given.megabytes, given.rounds, in_order=True)
        rows += measure_first_touch(GQA[-1], given.megabytes, given.rounds)
    name = "copy_variants" if given.variants else "copy"
    write_results(given.out or f"bench/results/{name}.json", name, rows)


if __name__ == "__main__":
    main()
