"""How near the Redis tier comes to what ``redis-benchmark`` reaches with the same parts and
connections.

    python -m kvtier.bench.micro.redis

Starts a redis-server of its own without persistence. Each round measures, over TCP loopback and
over a Unix socket, ``redis-benchmark`` SET and GET, and the tier's write and read of whole chunks
from as many threads. Both use a key space of the same size, so that none lives in a CPU cache that
the other does not have. A ratio is the median of the rounds' ratios to redis-benchmark, and a limit
what the project asks for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import redis

from kvtier.bench.flags import run_micro
from kvtier.bench.processes.companion import RUN_BYTES, redis_benchmark, redis_server
from kvtier.bench.report import Row, against, in_turns, median_row
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.pool import Pool
from kvtier.tiers.redis.layout import PART_BYTES, Form
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier

SHARES = {"write": ("SET", 0.75), "read": ("GET", 0.80)}
"""redis-benchmark's test of each way, and the share of its speed that the project asks for."""
CONNECTIONS, CHUNK_BYTES = 2, 7 << 20
"""Connections, each with a thread, and the size of what they carry."""
_THREAD_CHUNKS = 12


def speed(tier: RedisTier, way: str, pool: Pool, keys: Sequence[Sequence[ChunkKey]]) -> float:
    move: Callable[[ChunkKey, memoryview], bool | None] = getattr(tier, way)
    moves = max(1, round(RUN_BYTES / pool.slot_bytes / len(keys)))

    def work(thread: int) -> None:
        slot = pool.view(thread)
        for number in range(moves):
            if not move(keys[thread][number % _THREAD_CHUNKS], slot):
                raise RuntimeError(f"a {way} failed in {tier.name}")

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(keys)) as threads:
        list(threads.map(work, range(len(keys))))
    return moves * len(keys) * pool.slot_bytes / (time.perf_counter() - begun) / 1e9


def rows_of(name: str, url: str, where: Sequence[str], rounds: int) -> list[Row]:
    """The rows of one transport. ``where``: redis-benchmark's arguments for it."""
    count, size, form = CONNECTIONS, CHUNK_BYTES, Form("kvtier", b"bench", PART_BYTES)
    servers = RedisServers(url, connections=count, timeout_s=10.0)
    names = _THREAD_CHUNKS * count * -(-size // form.part_bytes)
    layout = ChunkLayout(bytes(32), 1, 1, (size,))
    keys = [layout.keys([thread] * _THREAD_CHUNKS) for thread in range(count)]
    with (
        closing(RedisTier(servers, form, 1 << 40, size)) as tier,
        closing(Pool(count, size)) as pool,
    ):
        for slot in range(count):
            pool.view(slot)[:] = os.urandom(size)
        works: dict[str, Callable[[], float]] = {}
        for way, (test, _) in SHARES.items():
            works[test] = partial(redis_benchmark, where, test, form.part_bytes, names, count)
            works[way] = partial(speed, tier, way, pool, keys)
        seen, rows = in_turns(works, lambda work: work(), rounds), []
        for way, (test, share) in SHARES.items():
            rows.append(median_row(f"{name}: redis-benchmark {test}", seen[test], "GB/s"))
            rows.append(against(f"{name}: {way}", seen[way], seen[test], share))
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return rows


def all_rows(given: argparse.Namespace) -> list[Row]:
    with redis_server() as (port, path, _):
        rows = rows_of("TCP", f"redis://127.0.0.1:{port}", ["-p", port], given.rounds)
        return rows + rows_of("Unix socket", f"unix://{path}", ["-s", path], given.rounds)


def facts() -> dict[str, object]:
    told = subprocess.run(
        ["redis-server", "--version"], capture_output=True, text=True, check=True
    ).stdout
    sizes = {"part_bytes": PART_BYTES, "chunk_bytes": CHUNK_BYTES, "connections": CONNECTIONS}
    return {"redis": told.split()[2].removeprefix("v="), "redis_py": redis.__version__} | sizes


if __name__ == "__main__":
    run_micro("redis", __doc__, 9, all_rows, facts=facts)
