"""What this machine can do at best, measured beside the arms: one memcpy, the bare disk, the bare Redis server.

Each takes a few seconds at most. Redis's limits are left out where its programs are not installed; where fio is not,
the disk is measured by a loop of our own.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.bench.micro.nvme import gigabytes_per_second, make_buffers
from kvtier.bench.report import Row, spread

MEMCPY, DISK_READ, DISK_WRITE = "memcpy", "disk read", "disk write"
REDIS_UNIX, REDIS_TCP = "redis GET, Unix socket", "redis GET, TCP"
HOW = {
    "memcpy": "memmove of chunks, one thread, best of three",
    "disk": "fio, direct I/O, chunks, psync with two jobs; where it is not installed preadv and pwritev by two threads",
    "redis": "redis-benchmark, two connections, values of 1 MiB, best of three",
}
_TURNS = 3
"""Of what is quick and varies much; the best counts."""
_MEMCPY_BYTES = 512 << 20
_FILE_BYTES, _FIO_S, _THREADS = 448 << 20, 1.5, 2
_PART_BYTES, _PARTS = 1 << 20, 128
_PATIENCE_S = 30.0


def measured(folder: Path, chunk_bytes: int) -> dict[str, float]:
    """Limit -> GB/s. ``folder``: on the disk that the arms write to."""
    return {MEMCPY: memcpy(chunk_bytes)} | disk(folder, chunk_bytes) | redis()


def rows(found: Sequence[Mapping[str, float]]) -> list[Row]:
    """A row a limit, over the rounds."""
    names = list(dict.fromkeys(name for one in found for name in one))
    made = []
    for name in names:
        middle, least, most = spread([one[name] for one in found if name in one])
        made.append(Row(f"limit: {name}", middle, "GB/s", min=least, max=most))
    return made


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {row.name.removeprefix("limit: "): row.value for row in rows(found) if row.value is not None}


def memcpy(chunk_bytes: int) -> float:
    """GB/s, pieces of a chunk, over more bytes than any cache holds."""
    size = -(-_MEMCPY_BYTES // chunk_bytes) * chunk_bytes
    with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
        here, there = (ctypes.c_char.from_buffer(one) for one in (source, target))
        begin, end = ctypes.addressof(here), ctypes.addressof(there)
        ctypes.memset(begin, 1, size)
        ctypes.memset(end, 1, size)
        speeds = []
        for _ in range(_TURNS):
            begun = time.perf_counter()
            for offset in range(0, size, chunk_bytes):
                ctypes.memmove(end + offset, begin + offset, chunk_bytes)
            speeds.append(size / (time.perf_counter() - begun) / 1e9)
        del here, there  # a mapping that is still pointed into cannot be closed
    return max(speeds)


def disk(folder: Path, chunk_bytes: int) -> dict[str, float]:
    """Direct writes, then reads of the same file; it is removed. The bytes are incompressible."""
    file = folder / "limit"
    count = -(-_FILE_BYTES // chunk_bytes)
    try:
        if shutil.which("fio"):
            return {name: _fio(file, chunk_bytes, count, name) for name in (DISK_WRITE, DISK_READ)}
        with _direct(file, chunk_bytes * count) as fd:
            buffers = make_buffers(4, chunk_bytes)

            def write(chunk: int, buffer: memoryview) -> None:
                _expect(os.pwritev(fd, [buffer], chunk * chunk_bytes) == chunk_bytes)

            def read(chunk: int, buffer: memoryview) -> None:
                _expect(os.preadv(fd, [buffer], chunk * chunk_bytes) == chunk_bytes)

            works = {DISK_WRITE: write, DISK_READ: read}
            return {name: gigabytes_per_second(work, count, buffers, _THREADS) for name, work in works.items()}
    finally:
        file.unlink(missing_ok=True)


def _fio(file: Path, chunk_bytes: int, count: int, name: str) -> float:
    way = name.removeprefix("disk ")
    command = ["fio", "--name=limit", f"--filename={file}", f"--rw={way}", f"--bs={chunk_bytes}", "--direct=1"]
    command += [f"--size={chunk_bytes * count}", "--ioengine=psync", f"--numjobs={_THREADS}", "--group_reporting"]
    command += ["--time_based", f"--runtime={_FIO_S}", "--output-format=json", "--refill_buffers"]
    with _explained("fio"):
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
    said = json.loads(told.stdout)
    return float(said["jobs"][0][way]["bw_bytes"]) / 1e9


@contextmanager
def _direct(file: Path, size: int) -> Iterator[int]:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        yield fd
    finally:
        os.close(fd)


def redis() -> dict[str, float]:
    """GET and SET over a Unix socket and TCP; nothing where Redis's programs are not installed."""
    if not shutil.which("redis-benchmark") or not shutil.which("redis-server"):
        return {}
    from kvtier.bench.micro.redis import redis_benchmark, redis_server

    found: dict[str, float] = {}
    with redis_server() as (port, path), _explained("redis-benchmark"):
        for _ in range(_TURNS):
            for way, where in (("Unix socket", ["-s", path]), ("TCP", ["-p", port])):
                for test in ("SET", "GET"):
                    name, speed = f"redis {test}, {way}", redis_benchmark(where, test, _PART_BYTES, _PARTS, _THREADS)
                    found[name] = max(found.get(name, 0.0), speed)
    return found


@contextmanager
def _explained(program: str) -> Iterator[None]:
    """Raises OSError when the program fails: an arm's number would have no limit without a reason."""
    try:
        yield
    except subprocess.SubprocessError as error:
        raise OSError(f"{program} could not measure its limit: {error}") from error


def _expect(done: bool) -> None:
    if not done:
        raise OSError("the disk wrote or read less than it was asked for")
