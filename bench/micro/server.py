"""Cost of a server on the same host for an engine: the latency of answers, and bandwidth beside an
embedded Store.

    python -m kvtier.bench.micro.server

- ``match`` of 128 chunks through the Unix socket: alone, and while another engine saves at full
  speed.
- Save and load of runs of chunks through the server, and the same through an embedded Store.
  Rounds alternate, and so does which begins.

It needs twice ``pool_mib`` of memory. The server and the other engine are processes of their own.
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
from kvtier.bench.flags import described
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.report import Row, median_row, print_rows, write_results
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

    def __init__(self, cache: KVStore, layout: ChunkLayout, chunks: int) -> None:
        self._cache, self._layout, self._chunks = cache, layout, chunks
        self._kv = memoryview(bytearray(os.urandom(layout.chunk_bytes)))

    def save(self, prompt: int) -> int:
        with self._cache.save(run_of(self._layout, prompt, self._chunks)) as lease:
            views = lease.views()
            for view in views:
                view[: len(self._kv)] = self._kv
            lease.commit()
        return len(views) * len(self._kv)

    def load(self, prompt: int) -> int:
        with self._cache.load(run_of(self._layout, prompt, self._chunks)) as lease:
            lease.poll()
            views = lease.views()
            for view in views:
                self._kv[:] = view[: len(self._kv)]
        return len(views) * len(self._kv)


def match_latency(path: str, layout: ChunkLayout, calls: int) -> tuple[float, float, float]:
    """Milliseconds: median, 99th percentile and worst."""
    keys = run_of(layout, 1, _MATCH_CHUNKS)
    client = client_of(path, layout)
    with client.save(keys) as lease:
        lease.commit()
    pinned = client.load(keys)  # or the other engine would push them out
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        found = client.lookup(keys).progress
        times.append(1000 * (time.perf_counter() - begun))
        if found.ready != _MATCH_CHUNKS:
            raise BenchError(f"{found} of {_MATCH_CHUNKS} chunks")
    pinned.close()
    client.close()
    times.sort()
    return statistics.median(times), times[int(0.99 * calls)], times[-1]


def latency_rows(layout: ChunkLayout, pool_bytes: int, chunks: int, calls: int) -> list[Row]:
    rows = []
    with server(pool_bytes) as (path, _):
        quiet = match_latency(path, layout, calls)
        with saving_engine(path, layout, chunks):
            busy = match_latency(path, layout, calls)
    for name, (median, p99, worst) in (("alone", quiet), ("while another engine saves", busy)):
        what = f"match of 128 chunks, {name}"
        rows.append(Row(f"{what}: median", median, "ms", _MATCH_MEDIAN_MS, max=worst))
        rows.append(Row(f"{what}: p99", p99, "ms", _MATCH_P99_MS, max=worst))
    return rows


@contextmanager
def saving_engine(path: str, layout: ChunkLayout, chunks: int) -> Iterator[None]:
    """A process that saves at full speed until the end of the block, which begins when it has
    touched every slot."""
    words = [sys.executable, "-m", "kvtier.bench.micro.server", "--engine", path]
    words += ["--chunk-mib", str(layout.chunk_bytes / 2**20), "--run", str(chunks)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as engine:
        try:
            if engine.stdout is None or engine.stdout.readline() != "warm\n":
                raise BenchError("the other engine did not come up")
            yield
        finally:
            engine.kill()


def save_for_ever(path: str, chunk_bytes: int, chunks: int) -> None:
    layout = layout_of(chunk_bytes, 1)
    client, prompt = client_of(path, layout), 0
    assert client.pool is not None
    client.pool.populate(0, client.pool.slots)
    engine = Attached(client, layout, chunks)
    print("warm", flush=True)
    while True:
        engine.save(prompt := prompt + 1)


def bytes_rows(layout: ChunkLayout, pool_bytes: int, chunks: int, rounds: int) -> list[Row]:
    """Each round saves new prompts over the last round's, then loads them."""
    slots = pool_bytes // layout.slot_bytes
    prompts = max(1, slots // chunks)
    seen: dict[tuple[str, str], list[float]] = {}
    with server(pool_bytes) as (path, _), ExitStack() as ends:
        caches: dict[str, KVStore] = {
            "embedded": Store(Pool(slots, layout.slot_bytes)),
            "served": client_of(path, layout),
        }
        both = {name: Attached(cache, layout, chunks) for name, cache in caches.items()}
        for cache in caches.values():
            ends.callback(cache.close)
        for round_ in range(rounds + 1):
            todo = range(round_ * prompts, (round_ + 1) * prompts)
            for name in list(both) if round_ % 2 else list(both)[::-1]:
                save, load = speed(both[name].save, todo), speed(both[name].load, todo)
                if round_:  # the first round touches every page for the first time
                    seen.setdefault((name, "save"), []).append(save)
                    seen.setdefault((name, "load"), []).append(load)
    rows = []
    for verb in ("save", "load"):
        own, served = seen["embedded", verb], seen["served", verb]
        bound = statistics.median(own)
        ratio = statistics.median(served) / bound
        rows.append(median_row(f"{verb}, embedded Store", own, "GB/s"))
        name = f"{verb}, served (ratio to embedded)"
        rows.append(median_row(name, served, "GB/s", _SHARE * bound, ratio))
    return rows


def speed(work: Callable[[int], int], prompts: Sequence[int]) -> float:
    begun = time.perf_counter()
    moved = sum(work(prompt) for prompt in prompts)
    return moved / (time.perf_counter() - begun) / 1e9


def main() -> None:
    parser = described(__doc__)
    add = parser.add_argument
    add("--chunk-mib", type=float, default=7)
    add("--run", type=int, default=8, help="chunks an engine saves or loads at once")
    add("--pool-mib", type=int, default=1024)
    add("--rounds", type=int, default=7)
    add("--calls", type=int, default=4000)
    add("--engine", metavar="SOCKET", help=argparse.SUPPRESS)
    add("--out", default="bench/results/server.json")
    given = parser.parse_args()
    size = int(given.chunk_mib * 2**20)
    if given.engine is not None:
        save_for_ever(given.engine, size, given.run)
    layout, pool_bytes = layout_of(size), given.pool_mib << 20
    room = max(pool_bytes, (_MATCH_CHUNKS + 8 * given.run) * layout.slot_bytes)
    rows = latency_rows(layout, room, given.run, given.calls)
    rows += bytes_rows(layout, pool_bytes, given.run, given.rounds)
    write_results(given.out, "server", rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
