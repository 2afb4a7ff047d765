"""What a server on the same host costs an engine: the latency of answers, bandwidth compared with
an own Store, fairness, and memory.

    python -m kvtier.bench.micro.server

- ``match`` of 128 chunks through the Unix socket: alone, and while another engine saves at full
  speed.
- Save and load of runs of chunks through the server, compared with the same through an embedded
  Store. Rounds alternate, and so does which begins. A row is the median with the lowest and the
  highest.
- 1, 2 and 4 engines at once. Each is a process that saves and loads for a while. The rows are all
  together, and the slowest divided by the fastest.
- How long a lookup takes while a process floods the server: see :mod:`kvtier.bench.floods`.
- The server's own memory (RssAnon, so without the pool) after many tiny chunks were saved and
  evicted.

It needs twice ``pool_mib`` of memory. Servers and engines are separate processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvtier.api import KVStore
from kvtier.bench import floods
from kvtier.bench.flags import described
from kvtier.bench.processes.companion import SOCKET, companion, listens, run_folder
from kvtier.bench.processes.servers import free_port
from kvtier.bench.report import Row, print_rows, spread, write_results
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.errors import KVTierError
from kvtier.core.pool import Pool
from kvtier.store.store import Store

_MATCH_CHUNKS = 128
_MATCH_MEDIAN_MS, _MATCH_P99_MS = 0.5, 2.0
_SHARE, _TWO, _FAIR = 0.85, 1.5, 1.3
_BASE_MB, _CHUNK_BYTES = 150, 400
_TINY = 4096
_PATIENT_S = 5.0


class BenchError(KVTierError):
    """A server or an engine did not do its part."""


def layout_of(chunk_bytes: int, model: int = 0) -> ChunkLayout:
    return ChunkLayout(bytes([model]) * 32, 16, 16, (chunk_bytes,))


def run_of(layout: ChunkLayout, prompt: int, chunks: int) -> list[ChunkKey]:
    return layout.keys([prompt] * 16 * chunks)


def door_to(path: str, layout: ChunkLayout) -> ServerAccess:
    return ServerAccess(
        Address(path, "", 0),
        hello(layout.fingerprint, layout.chunk_bytes, stream=False, client="bench"),
    )


@contextmanager
def server(ram_bytes: int, more: Mapping[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """``kvtier serve`` over RAM, and what the variables in ``more`` add. Its socket and its process
    id."""
    settings = {"KVTIER_RAM_BYTES": f"{ram_bytes}B", "KVTIER_LOG_LEVEL": "WARNING", **(more or {})}
    with run_folder() as folder:
        path = folder / "run" / SOCKET
        command = [sys.executable, "-m", "kvtier", "serve", "--listen", f"unix://{path}"]
        with companion(command, settings, partial(listens, path), folder / "log") as pid:
            yield str(path), pid


class Attached:
    """Saves and loads runs of chunks. It copies each between a slot and a buffer that stands for
    the engine's KV."""

    def __init__(self, cache: KVStore, layout: ChunkLayout, chunks: int) -> None:
        self._cache, self._layout, self._chunks = cache, layout, chunks
        self._kv = memoryview(
            bytearray(os.urandom(1 << 20) * (layout.chunk_bytes // (1 << 20) + 1))
        )
        self._kv = self._kv[: layout.chunk_bytes]

    def save(self, prompt: int) -> int:
        """How many bytes were saved."""
        with self._cache.save(run_of(self._layout, prompt, self._chunks)) as lease:
            views = lease.views()
            for view in views:
                view[: len(self._kv)] = self._kv
            lease.commit()
        return len(views) * len(self._kv)

    def load(self, prompt: int) -> int:
        """How many bytes were loaded. Other engines may have evicted some meanwhile."""
        with self._cache.load(run_of(self._layout, prompt, self._chunks)) as lease:
            lease.poll()
            views = lease.views()
            for view in views:
                self._kv[:] = view[: len(self._kv)]
        return len(views) * len(self._kv)


# ---- latency -------------------------------------------------------------------------------------


def match_latency(path: str, layout: ChunkLayout, calls: int) -> tuple[float, float, float]:
    """Milliseconds: median, 99th percentile and worst."""
    keys = run_of(layout, 1, _MATCH_CHUNKS)
    client = Client(door_to(path, layout), _PATIENT_S)
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
        with engines(path, layout, chunks, 1, save_only=True):
            busy = match_latency(path, layout, calls)
    for name, (median, p99, worst) in (("alone", quiet), ("while another engine saves", busy)):
        rows.append(
            Row(f"match of 128 chunks, {name}: median", median, "ms", _MATCH_MEDIAN_MS, max=worst)
        )
        rows.append(Row(f"match of 128 chunks, {name}: p99", p99, "ms", _MATCH_P99_MS, max=worst))
    return rows


# ---- bytes ---------------------------------------------------------------------------------------


def speed(work: Callable[[int], int], prompts: Sequence[int]) -> float:
    """GB/s over some prompts."""
    begun = time.perf_counter()
    moved = sum(work(prompt) for prompt in prompts)
    return moved / (time.perf_counter() - begun) / 1e9


def bytes_rows(layout: ChunkLayout, pool_bytes: int, chunks: int, rounds: int) -> list[Row]:
    """Save and load, embedded and served. Each round saves new prompts over the last round's, then
    loads them."""
    prompts = max(1, pool_bytes // layout.slot_bytes // chunks)
    store = Store(Pool(pool_bytes // layout.slot_bytes, layout.slot_bytes))
    seen: dict[tuple[str, str], list[float]] = {}
    with server(pool_bytes) as (path, _), ExitStack() as undo:
        client = Client(door_to(path, layout), _PATIENT_S)
        undo.callback(client.close)
        undo.callback(store.close)
        both = {
            "embedded": Attached(store, layout, chunks),
            "served": Attached(client, layout, chunks),
        }
        for round_ in range(rounds + 1):
            todo = range(round_ * prompts, (round_ + 1) * prompts)
            order = list(both) if round_ % 2 else list(both)[::-1]
            for name in order:
                save, load = speed(both[name].save, todo), speed(both[name].load, todo)
                if round_:  # the first round touches every page for the first time
                    seen.setdefault((name, "save"), []).append(save)
                    seen.setdefault((name, "load"), []).append(load)
    rows = []
    for verb in ("save", "load"):
        own, own_low, own_high = spread(seen["embedded", verb])
        value, low, high = spread(seen["served", verb])
        rows.append(Row(f"{verb}, embedded Store", own, "GB/s", min=own_low, max=own_high))
        rows.append(
            Row(
                f"{verb}, served (ratio to embedded)",
                value,
                "GB/s",
                _SHARE * own,
                value / own,
                low,
                high,
            )
        )
    return rows


# ---- several engines -----------------------------------------------------------------------------


@contextmanager
def engines(
    path: str,
    layout: ChunkLayout,
    chunks: int,
    count: int,
    *,
    save_only: bool = False,
    pool_bytes: int = 0,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Attached processes at full speed after a warm-up. Each says its GB/s when SIGTERM tells it to
    stop.

    Without a socket each has its own Store with ``pool_bytes``.
    """
    words = [sys.executable, "-m", "kvtier.bench.micro.server", "--engine", path]
    words += ["--chunk-mib", str(layout.chunk_bytes / 2**20), "--run", str(chunks)]
    words += ["--pool-mib", str(pool_bytes >> 20), *(["--save-only"] if save_only else [])]
    running = [
        subprocess.Popen([*words, "--model", str(model + 1)], stdout=subprocess.PIPE, text=True)
        for model in range(count)
    ]
    try:
        for engine in running:
            if engine.stdout is None or engine.stdout.readline() != "warm\n":
                raise BenchError("an engine did not come up")
        for engine in running:
            engine.send_signal(signal.SIGUSR1)
        yield running
    finally:
        for engine in running:
            engine.terminate()
        for engine in running:
            engine.wait()
            if engine.stdout is not None:
                engine.stdout.close()


def be_an_engine(cache: KVStore, layout: ChunkLayout, chunks: int, save_only: bool) -> None:
    """One of :func:`engines`: loads a run as often as it saves one."""
    going, measuring = [True], [False]
    signal.signal(signal.SIGTERM, lambda *_: going.clear())
    signal.signal(signal.SIGUSR1, lambda *_: measuring.append(True))
    engine = Attached(cache, layout, chunks)
    assert cache.pool is not None
    cache.pool.populate(0, cache.pool.slots)
    prompt, moved, begun, told = 0, 0, 0.0, False
    while going:
        prompt += 1
        moved += engine.save(prompt)
        moved += 0 if save_only else engine.load(prompt)
        if not told:
            print("warm", flush=True)
            told = True
        if measuring[-1] and not begun:
            moved, begun = 0, time.perf_counter()
    print(moved / (time.perf_counter() - begun) / 1e9 if begun else 0.0, flush=True)
    cache.close()


def together_rows(layout: ChunkLayout, pool_bytes: int, chunks: int, seconds: float) -> list[Row]:
    """Served engines, and engines with their own Stores, which show what the machine allows."""
    rows, one = [], 0.0
    for count in (1, 2, 4):
        with engines("", layout, chunks, count, pool_bytes=pool_bytes // count) as running:
            own = sum(speeds_of(running, seconds))
        with server(pool_bytes) as (path, _), engines(path, layout, chunks, count) as running:
            speeds = speeds_of(running, seconds)
        total = sum(speeds)
        one = one or total
        name = f"{count} engines: save + load"
        rows.append(Row(f"{name}, each with its own Store", own, "GB/s"))
        rows.append(
            Row(
                f"{name}, served (ratio to that)",
                total,
                "GB/s",
                None,
                total / own,
                min(speeds),
                max(speeds),
            )
        )
        if count == 2:
            rows.append(Row("2 engines to 1, served", total / one, "ratio", _TWO))
        if count > 1:
            rows.append(
                Row(
                    f"{count} engines: fastest to slowest",
                    max(speeds) / min(speeds),
                    "ratio",
                    _FAIR,
                )
            )
    return rows


def speeds_of(running: Sequence[subprocess.Popen[str]], seconds: float) -> list[float]:
    """Let them work. Returns GB/s of each."""
    time.sleep(seconds)
    for engine in running:
        engine.terminate()
    return [float(engine.stdout.read()) for engine in running if engine.stdout is not None]


# ---- floods --------------------------------------------------------------------------------------


def beside_floods(seconds: float, rounds: int) -> list[Row]:
    if not seconds:
        return []
    port = free_port()
    with server(floods.SLOTS * _TINY, {"KVTIER_ADMIN": f"http://127.0.0.1:{port}"}) as (path, _):
        return floods.flood_rows(path, port, seconds, rounds)


# ---- memory --------------------------------------------------------------------------------------


def memory_rows(chunks: int, churns: int) -> list[Row]:
    """Many tiny chunks, which are all replaced several times. The server's memory beyond the pool
    after each time."""
    layout = layout_of(_TINY)
    limit = _BASE_MB + _CHUNK_BYTES * chunks / 1e6
    rows = []
    with server(chunks * _TINY) as (path, pid):
        client = Client(door_to(path, layout), _PATIENT_S)
        for churn in range(churns + 1):
            for prompt in range(-(-chunks // _MATCH_CHUNKS) if churn else 0):
                with client.save(run_of(layout, churn * chunks + prompt, _MATCH_CHUNKS)) as lease:
                    lease.commit()
            rows.append(
                Row(
                    f"memory beyond the pool, {churn} x {chunks:,} chunks",
                    anonymous_mb(pid),
                    "MB",
                    limit,
                )
            )
        held = client.stats()["ram_ready"]
        client.close()
    grown = rows[-1].value or 0.0
    start = rows[0].value or 0.0
    # Without a limit: the rows above have it. Python's dictionaries keep up to twice what they need
    # after a churn.
    rows.append(Row("memory a chunk, after churning", (grown - start) * 1e6 / held, "bytes"))
    return rows


def churn_rows(minutes: float) -> list[Row]:
    """The server's memory after each tenth of a long run of short-lived engines over a small pool
    and NVMe. Each attaches, saves, loads and leaves. Every third leaves in the middle of a lease,
    without a goodbye."""
    layout, chunks = layout_of(16 * _TINY), 2000
    memory: list[float] = []
    with tempfile.TemporaryDirectory(
        prefix="kvtier-", dir=Path.cwd()
    ) as nvme:  # not in /tmp: that is often RAM
        limits = {
            "KVTIER_NVME_PATH": nvme,
            "KVTIER_NVME_BYTES": str(4 * chunks * layout.slot_bytes),
        }
        with server(chunks * layout.slot_bytes, limits) as (path, pid):
            prompt, begun = 0, time.monotonic()
            for tenth in range(11):
                while time.monotonic() - begun < 6 * minutes * tenth:
                    prompt += 1
                    _visit(path, layout, prompt)
                if tenth:  # the first tenth fills the tiers and every table
                    memory.append(anonymous_mb(pid))
    name = (
        f"memory beyond the pool over {minutes:g} minutes and {prompt:,} engines: last to "
        "first tenth"
    )
    return [Row(name, memory[-1] / memory[0], "ratio", None, None, min(memory), max(memory))]


def _visit(path: str, layout: ChunkLayout, prompt: int) -> None:
    client = Client(door_to(path, layout), _PATIENT_S)
    engine = Attached(client, layout, 16)
    for number in range(20):
        engine.save(20 * prompt + number)
        engine.load(20 * max(0, prompt - draw_back(number)) + number)
    if prompt % 3:
        client.close()
        return
    left = client.save(
        run_of(layout, 10**8 + prompt, 4)
    )  # its connection ends with the object: as a crash does
    del left, client, engine


def draw_back(number: int) -> int:
    """How many engines ago the prompt was saved that is loaded now: it is in RAM, on NVMe, or
    gone."""
    return (0, 3, 30, 300)[number % 4]


def anonymous_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) * 1024 / 1e6


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--chunk-mib", type=float, default=7)
    parser.add_argument(
        "--run", type=int, default=8, help="chunks an engine saves or loads at once"
    )
    parser.add_argument("--pool-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument(
        "--chunks", type=int, default=100_000, help="tiny chunks for the server's memory"
    )
    parser.add_argument("--churns", type=int, default=4)
    parser.add_argument(
        "--churn-minutes", type=float, default=1, help="of short-lived engines; 0: none"
    )
    parser.add_argument("--flood-seconds", type=float, default=2, help="of each flood; 0: none")
    parser.add_argument("--flood-rounds", type=int, default=5)
    parser.add_argument("--engine", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--save-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="bench/results/server.json")
    given = parser.parse_args()
    layout = layout_of(int(given.chunk_mib * 2**20), given.model)
    pool_bytes = given.pool_mib << 20
    if given.engine is not None:
        own = (
            None
            if given.engine
            else Store(Pool(pool_bytes // layout.slot_bytes, layout.slot_bytes))
        )
        cache = own or Client(door_to(given.engine, layout), _PATIENT_S)
        be_an_engine(cache, layout, given.run, given.save_only)
        return
    rows = [
        *latency_rows(
            layout,
            max(pool_bytes, (_MATCH_CHUNKS + 8 * given.run) * layout.slot_bytes),
            given.run,
            given.calls,
        ),
        *bytes_rows(layout, pool_bytes, given.run, given.rounds),
        *together_rows(layout, pool_bytes, given.run, given.seconds),
        *beside_floods(given.flood_seconds, given.flood_rounds),
        *memory_rows(given.chunks, given.churns),
        *(churn_rows(given.churn_minutes) if given.churn_minutes else ()),
    ]
    write_results(given.out, "server", rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
