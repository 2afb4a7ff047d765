"""How near the NVMe tier comes to its disk, and how fast it recovers its chunks.

    python -m kvtier.bench.micro.nvme --path /fast/disk/folder

What is measured:

- The bandwidth of writes and reads through the tier, checksums included, beside the raw limit:
  plain O_DIRECT ``pwritev`` and ``preadv`` of the same sizes, from and into huge pages, with as
  many threads, on a preallocated file of the same file system. Chunks lie in a pool as the kernel
  gives it, and in small pages, as before Linux 6.1, with a copy between slot and disk; at last in
  two folders of one set, which one disk reads no faster. Each round begins with the next kind. A
  row is the median, and a ratio the median of the rounds' ratios.
- CPU seconds of this process for a GiB, in the same rounds. They vary less than bandwidth on a busy
  machine. ``load_average`` (of five minutes) in the results file says how busy it was.
- Recovery: seconds from the constructor to the last recovered key, after ``kill -9``, with a table
  that is not in the page cache.

It needs room for four files of ``CHUNKS`` chunks and one of 400 MB, and removes them.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kvtier.bench.flags import run_micro
from kvtier.bench.report import Row, against, in_turns, median_row
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.pool import Pool
from kvtier.tiers.base import Tier
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet

BUFFERS, CHUNK_BYTES, CHUNKS = 16, 7 << 20, 64
_COPIED, _HALVES = "small pages", "two folders on the disk"
_SHARES = {"default": (0.60, 0.85, 0.7), _COPIED: (None, None, None), _HALVES: (None, None, None)}
"""Where chunks lie, and what the project asks for: shares of the raw disk's write and read, and of
the CPU time with a copy."""
_RECOVERY_S, _RECOVERED_CHUNKS = 2.0, 100_000
_TINY = 4096
_RUN = 128
Work = Callable[[int, memoryview], None]


def make_keys(chunks: int) -> list[ChunkKey]:
    layout = ChunkLayout(bytes(32), 16, 16, (_TINY,))
    keys: list[ChunkKey] = []
    for prompt in range(-(-chunks // _RUN)):
        keys += layout.keys([prompt] * 16 * _RUN)
    return keys[:chunks]


def make_buffers(count: int, size: int, *, huge: bool = False) -> list[memoryview]:
    """Page-aligned buffers of incompressible bytes, together larger than the CPU's caches. They are
    shared memory in small pages, as a pool's slots. ``huge``: they are in huge pages, with which a
    disk is fastest."""
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


def gigabytes_per_second(
    work: Work, chunks: int, buffers: Sequence[memoryview], threads: int
) -> float:
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
    """Plain O_DIRECT writes and reads of a preallocated file, which stays. Raises OSError, also
    when only a part was moved."""
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


class Turn(NamedTuple):
    speed: float
    cpu: float


class Way(NamedTuple):
    work: Work
    buffers: Sequence[memoryview]
    before: Callable[[], object] = bool


def bandwidth(folder: Path, rounds: int, threads: int) -> list[Row]:
    chunk_bytes, chunks = CHUNK_BYTES, CHUNKS
    with ExitStack() as ends:
        pool = ends.enter_context(closing(Pool(BUFFERS, chunk_bytes)))
        pool.populate(0, BUFFERS)
        default = [pool.view(slot) for slot in range(BUFFERS)]
        for buffer in default:
            buffer[:] = os.urandom(chunk_bytes)
        kinds = {"default": default, _COPIED: make_buffers(BUFFERS, chunk_bytes)}
        keys, best = make_keys(chunks), make_buffers(BUFFERS, chunk_bytes, huge=True)
        folder.mkdir()
        room, huge = chunks * (chunk_bytes + 4096) + (1 << 20), pool.in_huge_pages
        place = DiskPlace(folder / "tier", room, threads)
        one = DiskSet([place], chunk_bytes, in_huge_pages=huge)
        places = [DiskPlace(folder / f"half{at}", room, threads // 2) for at in range(2)]
        both = DiskSet(places, chunk_bytes, in_huge_pages=huge)
        raw_write, raw_read = ends.enter_context(raw_disk(folder / "raw", chunk_bytes, chunks))
        writes, reads = {"raw": Way(raw_write, best)}, {"raw": Way(raw_read, best)}
        for kind, buffers in kinds.items():
            writes[kind], reads[kind] = ways_of(one, keys, buffers)
        writes[_HALVES], reads[_HALVES] = ways_of(both, keys, default)
        for tier in (one, both):
            ends.callback(tier.close)
        seen = [
            in_turns(ways, lambda way: timed(way, chunks, threads), rounds)
            for ways in (writes, reads)
        ]
        return [
            row
            for at, (name, turns) in enumerate(zip(("write", "read"), seen, strict=True))
            for row in _rows(f"{name}, {threads} threads", turns, at)
        ]


def ways_of(tier: Tier, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> tuple[Way, Way]:
    """Writes and reads through a tier."""

    def write(chunk: int, buffer: memoryview) -> None:
        expect(tier.write(keys[chunk], buffer))

    def read(chunk: int, buffer: memoryview) -> None:
        expect(tier.read(keys[chunk], buffer))

    def forget() -> None:
        for key in keys:
            tier.delete(key)

    return Way(write, buffers, forget), Way(read, buffers)


def timed(way: Way, chunks: int, threads: int) -> Turn:
    way.before()
    used = _cpu_seconds()
    speed = gigabytes_per_second(way.work, chunks, way.buffers, threads)
    return Turn(speed, (_cpu_seconds() - used) / (chunks * way.buffers[0].nbytes / 2**30))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rows(name: str, seen: dict[str, list[Turn]], at: int) -> Iterator[Row]:
    """``at``: the index in what the project asks for, 0 for writes and 1 for reads."""
    raw = [turn.speed for turn in seen["raw"]]
    yield median_row(f"raw O_DIRECT {name}", raw, "GB/s")
    copied = [turn.cpu for turn in seen[_COPIED]]
    for kind, shares in _SHARES.items():
        label, share = f"DiskSet {name}, {kind}", shares[at]
        speeds, cpu = [turn.speed for turn in seen[kind]], [turn.cpu for turn in seen[kind]]
        yield against(f"{label} (ratio to raw)", speeds, raw, share)
        yield against(f"{label}: CPU a GiB (ratio to {_COPIED})", cpu, copied, shares[2], "s")


def recovery(folder: Path) -> Row:
    """Another process fills the tier and is killed."""
    where, chunks = folder / "recovery", _RECOVERED_CHUNKS
    code = f"from kvtier.bench.micro import nvme; nvme.fill_and_die({str(where)!r}, {chunks})"
    filled = subprocess.run([sys.executable, "-c", code], check=False)
    expect(filled.returncode == -signal.SIGKILL)
    with (where / "index.kvtier").open("rb") as table:
        os.fsync(table.fileno())
        os.posix_fadvise(table.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    tier = _tiny_tier(where, chunks)
    found = tier.recovered()
    took = time.perf_counter() - start
    expect(len(found) == chunks)
    tier.close()
    return Row(f"recovery of {chunks:,} chunks after kill -9", took, "s", _RECOVERY_S)


def fill_and_die(where: str, chunks: int) -> None:
    tier = _tiny_tier(Path(where), chunks)
    buffer = make_buffers(1, _TINY)[0]
    for key in make_keys(chunks):
        expect(tier.write(key, buffer))
    os.kill(os.getpid(), signal.SIGKILL)


def expect(done: bool | None) -> None:
    if not done:
        why = "a busy machine held a disk up" if done is None else "the numbers mean nothing"
        raise RuntimeError(f"a chunk was not written, read or found in full: {why}")


def _tiny_tier(where: Path, chunks: int) -> DiskSet:
    return DiskSet([DiskPlace(where, chunks * (_TINY + 128) + (1 << 20), 1)], _TINY)


@contextmanager
def disk_folder(given: argparse.Namespace) -> Iterator[Path]:
    """A new folder on the disk of the one that ``--path`` names. It is removed."""
    path = Path(given.path or "build").resolve()
    path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path) as name:
        yield Path(name)


def rows_of(given: argparse.Namespace) -> list[Row]:
    with disk_folder(given) as folder:
        found = [bandwidth(folder / str(threads), given.rounds, threads) for threads in (2, 4)]
        return [*found[0], *found[1], recovery(folder)]


if __name__ == "__main__":
    run_micro(
        "nvme", __doc__, 5, rows_of, "--path", facts=lambda: {"load_average": os.getloadavg()[1]}
    )
