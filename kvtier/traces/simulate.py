"""What a Store of given sizes would have hit of a trace: with its own Directory, policy, sessions
and spill rules, and without bytes.

Every write ends at once, and so does every read. So it counts what is held, not what arrives in
time. A test sends the same requests to a real Store and compares.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.hints import Hint
from kvtier.eviction.order import LRU
from kvtier.eviction.sessions import Sessions
from kvtier.store.directory import Directory, Entry
from kvtier.store.follower import Follower
from kvtier.traces.mooncake import Request

_ALL = 1 << 40
OVER = Hint(over=True)


class Hinted(NamedTuple):
    """A request with the hint that comes with it."""

    request: Request
    session: str = ""
    over: bool = False
    """A hint after this request says that its session is over."""


class Result(NamedTuple):
    """The counts, in chunks."""

    requests: int
    asked: int
    ram: int
    """Hits in RAM. ``lower`` counts the hits in the lower tier."""
    lower: int
    writes: int
    """Chunks written to the lower tier. ``unread`` counts those of them that left unread."""
    unread: int
    late: int
    """Chunks that left RAM before they were offered to the lower tier."""
    refused: int
    """Chunks not taken into RAM, because only chunks of the same prompt could have left for
    them."""
    shadows: dict[str, int]
    """The counts of the shadows."""

    @property
    def hits(self) -> int:
        return self.ram + self.lower

    def percent(self, chunks: int) -> float:
        return 100 * chunks / self.asked if self.asked else 0.0


class Cache:
    """A Store without bytes.

    Args:
        slots: chunks in RAM.
        lower: chunks in the tier below RAM; 0 for none.
        policy: ``auto`` or ``lru``.
        on_evict: write to the tier when RAM drops a chunk. False: write when a chunk is saved.
    """

    def __init__(
        self, slots: int, lower: int = 0, policy: str = "auto", on_evict: bool = True
    ) -> None:
        adaptive = Adaptive() if policy == "auto" else None
        self._adaptive, self._on_evict, self._now = adaptive, on_evict, 0.0
        self.directory = Directory(slots, [lower] if lower else [], adaptive or LRU, lower=LRU)
        self._lower = bool(lower)
        lock = nullcontext()
        self._follower = Follower(
            self.directory, lock, adaptive, lambda: self._now, {"ram": slots, "nvme": lower}
        )
        self._follower.curves.clear()
        self._counts: Counter[str] = Counter()
        self._unread: set[ChunkKey] = set()

    def serve(self, hinted: Hinted) -> None:
        """Serve one request, from its load to its save, and the hint after it."""
        run, directory, self._now = hinted.request.run, self.directory, hinted.request.at
        self._counts["requests"] += hinted.request.about is None
        self._counts["asked"] += len(run)
        directory.used(run)
        held = self._load(run)
        self._follower.prompt(run, hinted.session)
        self._follow()
        for entry in reversed(held):
            directory.unpin(entry)
        self._save(run)
        if hinted.over:
            self._follower.hint(hinted.request.about or run, hinted.session, OVER)
            self._follow()

    def _load(self, run: Sequence[ChunkKey]) -> list[Entry]:
        directory, held, promoted = self.directory, list[Entry](), list[Entry]()
        for key in run:
            entry = directory.get(key)
            if entry is None:
                if not self._lower or next(directory.holders(key), None) is None:
                    break
                entry = directory.reserve(key, (), 0)
                if entry is None:
                    break
                promoted.append(entry)
            directory.pin(entry)
            held.append(entry)
        for entry in promoted:
            self._unread.discard(entry.key)
            directory.filled(entry, 0)
        self._counts["ram"] += len(held) - len(promoted)
        self._counts["lower"] += len(promoted)
        if promoted:
            self._look_ahead()
        return held

    def _save(self, run: Sequence[ChunkKey]) -> None:
        directory, keep, new = self.directory, frozenset(run), list[Entry]()
        directory.ordered(run)
        absent = [key for key in run if directory.get(key) is None]
        for key in absent:
            entry = directory.reserve(key, keep)
            if entry is None:
                break
            new.append(entry)
        self._counts["refused"] += len(absent) - len(new)
        for entry in new:
            directory.filled(entry)
        directory.ordered(run)
        if self._lower and self._on_evict:
            if new:
                self._look_ahead()
        elif self._lower:
            self._spill(new)
            directory.stored_with(0, run)

    def _look_ahead(self) -> None:
        if self._on_evict:
            self._spill(self.directory.next_out())

    def _spill(self, entries: Iterable[Entry]) -> None:
        directory, unread = self.directory, self._unread
        for entry in entries:
            victims = directory.spill_begun(entry, 0)
            if victims is None:
                continue
            directory.deleted(0, victims)
            for victim in victims:
                if victim in unread:
                    unread.discard(victim)
                    self._counts["unread"] += 1
            directory.spill_ended(entry, 0, stored=True)
            unread.add(entry.key)
            self._counts["writes"] += 1

    def _follow(self) -> None:
        while self._follower.work(_nothing):
            pass

    def result(self) -> Result:
        """What has been counted so far."""
        counts = self._counts
        return Result(
            counts["requests"],
            counts["asked"],
            counts["ram"],
            counts["lower"],
            counts["writes"],
            counts["unread"],
            self.directory.evicted_unoffered if self._on_evict and self._lower else 0,
            counts["refused"],
            self._adaptive.counts() if self._adaptive else {},
        )


def _nothing() -> None:
    pass


def simulate(
    trace: Iterable[Hinted], cache: Cache, tell: Callable[[int], object] = lambda requests: None
) -> Result:
    """Serve all of ``trace``. ``tell`` is called with the number of requests so far."""
    for number, hinted in enumerate(trace, 1):
        cache.serve(hinted)
        tell(number)
    return cache.result()


def unique(trace: Iterable[Request]) -> int:
    """How many different chunks the trace has: the room for all of them."""
    return len({key for request in trace for key in request.run})


def unhinted(trace: Iterable[Request]) -> list[Hinted]:
    return [Hinted(request, request.session) for request in trace]


def recorded(trace: Iterable[Request]) -> list[Hinted]:
    """The requests with the hints that the trace records."""
    return [Hinted(request, request.session, request.over) for request in trace]


def oracle(
    trace: Sequence[Request], cover: float = 1.0, wrong: float = 0.0, seed: int = 1
) -> list[Hinted]:
    """The requests with hints that know the future: after the last request of a session comes the
    hint that it is over.

    Args:
        cover: the part of the sessions that give the hint.
        wrong: the part of the other requests, after which a session goes on, that give it too.
        seed: decides which ones.
    """
    sessions, draw = Sessions(_ALL), random.Random(seed)  # noqa: S311
    turns: dict[int, list[int]] = {}
    for at, request in enumerate(trace):
        if request.run:
            turns.setdefault(sessions.seen(request.run, request.session), []).append(at)
    said = set[int]()
    for own in turns.values():
        said.update(at for at in own[:-1] if draw.random() < wrong)
        if draw.random() < cover:
            said.add(own[-1])
    return [Hinted(request, request.session, at in said) for at, request in enumerate(trace)]
