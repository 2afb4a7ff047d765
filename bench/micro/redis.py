"""How near the Redis tier comes to what ``redis-benchmark`` reaches with the same parts and
connections.

    python -m kvtier.bench.micro.redis [--connections 2] [--rounds 9] [--part-bytes N] [--out FILE]

Starts a redis-server of its own without persistence. Over TCP loopback and over a Unix socket,
rounds of five runs alternate: ``redis-benchmark`` SET and GET, the tier's write and read of whole
chunks from as many threads, and the same parts through redis-py alone ("library": pipelined SET,
pipelined GET and a copy into the slot; no checksum, which the tier's rows include). All of them go
round a key space of the same size, so that none lives in a cache that the others do not have. A row
is the median with lowest and highest; its ``ratio`` is the median over the rounds of value /
redis-benchmark's value in the same round, its ``limit`` what the project asks for, as a share of
redis-benchmark's median. Last: how long ``find`` takes for a run of 128 chunks.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from kvtier.bench.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.report import Row, spread, write_results
from kvtier.bench.servers import free_port
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.pool import Pool
from kvtier.tiers.redis.layout import PART_BYTES, Form
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier

WRITE_SHARE, READ_SHARE = 0.75, 0.80
"""Asked for: shares of redis-benchmark's SET and GET."""
_CHUNKS = 12
"""Chunks in each thread's key space."""
_RUN_BYTES = 1_000_000_000
_FOUND = 128
_PATIENCE_S = 30.0

Lane = Callable[[int, ChunkKey, memoryview], None]


@contextmanager
def redis_server(env: Mapping[str, str] | None = None) -> Iterator[tuple[str, str, int]]:
    """A redis-server without persistence: its port, the path of its Unix socket, its process id."""
    port = str(free_port())
    with run_folder() as run:
        path = run / SOCKET
        command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--unixsocket", str(path)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(run)]
        with companion(command, env or {}, partial(listens, path), run / "log") as pid:
            yield port, str(path), pid


def redis_benchmark(
    where: Sequence[str], test: str, value_bytes: int, names: int, connections: int
) -> float:
    """GB/s of its ``test`` (GET or SET) with values of this size, over so many names. Raises
    SubprocessError when it fails or takes more than half a minute."""
    command = ["redis-benchmark", *where, "-t", test.lower(), "-d", value_bytes, "-c", connections]
    command += ["-n", _RUN_BYTES // value_bytes, "-r", names, "--csv"]
    words = [str(word) for word in command]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
    (row,) = csv.DictReader(told.stdout.splitlines())
    return float(row["rps"]) * value_bytes / 1e9


class Bench:
    """One transport: a tier, redis-py's client, and what redis-benchmark is told to measure the
    same."""

    def __init__(
        self, url: str, where: Sequence[str], form: Form, chunk_bytes: int, connections: int
    ) -> None:
        self.where, self.form, self.connections, self.chunk_bytes = (
            where,
            form,
            connections,
            chunk_bytes,
        )
        self.tier = RedisTier(
            RedisServers(url, connections=connections, timeout_s=10.0), form, 1 << 40, chunk_bytes
        )
        self.client: Any = redis.Redis.from_url(url, max_connections=connections)
        layout = ChunkLayout(bytes(32), 1, 1, (chunk_bytes,))
        self.keys = [layout.keys([thread] * _CHUNKS) for thread in range(connections)]
        self._pool = Pool(connections, chunk_bytes)
        self._pool.populate(0, connections)
        self.slots = [self._pool.view(slot) for slot in range(connections)]
        for slot in self.slots:
            slot[:] = os.urandom(chunk_bytes)
        self._threads = ThreadPoolExecutor(connections)

    def limit(self, test: str) -> float:
        """GB/s of redis-benchmark."""
        names = _CHUNKS * self.connections * self.form.part_count(self.chunk_bytes)
        return redis_benchmark(self.where, test, self.form.part_bytes, names, self.connections)

    def run(self, lane: Lane) -> float:
        """GB/s of all threads together, each going round its own chunks with its own slot."""
        turns = max(1, round(_RUN_BYTES / self.chunk_bytes / self.connections))

        def work(thread: int) -> None:
            for turn in range(turns):
                lane(thread, self.keys[thread][turn % _CHUNKS], self.slots[thread])

        begun = time.perf_counter()
        list(self._threads.map(work, range(self.connections)))
        return turns * self.connections * self.chunk_bytes / (time.perf_counter() - begun) / 1e9

    def write(self, thread: int, key: ChunkKey, slot: memoryview) -> None:
        if not self.tier.write(key, slot):
            raise RuntimeError(f"a write failed: {self.tier.counts}")

    def read(self, thread: int, key: ChunkKey, slot: memoryview) -> None:
        if not self.tier.read(key, slot):
            raise RuntimeError(f"a read failed: {self.tier.counts}")

    def library_write(self, thread: int, key: ChunkKey, slot: memoryview) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for name, part in zip(
                self.form.part_names(key, slot.nbytes), self.form.split(slot), strict=True
            ):
                pipe.set(name, part)
            pipe.execute()

    def library_read(self, thread: int, key: ChunkKey, slot: memoryview) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for name in self.form.part_names(key, slot.nbytes):
                pipe.get(name)
            for part, value in zip(self.form.split(slot), pipe.execute(), strict=True):
                part[:] = value

    def find_ms(self) -> float:
        """One look for a run of 128 chunks that are all there."""
        keys = ChunkLayout(bytes(32), 1, 1, (1,)).keys([7] * _FOUND)
        for key in keys:
            self.tier.write(key, memoryview(b"x"))
        begun = time.perf_counter()
        if self.tier.find(keys) != _FOUND:
            raise RuntimeError("chunks are missing")
        return (time.perf_counter() - begun) * 1e3

    def close(self) -> None:
        self._threads.shutdown()
        self.tier.close()
        self.client.flushall()
        self.client.close()
        self.slots.clear()
        self._pool.close()


def measure(name: str, bench: Bench, rounds: int) -> list[Row]:
    lanes: dict[str, tuple[str, Lane, float | None]] = {
        "write": ("set", bench.write, WRITE_SHARE),
        "read": ("get", bench.read, READ_SHARE),
        "library write": ("set", bench.library_write, None),
        "library read": ("get", bench.library_read, None),
    }
    values: dict[str, list[float]] = {key: [] for key in ("set", "get", *lanes)}
    for turn in range(rounds + 1):
        seen = {"set": bench.limit("set"), "get": bench.limit("get")}
        seen |= {key: bench.run(lane) for key, (_, lane, _) in lanes.items()}
        for key, value in seen.items() if turn else ():  # the first round allocates Redis's memory
            values[key].append(value)
    rows = [
        _row(f"{name}: redis-benchmark {test.upper()}", values[test]) for test in ("set", "get")
    ]
    for key, (test, _, share) in lanes.items():
        ratio = statistics.median(
            value / limit for value, limit in zip(values[key], values[test], strict=True)
        )
        limit = share * statistics.median(values[test]) if share else None
        rows.append(_row(f"{name}: {key}", values[key], limit=limit, ratio=ratio))
    return [
        *rows,
        _row(f"{name}: find {_FOUND} chunks", [bench.find_ms() for _ in range(21)][1:], unit="ms"),
    ]


def _row(
    name: str,
    values: list[float],
    *,
    unit: str = "GB/s",
    limit: float | None = None,
    ratio: float | None = None,
) -> Row:
    middle, low, high = spread(values)
    return Row(name, middle, unit, limit, ratio, low, high)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the Redis tier against redis-benchmark.")
    parser.add_argument(
        "--connections", type=int, default=2, help="threads, and connections (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="runs of each kind (default: 9)")
    parser.add_argument("--chunk-bytes", type=int, default=7 << 20, help="default: 7 MiB")
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES, help=f"default: {PART_BYTES}")
    parser.add_argument("--out", default="bench/results/redis.json")
    args = parser.parse_args(argv)
    form = Form("kvtier", b"bench", args.part_bytes)
    rows: list[Row] = []
    with redis_server() as (port, path, _):
        for name, url, where in (
            ("TCP", f"redis://127.0.0.1:{port}", ["-p", port]),
            ("Unix socket", f"unix://{path}", ["-s", path]),
        ):
            bench = Bench(url, where, form, args.chunk_bytes, args.connections)
            rows += measure(name, bench, args.rounds)
            bench.close()
    for row in rows:
        share = "" if row.ratio is None else f"{row.ratio:4.0%} of redis-benchmark"
        asked = "" if row.limit is None else f", asked for {row.limit:.2f}"
        print(
            f"{row.name:34} {row.value:6.2f} {row.unit:4} ({row.min:.2f} - {row.max:.2f})  "
            f"{share}{asked}"
        )
    version = subprocess.run(
        ["redis-server", "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[2]
    write_results(
        Path(args.out),
        "redis",
        rows,
        redis=version.removeprefix("v="),
        redis_py=redis.__version__,
        part_bytes=args.part_bytes,
        chunk_bytes=args.chunk_bytes,
        connections=args.connections,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
