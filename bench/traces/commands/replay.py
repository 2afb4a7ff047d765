"""``kvtier replay FILE --connect unix:///path``: recorded requests against a running server, with
real bytes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from kvtier.bench.flags import between
from kvtier.bench.traces.formats import read
from kvtier.bench.traces.replay import Replay
from kvtier.bench.traces.simulate import unhinted
from kvtier.client.client import Client
from kvtier.client.connect import Address
from kvtier.config.load import load
from kvtier.core.chunk import PAGE_BYTES, ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import parse_size, progress, size_text, table
from kvtier.started import Started

_CHUNK_BYTES = 64 << 10
_MOST_AT_ONCE = 64
_ANSWER_S = 5.0
"""A replay measures what is held, so it waits longer for an answer than an engine."""


class ReplayResult(NamedTuple):
    """Counts are in chunks, unless they say what they count."""

    requests: int
    asked: int
    hits: dict[str, int]
    hit_percent: float
    saved: int
    writes: dict[str, int]
    wrong_bytes: int
    seconds: float
    unanswered: int
    chunk_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", help="a trace in Mooncake's form, or the folder of a recorder")
    add("--connect", required=True, metavar="ADDRESS", help="the server, such as unix:///path")
    add(
        "--chunk-bytes",
        type=parse_size,
        metavar="SIZE",
        help="of a chunk; default: the size that the server keeps, or 64KiB",
    )
    add(
        "--speed",
        type=between("above 0", 0),
        help="times as fast as recorded; default: the next one when all is written that one left",
    )
    add(
        "--concurrency",
        type=_at_once,
        default=1,
        help="requests in flight; they begin in the trace's order; default: 1",
    )
    add("--hints", choices=("none", "recorded"), default="none", help="send the recorded hints")
    add("--requests", type=int, metavar="N", help="only the first N; default: all of them")
    add(
        "--keep-partial",
        action="store_true",
        help="keep a prompt's last block although it is not full; kvtier does not",
    )
    add("--json", action="store_true", help="print the counts, in chunks")


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 when a byte was wrong, or when the server was lost. Raises ConfigError."""
    if not Address.parse(arguments.connect).path:
        raise ConfigError(
            f"--connect {arguments.connect}: a replay maps the server's memory, so it runs on the "
            "server's host: give its unix:///path"
        )
    trace = read(arguments.file, "mooncake", arguments.keep_partial).requests[: arguments.requests]
    if arguments.hints == "none":
        trace = unhinted(trace)
    if not any(request.run for request in trace):
        raise ConfigError(f"{arguments.file}: no full block, so there is nothing to ask for")
    with ExitStack() as stack:
        clients = []
        for _ in range(arguments.concurrency):
            clients.append(_client(arguments))
            stack.callback(clients[-1].close)
        replay, begun = Replay(clients), time.monotonic()
        replay.run(trace, arguments.speed, progress("replay", len(trace)))
        found = _found(replay, clients, time.monotonic() - begun)
    if arguments.json:
        print(msgspec.json.encode(found._asdict()).decode())
    else:
        print("\n".join(_screen(found)))
    return 1 if found.wrong_bytes or found.unanswered else 0


def _client(arguments: argparse.Namespace) -> Client:
    started = Started(load())
    size = arguments.chunk_bytes
    if size is None:
        size = next(iter(started.sizes_of(arguments.connect)), _CHUNK_BYTES)
    if size % PAGE_BYTES:
        raise ConfigError(f"--chunk-bytes {size}: expected a multiple of {PAGE_BYTES:,}")
    layout = ChunkLayout(fingerprint({"replay": size}), 1, 1, (size,))
    client = Client(started.access(arguments.connect, layout, in_namespace=False), _ANSWER_S)
    if client.pool is None:
        client.close()
        raise ConfigError(f"--connect {arguments.connect}: no server answers there")
    return client


def _found(replay: Replay, clients: Sequence[Client], seconds: float) -> ReplayResult:
    counts, pool, hit = replay.counts, clients[0].pool, "hit_"
    hits = {
        name.removeprefix(hit): count
        for name, count in sorted(counts.items())
        if name.startswith(hit)
    }
    return ReplayResult(
        counts["requests"],
        counts["asked"],
        hits,
        round(100 * sum(hits.values()) / max(1, counts["asked"]), 3),
        counts["saved"],
        replay.writes(),
        counts["wrong"],
        round(seconds, 3),
        sum(client.counts["unanswered"] + client.counts["lost"] for client in clients),
        pool.slot_bytes if pool is not None else 0,
    )


def _screen(found: ReplayResult) -> Iterator[str]:
    yield (
        f"{found.requests:,} requests asked for {found.asked:,} chunks of "
        f"{size_text(found.chunk_bytes)} in {found.seconds:.1f} s"
    )
    yield ""
    rows = [
        [
            place,
            f"{found.hits.get(place, 0):,}",
            f"{100 * found.hits.get(place, 0) / max(1, found.asked):.2f} %",
            f"{found.writes.get(place, found.saved):,}",
        ]
        for place in dict.fromkeys(["ram", *found.writes, *found.hits])
    ]
    rows.append(["all", f"{sum(found.hits.values()):,}", f"{found.hit_percent:.2f} %", ""])
    yield from table(("tier", "hits", "of asked", "written"), rows, numbers=(1, 2, 3))
    yield f"wrong bytes: {found.wrong_bytes}"
    if found.unanswered:
        yield f"{found.unanswered} questions were not answered: look at the server's log"


def _at_once(given: str) -> int:
    if not 1 <= int(given) <= _MOST_AT_ONCE:
        raise argparse.ArgumentTypeError(f"must lie between 1 and {_MOST_AT_ONCE}")
    return int(given)
