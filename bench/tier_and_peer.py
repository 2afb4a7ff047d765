"""A tier and a peer that move the same bytes: rounds in which each runs once, and their rows."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtier.bench.report import Row, median_row
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.pool import Pool
from kvtier.tiers.base import Tier

FOUND = 128
"""Chunks of the run that is looked up."""
LOOKUPS = 20

Move = Callable[[ChunkKey, memoryview], None]
"""Moves one chunk between a slot and a store."""


class Threads:
    """Threads, each with its own slot and its own ``chunks``. A run moves ``run_bytes`` in all."""

    def __init__(self, count: int, chunk_bytes: int, chunks: int, run_bytes: int) -> None:
        self.count, self.chunk_bytes, self.chunks = count, chunk_bytes, chunks
        self._moves = max(1, round(run_bytes / chunk_bytes / count))
        layout = ChunkLayout(bytes(32), 1, 1, (chunk_bytes,))
        self._keys = [layout.keys([thread] * chunks) for thread in range(count)]
        self._pool = Pool(count, chunk_bytes)
        self._pool.populate(0, count)
        self._slots = [self._pool.view(slot) for slot in range(count)]
        for slot in self._slots:
            slot[:] = os.urandom(chunk_bytes)
        self._threads = ThreadPoolExecutor(count)

    def speed(self, move: Move) -> float:
        """GB/s of all threads together."""

        def work(thread: int) -> None:
            for number in range(self._moves):
                move(self._keys[thread][number % self.chunks], self._slots[thread])

        begun = time.perf_counter()
        list(self._threads.map(work, range(self.count)))
        seconds = time.perf_counter() - begun
        return self._moves * self.count * self.chunk_bytes / seconds / 1e9

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._slots.clear()
        self._pool.close()


class Way(NamedTuple):
    """One way in which the peer moves the bytes. ``share``: the part of its speed that the project
    asks of the tier."""

    name: str
    speed: Callable[[], float]
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """What moves the same bytes without the tier."""

    name: str
    write: Way
    read: Way


def write(tier: Tier) -> Move:
    def move(key: ChunkKey, slot: memoryview) -> None:
        if not tier.write(key, slot):
            raise RuntimeError(f"a write failed in {tier.name}")

    return move


def read(tier: Tier) -> Move:
    def move(key: ChunkKey, slot: memoryview) -> None:
        if not tier.read(key, slot):
            raise RuntimeError(f"a read failed in {tier.name}")

    return move


def measure(
    where: str,
    threads: Threads,
    tier: Tier,
    peer: Peer,
    rounds: int,
    others: Mapping[str, Move] | None = None,
) -> list[Row]:
    """A row for each of the peer's ways, for the tier's write and read, and for ``others``, whose
    names end with ``write`` or ``read``. A ``ratio`` is the median of the rounds' ratios to the
    peer's way. The first round, which opens connections and allocates memory, is left out."""
    moves = {"write": write(tier), "read": read(tier)} | dict(others or {})
    ways = {name: peer.write if name.endswith("write") else peer.read for name in moves}
    speeds = {way.name: way.speed for way in (peer.write, peer.read)}
    speeds |= {name: partial(threads.speed, move) for name, move in moves.items()}
    values: dict[str, list[float]] = {name: [] for name in speeds}
    for number in range(rounds + 1):
        for name, speed in speeds.items():
            value = speed()
            if number:
                values[name].append(value)
    rows = [
        median_row(f"{where}: {peer.name} {way.name}", values[way.name], "GB/s")
        for way in (peer.write, peer.read)
    ]
    for name, way in ways.items():
        pairs = zip(values[name], values[way.name], strict=True)
        ratio = statistics.median(value / limit for value, limit in pairs)
        share = way.share if name in ("write", "read") else None
        limit = share and share * statistics.median(values[way.name])
        rows.append(median_row(f"{where}: {name}", values[name], "GB/s", limit, ratio))
    return rows


def lookup_row(name: str, tier: Tier, held: int) -> Row:
    """How long one lookup takes of a run of which the first ``held`` chunks are there."""
    keys = ChunkLayout(bytes(32), 1, 1, (1,)).keys([7] * FOUND)
    for key in keys[:held]:
        tier.write(key, memoryview(b"x"))
    times = []
    for _ in range(LOOKUPS):
        begun = time.perf_counter()
        if tier.find(keys) != held:
            raise RuntimeError("the lookup found another number of chunks")
        times.append((time.perf_counter() - begun) * 1e3)
    return median_row(name, times, "ms")


def add_flags(parser: argparse.ArgumentParser, name: str) -> None:
    add = parser.add_argument
    about = "threads, and connections (default: 2)"
    add("--connections", type=int, default=2, help=about)
    add("--rounds", type=int, default=9, help="runs of each kind (default: 9)")
    add("--chunk-bytes", type=int, default=7 << 20, help="default: 7 MiB")
    add("--out", default=f"bench/results/{name}.json")
