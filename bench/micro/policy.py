"""What the order of eviction costs: in a Store's lock, in the background, and in memory. And how
fast a trace is simulated.

``python -m kvtier.bench.micro.policy`` serves made conversations in this process, with RAM for
4,096 chunks over a tier of 32,768. *Under the lock* is what ``ram.policy: auto`` adds to ``lru``
for a chunk that is asked for, saved and let go. *In the background* is all that the spare lane does
for a chunk: sessions, shadows, and what other sizes would hit as long as it is read. Generated
agents have a row of their own, and so has a trace that ``--trace`` names, each with RAM of 2.5 % of
its chunks and no other tier, answers and plans included. All are CPU time, the least of some
rounds. *The longest piece* is the CPU time between two pauses of the spare lane, in a prompt of
512k tokens after many short ones, without Python's garbage collector. *Memory* is that of the spare
lane's own tables after all prompts.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from kvtier.bench.flags import described
from kvtier.bench.queue.traffic import traffic
from kvtier.bench.report import Row, print_rows, write_results
from kvtier.bench.traces.commands.simulate import chunks_of
from kvtier.bench.traces.formats import read
from kvtier.bench.traces.mooncake import Request
from kvtier.bench.traces.simulate import Cache, simulate, unhinted, unique
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import ANONYMOUS
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.order import LRU, PolicyOf
from kvtier.eviction.segments import SETTINGS, Segments
from kvtier.store.directory import Directory
from kvtier.store.observers.follower import Follower

ROOM, BELOW = 4096, 32_768
CHUNKS = 100_000
FEW, LONG = 1000, 2048
"""Short prompts before a long one, and chunks of a long prompt."""
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
    """CPU seconds of a Directory for all prompts."""
    directory, begun = Directory(ROOM, (), policy), time.process_time()
    for request in trace:
        run = request.run
        directory.used(run)
        held = directory.pin_ready(run)
        directory.unpin(held)
        directory.ordered(run)
        new = directory.reserve_run(directory.absent(run[len(held) :]), frozenset(run))
        directory.filled_run(new)
        directory.ordered(run)
    return time.process_time() - begun


def follower(*, what_if: bool = True) -> Follower:
    adaptive = Adaptive()
    directory = Directory(ROOM, (BELOW,), adaptive, lower=(adaptive.below,))
    rooms = {"ram": ROOM, "nvme": BELOW}
    return Follower(directory, nullcontext(), adaptive, time.monotonic, rooms, what_if=what_if)


def followed(trace: Sequence[Request], *, what_if: bool) -> float:
    """CPU seconds of the spare lane for all prompts."""
    one, begun = follower(what_if=what_if), time.process_time()
    for request in trace:
        one.prompt(request.run, ANONYMOUS)
        while one.work(lambda: None):
            pass
    return time.process_time() - begun


class Watch:
    """Measures the longest piece of work on this thread, and as a lock how long it is held."""

    def __init__(self) -> None:
        self.piece = self.held = 0.0
        self._begun = self._locked = time.thread_time()

    def pause(self) -> None:
        self.piece = max(self.piece, time.thread_time() - self._begun)
        self._begun = time.thread_time()

    def __enter__(self) -> None:
        self._locked = time.thread_time()

    def __exit__(self, *raised: object) -> None:
        self.held = max(self.held, time.thread_time() - self._locked)


def longest_piece(trace: Sequence[Request]) -> float:
    """CPU seconds, of the work for a prompt of 512k tokens that comes twice."""
    one, draw = follower(), random.Random(2)
    for request in trace[:FEW]:
        one.prompt(request.run, ANONYMOUS)
        while one.work(lambda: None):
            pass
    run = [ChunkKey(draw.randbytes(40)) for _ in range(LONG)]
    watch = Watch()
    for _ in range(2):
        one.prompt(run, ANONYMOUS)
        while one.work(watch.pause):
            watch.pause()
        watch.pause()
    return watch.piece


@contextmanager
def no_collector() -> Iterator[None]:
    """Python's collector of garbage does not run meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def memory(trace: Sequence[Request]) -> int:
    """Bytes of shadows, ghosts, sessions and curves of RAM and the tier below it, with all keys
    that they hold."""
    tracemalloc.start()
    one = follower()
    for request in trace:
        one.prompt([ChunkKey(bytes(bytearray(key))) for key in request.run], ANONYMOUS)
        while one.work(lambda: None):
            pass
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


def least(rounds: int, *works: Callable[[], float]) -> list[float]:
    """Of each, in turns."""
    turns = [[work() for work in works] for _ in range(rounds)]
    return [min(each) for each in zip(*turns, strict=True)]


def speed(about: str, trace: Sequence[Request], room: int, rounds: int, policy: str) -> Row:
    """Chunks simulated in a CPU second, at best."""

    def spent() -> float:
        begun = time.process_time()
        simulate(unhinted(trace), Cache(room, policy=policy))
        return time.process_time() - begun

    (seconds,) = least(rounds, spent)
    return Row(about, _asked(trace) / seconds, "chunks/s", limit=100_000)


def _asked(trace: Sequence[Request]) -> int:
    return sum(len(request.run) for request in trace)


class _Timed(Cache):
    """``spent``: CPU seconds of the spare lane, for prompts, answers and plans."""

    spent = 0.0

    def _follow(self) -> None:
        begun = time.process_time()
        super()._follow()
        self.spent += time.process_time() - begun


def of_trace(name: str, trace: Sequence[Request], rounds: int, limit: float) -> Row:
    """What a trace costs in the background, with RAM alone."""
    room = chunks_of(_PART, unique(trace))

    def spent() -> float:
        cache = _Timed(room)
        simulate(trace, cache)
        return cache.spent

    (seconds,) = least(rounds, spent)
    about = f"a chunk of {name} in the background, RAM of {_PART}"
    return Row(about, 1e6 * seconds / _asked(trace), "us a chunk", limit=limit)


def _in_background(trace: Sequence[Request], rounds: int) -> list[Row]:
    asked = _asked(trace)
    alone, with_sizes = least(
        rounds, lambda: followed(trace, what_if=False), lambda: followed(trace, what_if=True)
    )
    with no_collector():
        (piece,) = least(rounds, lambda: longest_piece(trace))
    return [
        Row(
            "a chunk in the background: sessions and shadows",
            1e6 * alone / asked,
            "us a chunk",
            limit=15.0,
        ),
        Row(
            "a chunk in the background while what other sizes would hit is read",
            1e6 * with_sizes / asked,
            "us a chunk",
        ),
        Row(
            "the longest piece of background work for a prompt of 512k tokens",
            1e3 * piece,
            "ms",
            limit=0.3,
        ),
    ]


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", help="recorded requests, for a row of their own")
    parser.add_argument("--output", default="bench/results/policy.json")
    args = parser.parse_args()
    trace = chats(CHUNKS)
    asked = _asked(trace)
    lru, kept = least(
        args.rounds,
        lambda: locked(trace, LRU),
        lambda: locked(trace, lambda room: Segments(room, SETTINGS[1])),
    )
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
        *_in_background(trace, args.rounds),
        of_trace("generated agents", traffic(1.0, 0, 1.0, "agents"), args.rounds, 6.0),
        Row(
            "memory of shadows, ghosts, sessions and curves of two tiers",
            memory(trace) / 2**20,
            "MiB",
            limit=128.0,
        ),
    ]
    if args.trace:
        found = unhinted(read(args.trace, partial=True).requests)
        name, room = Path(args.trace).name, chunks_of(_PART, unique(found))
        rows += [
            of_trace(name, found, args.rounds, 15.0),
            speed(f"simulate, auto, {name}, RAM of {_PART}", found, room, args.rounds, "auto"),
        ]
    for policy in ("lru", "auto"):
        rows.append(speed(f"simulate, {policy}", trace, ROOM, args.rounds, policy))
    print_rows(rows)
    write_results(args.output, "policy", rows)


if __name__ == "__main__":
    main()
