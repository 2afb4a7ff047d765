"""How near saves and loads on CPU tensors come to a plain memcpy of the same bytes.

    python -m kvtier.bench.micro.copy

The engine's side is one allocation ``[layer, block, row]`` as vLLM's CPU backend makes it. The
slots are a populated :class:`~kvtier.core.pool.Pool`. Both have at least 512 MiB, so that no CPU
cache holds them. One thread copies. The reference is a ``memmove`` of whole chunks between the same
two memories, in the same direction. Rounds of reference, save and load alternate, and another one
begins each time. A row is the median with the lowest and the highest. Its ``ratio`` is the median
of the ratios to the reference of the same round. Its ``limit`` is what the project asks for, as a
share of the reference's median. The clock is the thread's CPU time, so that other work on the
machine does not count. ``bench/NOTES.md`` has the other ways that were tried.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.bench.flags import run_micro
from kvtier.bench.report import Row, against, in_turns, median_row
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, regions_of, slot_tensor
from kvtier.gpu.blocks import nothing
from kvtier.gpu.staged import Cuts

CHUNK_TOKENS = 256
_MIB = 576
"""Of slots, and as many of blocks."""
SHARES = {128: 0.70, 16: 0.45}
"""Goals by block size: the share of memcpy's bandwidth."""
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
    for tokens in SHARES
]


class Bench:
    """The memory of one geometry: an engine's blocks in random order, and as many slots.

    Args:
        geometry: of ``blocks``.
        blocks: one allocation ``[layer, block, row]``, as vLLM's are.
    """

    def __init__(self, geometry: Geometry, blocks: torch.Tensor) -> None:
        self.geometry, self.blocks = geometry, blocks
        count, step = blocks.shape[1], geometry.blocks_per_chunk
        self.chunks = count // step
        self.bytes: int = self.chunks * geometry.chunk_bytes
        blocks.random_(0, 256)
        order = list(range(count))
        random.Random(1).shuffle(order)
        self.pool = Pool(self.chunks, -(-geometry.chunk_bytes // 4096) * 4096)
        self.pool.populate(0, self.chunks)
        self.jobs = [
            (
                slot_tensor(self.pool.view(slot)[: geometry.chunk_bytes]),
                0,
                order[slot * step : (slot + 1) * step],
            )
            for slot in range(self.chunks)
        ]
        caches = {f"layer.{layer}": rows for layer, rows in enumerate(blocks)}
        self.copier = PagedBlocks(regions_of(caches, count), step, locked=self.cuts())

    def cuts(self) -> Cuts:
        """Which slots are page-locked."""
        return nothing

    def memcpy(self, *, to_slots: bool) -> Work:
        start, size = self.blocks.data_ptr(), self.geometry.chunk_bytes
        pairs = [
            (slot.data_ptr(), start + index * size) for index, (slot, _, _) in enumerate(self.jobs)
        ]
        if not to_slots:
            pairs = [(source, target) for target, source in pairs]

        def copy_all() -> None:
            for target, source in pairs:
                ctypes.memmove(target, source, size)

        return copy_all

    def save(self) -> None:
        for job in self.jobs:
            self.copier.save([job]).wait()

    def load(self) -> None:
        for job in self.jobs:
            self.copier.load([job]).wait()

    def check(self) -> None:
        """Raise when a copy is wrong, because the numbers would mean nothing."""
        before = self.blocks.clone()
        self.save()
        self.blocks.zero_()
        self.load()
        if not torch.equal(before, self.blocks):
            raise SystemExit(f"{self.geometry.name}: what was loaded is not what was saved")

    def close(self) -> None:
        self.jobs.clear()
        del self.blocks, self.copier
        self.pool.close()


def measure(
    bench: Bench, works: dict[str, Work], rounds: int, clock: Clock = time.thread_time
) -> dict[str, list[float]]:
    """GB/s of every work in every round."""

    def speed(work: Work) -> float:
        start = clock()
        work()
        return bench.bytes / (clock() - start) / 1e9

    return in_turns(works, speed, rounds)


def measure_geometry(geometry: Geometry, rounds: int) -> list[Row]:
    chunks = -(-_MIB * 2**20 // geometry.chunk_bytes)
    memory = mmap.mmap(-1, chunks * geometry.chunk_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shape = (geometry.layers, chunks * geometry.blocks_per_chunk, geometry.row_bytes)
    bench = Bench(geometry, torch.frombuffer(memory, dtype=torch.uint8).view(shape))
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
    share, name = SHARES[geometry.block_tokens], geometry.name
    rows = [median_row(f"{name}: {what}", seen[what], "GB/s") for what in list(works)[:2]]
    rows.append(against(f"{name}: save (ratio to memcpy)", save, to_slots, share))
    rows.append(against(f"{name}: load (ratio to memcpy)", load, from_slots, share))
    return rows


def rows_of(given: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    return [row for geometry in GQA for row in measure_geometry(geometry, given.rounds)]


if __name__ == "__main__":
    run_micro("copy", __doc__, 9, rows_of)
