"""Cost of encryption at rest: the NVMe tier with and without it, in turns.

    python -m kvtier.bench.micro.sealed --path /fast/disk/folder

It needs room for two files of ``chunks * chunk_mib``, and removes them. A virtual disk's host
copies once more, and writes a chunk faster that is still in the CPU's cache: sealed can seem to
cost less there than it does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.bench.flags import run_micro
from kvtier.bench.micro.nvme import (
    BUFFERS,
    CHUNK_BYTES,
    CHUNKS,
    Work,
    disk_folder,
    expect,
    gigabytes_per_second,
    make_buffers,
    make_keys,
)
from kvtier.bench.report import Row, against, in_turns, median_row
from kvtier.core.chunk import ChunkKey
from kvtier.tiers.base import Tier
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.sealed import KEY_BYTES, SealedTier, sealed_bytes

_MIB = 1 << 20


def write(tier: Tier, keys: Sequence[ChunkKey]) -> Work:
    def work(chunk: int, buffer: memoryview) -> None:
        tier.delete(keys[chunk])
        expect(tier.write(keys[chunk], buffer))

    return work


def read(tier: Tier, keys: Sequence[ChunkKey]) -> Work:
    return lambda chunk, buffer: expect(tier.read(keys[chunk], buffer) is True)


def measure(folder: Path, rounds: int, threads: int) -> list[Row]:
    """Rows of write and read, plain and sealed."""
    chunk_bytes, chunks = CHUNK_BYTES, CHUNKS
    keys, buffers = make_keys(chunks), make_buffers(BUFFERS, chunk_bytes)
    stored = sealed_bytes(chunk_bytes)
    plain = NvmeTier(folder / "plain", chunks * (chunk_bytes + 4096) + _MIB, chunk_bytes)
    inner = NvmeTier(folder / "sealed", chunks * (stored + 4096) + _MIB, stored)
    tiers = {
        "NvmeTier": plain,
        "sealed NvmeTier": SealedTier(inner, os.urandom(KEY_BYTES), chunk_bytes),
    }

    def speed(work: Work) -> float:
        return gigabytes_per_second(work, chunks, buffers, threads)

    rows = []
    for verb in (write, read):
        works = {name: verb(tier, keys) for name, tier in tiers.items()}
        about = f"{verb.__name__}, {threads} thread{'s' * (threads > 1)}"
        without, sealed = in_turns(works, speed, rounds).values()
        rows.append(median_row(f"NvmeTier {about}", without, "GB/s"))
        rows.append(against(f"sealed NvmeTier {about} (ratio to plain)", sealed, without, 1.0))
    for tier in tiers.values():
        tier.close()
    return rows


def rows_of(given: argparse.Namespace) -> list[Row]:
    with disk_folder(given) as folder:
        found = [measure(folder / str(threads), given.rounds, threads) for threads in (1, 2)]
        return [*found[0], *found[1]]


if __name__ == "__main__":
    run_micro("sealed", __doc__, 5, rows_of, "--path")
