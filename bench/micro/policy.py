"""Cost of the order of eviction, in a Store's lock and in the background.

``python -m kvtier.bench.micro.policy`` serves made conversations in this process, with RAM for
4,096 chunks over a tier of 32,768. *Under the lock* is what ``ram.policy: auto`` adds to ``lru``
for a chunk that is asked for, saved and let go. *In the background* is all that the spare lane does
for a chunk, sessions and shadows. ``--trace`` adds a row for recorded requests, with RAM of 2.5 %
of their chunks and no other tier. All are CPU time, the least of some rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from kvtier.bench.flags import run_micro
from kvtier.bench.report import Row
from kvtier.bench.traces.commands.simulate import chunks_of
from kvtier.bench.traces.formats import read
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import Cache, simulate, unhinted, unique
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import ANONYMOUS
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.order import SETTINGS, PolicyOf, Segments
from kvtier.store.directory import Directory
from kvtier.store.observers.follower import Follower

ROOM, BELOW = 4096, 32_768
CHUNKS = 100_000
_PART = "2.5%"
"""RAM for a trace, of its different chunks."""
_CHATS, _GOES_ON = 400, 0.55


def chats(chunks: int) -> list[Request]:
    """Conversations of some turns, of so many chunks together. A third of the prompts come once."""
    draw, going, found, asked = random.Random(1), list[list[ChunkKey]](), list[Request](), 0
    while asked < chunks:
        goes_on = len(going) > _CHATS and draw.random() < _GOES_ON
        run = going.pop(draw.randrange(len(going))) if goes_on else []
        run = [*run, *(ChunkKey(draw.randbytes(40)) for _ in range(draw.randint(4, 20)))]
        if draw.random() < 0.7:
            going.append(run)
        found.append(Request(float(len(found)), tuple(run)))
        asked += len(run)
    return found


def locked(trace: Sequence[Request], policy: PolicyOf) -> float:
    directory, begun = Directory(ROOM, (), policy), time.process_time()
    for request in trace:
        run = request.run
        directory.used(run)
        held = directory.pin_ready(run)
        directory.unpin(held)
        directory.ordered(run)
        new = directory.reserve_run(directory.absent(run[len(held) :]), frozenset(run))
        directory.filled(new)
        directory.ordered(run)
    return time.process_time() - begun


def followed(trace: Sequence[Request]) -> float:
    adaptive, rooms = Adaptive(), {"ram": ROOM, "nvme": BELOW}
    directory = Directory(ROOM, (BELOW,), adaptive, lower=(adaptive,))
    one = Follower(directory, nullcontext(), adaptive, time.monotonic, rooms)
    begun = time.process_time()
    for request in trace:
        one.prompt(request.run, ANONYMOUS)
        while one.work(lambda: None):
            pass
    return time.process_time() - begun


def least(rounds: int, *works: Callable[[], float]) -> list[float]:
    """Of each, in turns."""
    turns = [[work() for work in works] for _ in range(rounds)]
    return [min(each) for each in zip(*turns, strict=True)]


def _asked(trace: Sequence[Request]) -> int:
    return sum(len(request.run) for request in trace)


class _Timed(Cache):
    """``spent``: CPU seconds of the spare lane, for prompts, answers and plans."""

    spent = 0.0

    def _follow(self) -> None:
        begun = time.process_time()
        super()._follow()
        self.spent += time.process_time() - begun


def of_trace(name: str, trace: Sequence[Request], rounds: int) -> Row:
    """With RAM alone, answers and plans included."""
    room = chunks_of(_PART, unique(trace))

    def spent() -> float:
        cache = _Timed(room)
        simulate(trace, cache)
        return cache.spent

    (seconds,) = least(rounds, spent)
    return _row(f"a chunk of {name} in the background, RAM of {_PART}", seconds, trace, 15.0)


def _row(name: str, seconds: float, trace: Sequence[Request], limit: float | None = None) -> Row:
    return Row(name, 1e6 * seconds / _asked(trace), "us a chunk", limit=limit)


def rows_of(given: argparse.Namespace) -> list[Row]:
    trace = chats(CHUNKS)
    lru, kept, background = least(
        given.rounds,
        lambda: locked(trace, Segments),
        lambda: locked(trace, lambda room: Segments(room, SETTINGS[1])),
        lambda: followed(trace),
    )
    rows = [
        _row("a chunk asked for, saved and let go under the lock, lru", lru, trace),
        _row("ram.policy auto adds to a chunk under the lock", kept - lru, trace, 1.0),
        _row("a chunk in the background: sessions and shadows", background, trace, 15.0),
    ]
    if given.trace:
        found = unhinted(read(given.trace, partial=True).requests)
        rows.append(of_trace(Path(given.trace).name, found, given.rounds))
    return rows


if __name__ == "__main__":
    run_micro("policy", __doc__, 5, rows_of, "--trace")
