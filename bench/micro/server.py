"""Cost of a server on the same host for an engine: the latency of answers, and bandwidth beside an
embedded Store.

    python -m kvtier.bench.micro.server

- ``match`` of 128 chunks through the Unix socket: alone, and while another engine saves at full
  speed.
- Save and load of runs of chunks through the server, and the same through an embedded Store.
  Rounds alternate, and so does which begins.

It needs 2 GiB of memory. The server and the other engine are processes of their own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from kvtier.api import KVStore
from kvtier.bench.flags import run_micro
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.report import Row, against, in_turns, median_row
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.errors import KVTierError
from kvtier.core.pool import Pool
from kvtier.store.store import Store

_MATCH_CHUNKS = 128
_MATCH_MEDIAN_MS, _MATCH_P99_MS = 0.5, 2.0
_SHARE = 0.85
_ANSWER_S = 5.0
_CHUNK_BYTES, _POOL_BYTES = 7 << 20, 1 << 30
_RUN, _CALLS = 8, 4000
"""Chunks that an engine saves or loads at once, and lookups."""


class BenchError(KVTierError):
    pass


def layout_of(chunk_bytes: int, model: int = 0) -> ChunkLayout:
    return ChunkLayout(bytes([model]) * 32, 16, 16, (chunk_bytes,))


def run_of(layout: ChunkLayout, prompt: int, chunks: int) -> list[ChunkKey]:
    return layout.keys([prompt] * 16 * chunks)


def client_of(path: str, layout: ChunkLayout) -> Client:
    told = hello(layout.fingerprint, layout.chunk_bytes, stream=False, client="bench")
    return Client(ServerAccess(Address(path, "", 0), told), _ANSWER_S)


@contextmanager
def server(ram_bytes: int, more: Mapping[str, str] | None = None) -> Iterator[tuple[str, int]]:
    settings = {"KVTIER_RAM_BYTES": f"{ram_bytes}B", "KVTIER_LOG_LEVEL": "WARNING", **(more or {})}
    with run_folder() as folder:
        path = folder / "run" / SOCKET
        command = [sys.executable, "-m", "kvtier", "serve", "--listen", f"unix://{path}"]
        with companion(command, settings, partial(listens, path), folder / "log") as pid:
            yield str(path), pid


class Attached:
    """Saves and loads runs of chunks, between slots and a buffer that stands for the engine's
    KV. Both return the bytes that were moved."""

    def __init__(self, cache: KVStore, layout: ChunkLayout) -> None:
        self._cache, self._layout, self.saved = cache, layout, 0
        self._kv = memoryview(bytearray(os.urandom(layout.chunk_bytes)))

    def save(self, prompt: int) -> int:
        with self._cache.save(run_of(self._layout, prompt, _RUN)) as lease:
            views = lease.views()
            for view in views:
                view[: len(self._kv)] = self._kv
            lease.commit()
        self.saved += 1
        return len(views) * len(self._kv)

    def load(self, prompt: int) -> int:
        with self._cache.load(run_of(self._layout, prompt, _RUN)) as lease:
            lease.poll()
            views = lease.views()
            for view in views:
                self._kv[:] = view[: len(self._kv)]
        return len(views) * len(self._kv)


def match_latency(path: str, layout: ChunkLayout) -> tuple[float, float, float]:
    """Milliseconds: median, 99th percentile and worst."""
    keys = run_of(layout, 1, _MATCH_CHUNKS)
    client = client_of(path, layout)
    with client.save(keys) as lease:
        lease.commit()
    pinned = client.load(keys)  # or the other engine would push them out
    times = []
    for _ in range(_CALLS):
        begun = time.perf_counter()
        found = client.lookup(keys).progress
        times.append(1000 * (time.perf_counter() - begun))
        if found.ready != _MATCH_CHUNKS:
            raise BenchError(f"{found} of {_MATCH_CHUNKS} chunks")
    pinned.close()
    client.close()
    times.sort()
    return statistics.median(times), times[int(0.99 * _CALLS)], times[-1]


def latency_rows(layout: ChunkLayout) -> list[Row]:
    rows, pool_bytes = [], max(_POOL_BYTES, (_MATCH_CHUNKS + 8 * _RUN) * layout.slot_bytes)
    with server(pool_bytes) as (path, _):
        quiet = match_latency(path, layout)
        with saving_engine(path):
            busy = match_latency(path, layout)
    for name, (median, p99, worst) in (("alone", quiet), ("while another engine saves", busy)):
        what = f"match of 128 chunks, {name}"
        rows.append(Row(f"{what}: median", median, "ms", _MATCH_MEDIAN_MS, max=worst))
        rows.append(Row(f"{what}: p99", p99, "ms", _MATCH_P99_MS, max=worst))
    return rows


@contextmanager
def saving_engine(path: str) -> Iterator[None]:
    """A process that saves at full speed until the end of the block, which begins when it has
    touched every slot."""
    code = f"from kvtier.bench.micro import server; server.save_for_ever({path!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as engine:
        try:
            if engine.stdout is None or engine.stdout.readline() != "warm\n":
                raise BenchError("the other engine did not come up")
            yield
        finally:
            engine.kill()


def save_for_ever(path: str) -> None:
    layout = layout_of(_CHUNK_BYTES, 1)
    client = client_of(path, layout)
    assert client.pool is not None
    client.pool.populate(0, client.pool.slots)
    engine = Attached(client, layout)
    print("warm", flush=True)
    while True:
        engine.save(engine.saved)


def bytes_rows(layout: ChunkLayout, rounds: int) -> list[Row]:
    """Each round saves new prompts over the last round's, then loads them."""
    slots = _POOL_BYTES // layout.slot_bytes
    prompts = slots // _RUN

    def turn(arm: Attached) -> tuple[float, float]:
        todo = range(arm.saved, arm.saved + prompts)
        return speed(arm.save, todo), speed(arm.load, todo)

    with server(_POOL_BYTES) as (path, _), ExitStack() as ends:
        caches: dict[str, KVStore] = {
            "embedded": Store(Pool(slots, layout.slot_bytes)),
            "served": client_of(path, layout),
        }
        for cache in caches.values():
            ends.callback(cache.close)
        arms = {name: Attached(cache, layout) for name, cache in caches.items()}
        seen = in_turns(arms, turn, rounds)
    rows = []
    for at, verb in enumerate(("save", "load")):
        own, served = ([pair[at] for pair in pairs] for pairs in seen.values())
        rows.append(median_row(f"{verb}, embedded Store", own, "GB/s"))
        rows.append(against(f"{verb}, served (ratio to embedded)", served, own, _SHARE))
    return rows


def speed(work: Callable[[int], int], prompts: Sequence[int]) -> float:
    begun = time.perf_counter()
    moved = sum(work(prompt) for prompt in prompts)
    return moved / (time.perf_counter() - begun) / 1e9


def rows_of(given: argparse.Namespace) -> list[Row]:
    layout = layout_of(_CHUNK_BYTES)
    return [*latency_rows(layout), *bytes_rows(layout, given.rounds)]


if __name__ == "__main__":
    run_micro("server", __doc__, 7, rows_of)
