"""How near the NVMe tier comes to its disk, and how fast it finds its chunks again.

    python -m kvtier.bench.micro.nvme --path /fast/disk/folder

Four numbers:

- write and read bandwidth through the tier (checksums included) beside the raw limit: plain O_DIRECT ``pwritev`` and
  ``preadv`` of the same sizes, from and into huge pages, with as many threads, on a preallocated file of the
  same file system; rounds of raw and tier alternate, and so does which goes first. Medians with lowest and highest.
- recovery: seconds from the constructor to the last recovered key, after ``kill -9`` and after ``close``, with the
  table out of the page cache.
- memory of the index, bytes a chunk, with the keys themselves (which the Directory holds too) apart.

Needs room for two files of ``chunks * chunk_mib`` and one of 400 MB; removes them.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kvtier.bench.report import Row, spread, write_results
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.tiers.nvme.tier import NvmeTier

_WRITE_SHARE, _READ_SHARE = 0.85, 0.90
_RECOVERY_SECONDS, _INDEX_BYTES = 2.0, 150
_TINY = 4096
_RUN = 128
Work = Callable[[int, memoryview], None]


def make_keys(chunks: int) -> list[ChunkKey]:
    """Keys of prompts of ``_RUN`` chunks each."""
    layout = ChunkLayout(bytes(32), 16, 16, (_TINY,))
    keys: list[ChunkKey] = []
    for prompt in range(-(-chunks // _RUN)):
        keys += layout.keys([prompt] * 16 * _RUN)
    return keys[:chunks]


def make_buffers(count: int, size: int, *, huge: bool = False) -> list[memoryview]:
    """Page-aligned buffers of incompressible bytes; together larger than the CPU's caches. In shared memory, as a
    pool's slots are, whose pages are small and lie anywhere; ``huge``: in huge pages, the best a disk can be given."""
    if huge:
        step = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        region = mmap.mmap(-1, count * step, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_HUGEPAGE)
        buffers = [memoryview(region)[at * step : at * step + size] for at in range(count)]
    else:
        buffers = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = os.urandom(size)
    return buffers


def gigabytes_per_second(work: Work, chunks: int, buffers: Sequence[memoryview], threads: int) -> float:
    """Run ``work(chunk, buffer)`` for every chunk, each thread with buffers of its own."""
    todo = iter(range(chunks))

    def lane(number: int) -> None:
        own = buffers[number::threads]
        for chunk in todo:
            work(chunk, own[chunk % len(own)])

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        for done in [pool.submit(lane, number) for number in range(threads)]:
            done.result()
        return chunks * buffers[0].nbytes / (time.perf_counter() - start) / 1e9


@contextmanager
def raw_disk(file: Path, chunk_bytes: int, chunks: int) -> Iterator[tuple[Work, Work]]:
    """Plain O_DIRECT writing and reading of a preallocated file, which stays. Raises OSError, also for a part."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def write(chunk: int, buffer: memoryview) -> None:
        _expect_all(os.pwritev(fd, [buffer], chunk * chunk_bytes), chunk_bytes)

    def read(chunk: int, buffer: memoryview) -> None:
        _expect_all(os.preadv(fd, [buffer], chunk * chunk_bytes), chunk_bytes)

    try:
        os.posix_fallocate(fd, 0, chunks * chunk_bytes)
        yield write, read
    finally:
        os.close(fd)


def _expect_all(moved: int, of: int) -> None:
    if moved != of:
        raise OSError(f"the disk wrote or read {moved:,} bytes of {of:,}")


def bandwidth(folder: Path, chunk_bytes: int, chunks: int, rounds: int, threads: int) -> list[Row]:
    """Rows of write and read: tier beside raw."""
    keys, slots, best = make_keys(chunks), make_buffers(16, chunk_bytes), make_buffers(16, chunk_bytes, huge=True)
    folder.mkdir()
    tier = NvmeTier(folder / "tier", chunks * (chunk_bytes + 4096) + (1 << 20), chunk_bytes)

    def tier_write(chunk: int, buffer: memoryview) -> None:
        _expect(tier.write(keys[chunk], buffer))

    def tier_read(chunk: int, buffer: memoryview) -> None:
        _expect(tier.read(keys[chunk], buffer))

    with raw_disk(folder / "raw", chunk_bytes, chunks) as (raw_write, raw_read):
        seen: dict[Work, list[float]] = {work: [] for work in (raw_write, tier_write, raw_read, tier_read)}
        for round_ in range(rounds + 1):
            for pair in ((raw_write, tier_write), (raw_read, tier_read)):
                for work in pair if round_ % 2 else pair[::-1]:
                    if work is tier_write:
                        for key in keys:
                            tier.delete(key)
                    buffers = slots if work in (tier_write, tier_read) else best
                    speed = gigabytes_per_second(work, chunks, buffers, threads)
                    if round_:  # the first round gives the preallocated blocks their first content
                        seen[work].append(speed)
    tier.close()
    return [
        *_pair(f"write, {threads} threads", seen[raw_write], seen[tier_write], _WRITE_SHARE),
        *_pair(f"read, {threads} threads", seen[raw_read], seen[tier_read], _READ_SHARE),
    ]


def recovery(folder: Path, chunks: int) -> list[Row]:
    """Rows of recovery time and index memory, for a tier filled and killed by a process of its own."""
    where = folder / "recovery"
    fill = [sys.executable, "-m", "kvtier.bench.micro.nvme", "--fill", str(where), "--keys", str(chunks)]
    _expect(subprocess.run(fill, check=False).returncode == -signal.SIGKILL)
    rows = []
    for how in ("kill -9", "close"):
        with (where / "index.kvtier").open("rb") as table:
            os.fsync(table.fileno())
            os.posix_fadvise(table.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        tier = _tiny_tier(where, chunks)
        found = tier.recovered()
        took = time.perf_counter() - start
        rows.append(Row(f"recovery of {chunks:,} chunks after {how}", took, "s", _RECOVERY_SECONDS))
        _expect(len(found) == chunks)
        tier.close(found)
    tracemalloc.start()
    tier = _tiny_tier(where, chunks)
    found = tier.recovered()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    names = sum(map(sys.getsizeof, found)) + sys.getsizeof(found)
    tier.close()
    rows.append(Row("index memory beside the keys", (held - names) / chunks, "bytes/chunk", _INDEX_BYTES))
    return rows


def fill_and_die(where: Path, chunks: int) -> None:
    """Write ``chunks`` tiny chunks, then stop as ``kill -9`` does."""
    tier = _tiny_tier(where, chunks)
    buffer = make_buffers(1, _TINY)[0]
    for key in make_keys(chunks):
        _expect(tier.write(key, buffer))
    os.kill(os.getpid(), signal.SIGKILL)


def _expect(done: bool) -> None:
    if not done:
        raise RuntimeError("a chunk was not written, read or found in full: the numbers would mean nothing")


def _tiny_tier(where: Path, chunks: int) -> NvmeTier:
    return NvmeTier(where, chunks * (_TINY + 128) + (1 << 20), _TINY)


def _pair(name: str, raw: Sequence[float], tier: Sequence[float], share: float) -> tuple[Row, Row]:
    limit, low, high = spread(raw)
    value, worst, best = spread(tier)
    return (
        Row(f"raw O_DIRECT {name}", limit, "GB/s", min=low, max=high),
        Row(f"NvmeTier {name} (ratio to raw)", value, "GB/s", share * limit, value / limit, worst, best),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("build/bench-nvme"), help="a folder on the disk to measure")
    parser.add_argument("--chunk-mib", type=float, default=7)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--keys", type=int, default=100_000, help="chunks to recover")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="bench/results/nvme.json")
    given = parser.parse_args()
    if given.fill:
        fill_and_die(given.fill, given.keys)
    given.path.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        for threads in given.threads:
            folder = given.path / str(threads)
            rows += bandwidth(folder, int(given.chunk_mib * 2**20), given.chunks, given.rounds, threads)
        rows += recovery(given.path, given.keys)
    finally:
        shutil.rmtree(given.path)
    write_results(given.out, "nvme", rows)
    for row in rows:
        ratio = f"  {row.ratio:.1%}" if row.ratio else ""
        print(f"{row.name:55} {row.value:8.3f} {row.unit}{ratio}")


if __name__ == "__main__":
    main()
