"""Cost of encryption at rest: the NVMe tier with and without it, in turns.

    python -m kvtier.bench.micro.sealed --path /fast/disk/folder

It needs room for two files of ``chunks * chunk_mib``, and removes them. A virtual disk's host
copies once more, and writes a chunk faster that is still in the CPU's cache: sealed can seem to
cost less there than it does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kvtier.bench.micro.nvme import (
    Work,
    disk_flags,
    expect,
    gigabytes_per_second,
    make_buffers,
    make_keys,
)
from kvtier.bench.report import Row, median_row, print_rows, write_results
from kvtier.core.chunk import ChunkKey
from kvtier.tiers.base import Tier
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.sealed import KEY_BYTES, SealedTier, sealed_bytes

_MIB = 1 << 20
_BUFFERS = 16


def write(tier: Tier, keys: Sequence[ChunkKey]) -> Work:
    def work(chunk: int, buffer: memoryview) -> None:
        tier.delete(keys[chunk])
        expect(tier.write(keys[chunk], buffer))

    return work


def read(tier: Tier, keys: Sequence[ChunkKey]) -> Work:
    return lambda chunk, buffer: expect(tier.read(keys[chunk], buffer) is True)


def measure(folder: Path, chunk_bytes: int, chunks: int, rounds: int, threads: int) -> list[Row]:
    """Rows of write and read, plain and sealed. The first round, which gives the preallocated
    blocks their first content, is left out."""
    keys, buffers = make_keys(chunks), make_buffers(_BUFFERS, chunk_bytes)
    stored = sealed_bytes(chunk_bytes)
    plain = NvmeTier(folder / "plain", chunks * (chunk_bytes + 4096) + _MIB, chunk_bytes)
    inner = NvmeTier(folder / "sealed", chunks * (stored + 4096) + _MIB, stored)
    tiers = {
        "NvmeTier": plain,
        "sealed NvmeTier": SealedTier(inner, os.urandom(KEY_BYTES), chunk_bytes),
    }
    rows = []
    for verb in (write, read):
        works = {name: verb(tier, keys) for name, tier in tiers.items()}
        seen = {name: list[float]() for name in tiers}
        for round_ in range(rounds + 1):
            for name in list(works)[:: 1 if round_ % 2 else -1]:
                speed = gigabytes_per_second(works[name], chunks, buffers, threads)
                if round_:
                    seen[name].append(speed)
        about = f"{verb.__name__}, {threads} thread{'s' * (threads > 1)}"
        without, sealed = seen.values()
        bound = median(without)
        rows.append(median_row(f"NvmeTier {about}", without, "GB/s"))
        name = f"sealed NvmeTier {about} (ratio to plain)"
        rows.append(median_row(name, sealed, "GB/s", bound, median(sealed) / bound))
    for tier in tiers.values():
        tier.close()
    return rows


def main() -> None:
    given = disk_flags(__doc__, "sealed", [1, 2]).parse_args()
    rows: list[Row] = []
    try:
        for threads in given.threads:
            folder, size = given.path / str(threads), int(given.chunk_mib * _MIB)
            rows += measure(folder, size, given.chunks, given.rounds, threads)
    finally:
        shutil.rmtree(given.path, ignore_errors=True)
    write_results(given.out, "sealed", rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
