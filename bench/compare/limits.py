"""What this machine can do at best, measured with the arms: one memcpy, the bare disk, and the bare
Redis server.

Each takes a few seconds at most. Redis's limits are left out where its programs are not installed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.bench.micro.nvme import gigabytes_per_second, make_buffers, raw_disk
from kvtier.bench.report import Row, spread

MEMCPY, DISK_READ, DISK_WRITE = "memcpy", "disk read", "disk write"
REDIS_UNIX, REDIS_TCP = "redis GET, Unix socket", "redis GET, TCP"
HOW = {
    "memcpy": "memmove of chunks, one thread, best of three",
    "disk": "direct I/O, chunks, two threads: the best of fio (psync; where it is installed) and "
    "of three turns of "
    "pwritev and preadv with buffers in huge pages",
    "redis": "redis-benchmark, two connections, values of 1 MiB, best of three",
}
_TURNS = 3
"""How often a quick measurement that varies much is repeated. The best counts."""
_MEMCPY_BYTES = 512 << 20
_FILE_BYTES, _BUFFERS, _FIO_S, _THREADS = 448 << 20, 16, 1.5, 2
_PART_BYTES, _PARTS = 1 << 20, 128
_PATIENCE_S = 30.0


def measured(folder: Path, chunk_bytes: int) -> dict[str, float]:
    """The limits in GB/s. ``folder``: one on the disk to which the arms write."""
    return {MEMCPY: memcpy(chunk_bytes)} | disk(folder, chunk_bytes) | redis()


def rows(found: Sequence[Mapping[str, float]]) -> list[Row]:
    """A row for each limit, over the rounds."""
    names = list(dict.fromkeys(name for one in found for name in one))
    made = []
    for name in names:
        middle, least, most = spread([one[name] for one in found if name in one])
        made.append(Row(f"limit: {name}", middle, "GB/s", min=least, max=most))
    return made


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        row.name.removeprefix("limit: "): row.value for row in rows(found) if row.value is not None
    }


def memcpy(chunk_bytes: int) -> float:
    """GB/s of pieces of a chunk, over more bytes than any CPU cache holds."""
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
    """Direct writes, then reads of the same file, which is then removed. The bytes are
    incompressible."""
    file = folder / "limit"
    count = -(-_FILE_BYTES // chunk_bytes)
    told = dict[str, float]()
    try:
        if shutil.which("fio"):
            told = {name: _fio(file, chunk_bytes, count, name) for name in (DISK_WRITE, DISK_READ)}
        own = _own_disk(file, chunk_bytes, count)
        return {name: max(speed, told.get(name, 0.0)) for name, speed in own.items()}
    finally:
        file.unlink(missing_ok=True)


def _own_disk(file: Path, chunk_bytes: int, count: int) -> dict[str, float]:
    """From and into huge pages. With fio's own buffers, which are scattered small pages, the same
    disk moves half as much."""
    buffers = make_buffers(_BUFFERS, chunk_bytes, huge=True)
    found: dict[str, float] = {DISK_WRITE: 0.0, DISK_READ: 0.0}
    with raw_disk(file, chunk_bytes, count) as works:
        for _ in range(_TURNS):
            for name, work in zip(found, works, strict=True):
                found[name] = max(found[name], gigabytes_per_second(work, count, buffers, _THREADS))
    return found


def _fio(file: Path, chunk_bytes: int, count: int, name: str) -> float:
    way = name.removeprefix("disk ")
    command = [
        "fio",
        "--name=limit",
        f"--filename={file}",
        f"--rw={way}",
        f"--bs={chunk_bytes}",
        "--direct=1",
    ]
    command += [
        f"--size={chunk_bytes * count}",
        "--ioengine=psync",
        f"--numjobs={_THREADS}",
        "--group_reporting",
    ]
    command += ["--time_based", f"--runtime={_FIO_S}", "--output-format=json", "--refill_buffers"]
    with _explained("fio"):
        told = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
        )
    said = json.loads(told.stdout)
    return float(said["jobs"][0][way]["bw_bytes"]) / 1e9


def redis() -> dict[str, float]:
    """GET and SET over a Unix socket and over TCP. Empty where Redis's programs are not
    installed."""
    if not shutil.which("redis-benchmark") or not shutil.which("redis-server"):
        return {}
    from kvtier.bench.processes.redis_server import redis_benchmark, redis_server

    found: dict[str, float] = {}
    with redis_server() as (port, path, _), _explained("redis-benchmark"):
        for _ in range(_TURNS):
            for way, where in (("Unix socket", ["-s", path]), ("TCP", ["-p", port])):
                for test in ("SET", "GET"):
                    name, speed = (
                        f"redis {test}, {way}",
                        redis_benchmark(where, test, _PART_BYTES, _PARTS, _THREADS),
                    )
                    found[name] = max(found.get(name, 0.0), speed)
    return found


@contextmanager
def _explained(program: str) -> Iterator[None]:
    """Raises OSError when the program fails. An arm's number would otherwise lack a limit without a
    reason."""
    try:
        yield
    except subprocess.SubprocessError as error:
        raise OSError(f"{program} could not measure its limit: {error}") from error
