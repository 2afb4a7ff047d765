"""Cost of encryption at rest: the NVMe tier with and without it, in turns.

    python -m kvtier.bench.micro.sealed --path /fast/disk/folder

It needs room for two files of ``CHUNKS`` chunks, and removes them. A virtual disk's host copies
once more, and writes a chunk faster that is still in the CPU's cache: sealed can seem to cost less
there than it does.
"""

from __future__ import annotations

import argparse
import os
from contextlib import closing

from kvtier.bench.flags import run_micro
from kvtier.bench.micro.nvme import (
    BUFFERS,
    CHUNK_BYTES,
    CHUNKS,
    disk_folder,
    make_buffers,
    make_keys,
    timed,
    ways_of,
)
from kvtier.bench.report import Row, against, in_turns, median_row
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.sealed import KEY_BYTES, SealedTier, sealed_bytes

_MIB, _THREADS = 1 << 20, 2


def rows_of(given: argparse.Namespace) -> list[Row]:
    keys, buffers = make_keys(CHUNKS), make_buffers(BUFFERS, CHUNK_BYTES)
    sizes = {"plain": CHUNK_BYTES, "sealed": sealed_bytes(CHUNK_BYTES)}
    rows = []
    with disk_folder(given) as folder:
        plain, inner = (
            DiskSet([DiskPlace(folder / name, CHUNKS * (size + 4096) + _MIB, _THREADS)], size)
            for name, size in sizes.items()
        )
        with closing(plain), closing(SealedTier(inner, os.urandom(KEY_BYTES), CHUNK_BYTES)) as seal:
            both = [ways_of(tier, keys, buffers) for tier in (plain, seal)]
            for verb, *ways in zip(("write", "read"), *both, strict=True):
                seen = in_turns(
                    dict(zip(sizes, ways, strict=True)),
                    lambda way: timed(way, CHUNKS, _THREADS).speed,
                    given.rounds,
                )
                about = f"DiskSet {verb}, {_THREADS} threads"
                rows.append(median_row(about, seen["plain"], "GB/s"))
                told = f"sealed {about} (ratio to plain)"
                rows.append(against(told, seen["sealed"], seen["plain"], 1.0))
    return rows


if __name__ == "__main__":
    run_micro("sealed", __doc__, 5, rows_of, "--path")
