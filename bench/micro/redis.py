"""How near the Redis tier comes to what ``redis-benchmark`` reaches with the same parts and
connections.

    python -m kvtier.bench.micro.redis [--connections 2] [--rounds 9] [--part-bytes N] [--out FILE]

Starts a redis-server of its own without persistence. Each round measures, over TCP loopback and
over a Unix socket: ``redis-benchmark`` SET and GET; the tier's write and read of whole chunks from
as many threads; and the same parts through redis-py alone ("library": a pipelined SET, a pipelined
GET and a copy into the slot, without the checksum that the tier's rows include). All of them use a
key space of the same size, so that none lives in a CPU cache that the others do not have. A row is
the median with the lowest and the highest. Its ``ratio`` is the median over the rounds of the value
divided by redis-benchmark's value in the same round. Its ``limit`` is what the project asks for, as
a share of redis-benchmark's median. The last row says how long ``find`` takes for a run of 128
chunks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import redis

from kvtier.bench.processes.redis_server import RUN_BYTES, redis_benchmark, redis_server
from kvtier.bench.report import Row, print_rows, write_results
from kvtier.bench.tier_and_peer import (
    FOUND,
    Peer,
    Threads,
    Way,
    add_flags,
    lookup_row,
    measure,
)
from kvtier.core.chunk import ChunkKey
from kvtier.tiers.redis.layout import PART_BYTES, Form
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier

WRITE_SHARE, READ_SHARE = 0.75, 0.80
"""What the project asks for, as shares of redis-benchmark's SET and GET."""
_CHUNKS = 12
"""Chunks of each thread."""


class Library:
    """redis-py alone."""

    def __init__(self, client: Any, form: Form) -> None:
        self._client = client
        self._form = form

    def write(self, key: ChunkKey, slot: memoryview) -> None:
        names = self._form.part_names(key, slot.nbytes)
        with self._client.pipeline(transaction=False) as pipe:
            for name, part in zip(names, self._form.split(slot), strict=True):
                pipe.set(name, part)
            pipe.execute()

    def read(self, key: ChunkKey, slot: memoryview) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for name in self._form.part_names(key, slot.nbytes):
                pipe.get(name)
            for part, value in zip(self._form.split(slot), pipe.execute(), strict=True):
                part[:] = value


def rows_of(
    name: str, url: str, where: Sequence[str], form: Form, args: argparse.Namespace
) -> list[Row]:
    """The rows of one transport. ``where``: redis-benchmark's arguments for it."""
    connections, chunk_bytes = args.connections, args.chunk_bytes
    servers = RedisServers(url, connections=connections, timeout_s=10.0)
    parts = _CHUNKS * connections * -(-chunk_bytes // form.part_bytes)
    set_, get = (
        partial(redis_benchmark, where, test, form.part_bytes, parts, connections)
        for test in ("SET", "GET")
    )
    peer = Peer("redis-benchmark", Way("SET", set_, WRITE_SHARE), Way("GET", get, READ_SHARE))
    with (
        redis.Redis.from_url(url, max_connections=connections) as client,
        closing(RedisTier(servers, form, 1 << 40, chunk_bytes)) as tier,
        Threads(connections, chunk_bytes, _CHUNKS, RUN_BYTES) as threads,
    ):
        library = Library(client, form)
        others = {"library write": library.write, "library read": library.read}
        rows = measure(name, threads, tier, peer, args.rounds, others)
        rows.append(lookup_row(f"{name}: find {FOUND} chunks", tier, FOUND))
        client.flushall()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the Redis tier against redis-benchmark.")
    add_flags(parser, "redis")
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES, help=f"default: {PART_BYTES}")
    args = parser.parse_args(argv)
    form = Form("kvtier", b"bench", args.part_bytes)
    with redis_server() as (port, path, _):
        rows = rows_of("TCP", f"redis://127.0.0.1:{port}", ["-p", port], form, args)
        rows += rows_of("Unix socket", f"unix://{path}", ["-s", path], form, args)
    print_rows(rows)
    command = ["redis-server", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    write_results(
        args.out,
        "redis",
        rows,
        redis=told.split()[2].removeprefix("v="),
        redis_py=redis.__version__,
        part_bytes=args.part_bytes,
        chunk_bytes=args.chunk_bytes,
        connections=args.connections,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
