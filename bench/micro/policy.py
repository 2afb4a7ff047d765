"""What the order of eviction costs: in a Store's lock, in the background, and in memory. And how
fast a trace is simulated.

``python -m kvtier.bench.micro.policy`` serves made conversations in this process, with RAM for
4,096 chunks over a tier of 32,768. *Under the lock* is what ``ram.policy: auto`` adds to ``lru``
for a chunk that is asked for, saved and let go. *In the background* is all that the spare lane does
for a chunk: sessions, shadows, and what other sizes would hit. Both are CPU time,
the least of some rounds. *Memory* is that of the spare lane's own tables after all prompts.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from kvtier.bench.flags import described
from kvtier.bench.report import Row, print_rows, write_results
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import Cache, simulate, unhinted
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import NOBODY
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.order import LRU, PolicyOf
from kvtier.eviction.segments import SETTINGS, Segments
from kvtier.store.directory import Directory
from kvtier.store.observers.follower import Follower

ROOM, BELOW = 4096, 32_768
CHUNKS = 100_000
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
    """CPU seconds of a Directory for all prompts."""
    directory, begun = Directory(ROOM, (), policy), time.process_time()
    for request in trace:
        run = request.run
        directory.used(run)
        held = directory.pin_ready(run)
        for entry in reversed(held):
            directory.unpin(entry)
        directory.ordered(run)
        keep = frozenset(run)
        for key in run[len(held) :]:
            new = directory.reserve(key, keep) if directory.get(key) is None else None
            if new is not None:
                directory.filled(new)
        directory.ordered(run)
    return time.process_time() - begun


def follower() -> Follower:
    adaptive = Adaptive()
    directory = Directory(ROOM, (BELOW,), adaptive, lower=LRU)
    rooms = {"ram": ROOM, "nvme": BELOW}
    return Follower(directory, nullcontext(), adaptive, time.monotonic, rooms)


def followed(trace: Sequence[Request]) -> float:
    """CPU seconds of the spare lane for all prompts."""
    one, begun = follower(), time.process_time()
    for request in trace:
        one.prompt(request.run, NOBODY)
        while one.work(lambda: None):
            pass
    return time.process_time() - begun


def memory(trace: Sequence[Request]) -> int:
    """Bytes of shadows, ghosts, sessions and curves of RAM and the tier below it, with all keys
    that they hold."""
    tracemalloc.start()
    one = follower()
    for request in trace:
        one.prompt([ChunkKey(bytes(bytearray(key))) for key in request.run], NOBODY)
        while one.work(lambda: None):
            pass
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


def least(rounds: int, work: Callable[[], float]) -> float:
    return min(work() for _ in range(rounds))


def speed(trace: Sequence[Request], policy: str) -> float:
    """Chunks simulated in a CPU second."""
    begun = time.process_time()
    result = simulate(unhinted(trace), Cache(ROOM, policy=policy))
    return result.asked / (time.process_time() - begun)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="bench/results/policy.json")
    args = parser.parse_args()
    trace = chats(CHUNKS)
    asked = sum(len(request.run) for request in trace)
    lru = least(args.rounds, lambda: locked(trace, LRU))
    kept = least(args.rounds, lambda: locked(trace, lambda room: Segments(room, SETTINGS[1])))
    background = least(args.rounds, lambda: followed(trace))
    rows = [
        Row(
            "a chunk asked for, saved and let go under the lock, lru",
            1e6 * lru / asked,
            "us a chunk",
        ),
        Row(
            "ram.policy auto adds to a chunk under the lock",
            1e6 * (kept - lru) / asked,
            "us a chunk",
            limit=1.0,
        ),
        Row(
            "a chunk in the background: sessions, shadows, what other sizes would hit",
            1e6 * background / asked,
            "us a chunk",
            limit=15.0,
        ),
        Row(
            "memory of shadows, ghosts, sessions and curves of two tiers",
            memory(trace) / 2**20,
            "MiB",
            limit=128.0,
        ),
    ]
    for policy, wanted in (("lru", 100_000), ("auto", 40_000)):
        found = max(speed(trace, policy) for _ in range(args.rounds))
        rows.append(Row(f"simulate, {policy}", found, "chunks/s", limit=wanted))
    print_rows(rows)
    write_results(args.output, "policy", rows)


if __name__ == "__main__":
    main()
