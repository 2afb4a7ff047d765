"""Hits of a trace in a Store of given sizes: with its own Directory, policy, sessions
and spill rules, and without bytes.

Every write ends at once, and so does every read. So it counts what is held, not what arrives in
time. A test sends the same requests to a real Store and compares. :func:`belady` is the optimum,
which knows the future (*A study of replacement algorithms*, IBM Systems Journal 5(2), 1966).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from kvtier.bench.traces.mooncake import Request
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker
from kvtier.core.steps import PIECE_CHUNKS, pieces
from kvtier.eviction.adaptive import ALL_LRU, Adaptive
from kvtier.eviction.hints import NO_HINT, Hint
from kvtier.eviction.order import SETTINGS, PolicyOf, Segments
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.sessions import Sessions
from kvtier.store.directory import Directory
from kvtier.store.entry import Entry
from kvtier.store.observers.follower import Follower

FIXED = {setting.name: setting for setting in SETTINGS}
"""The settings among which ``auto`` chooses, by name. Each is a policy of its own here."""
POLICIES = (*FIXED, "auto")
TYPICAL = SavedCompute()
_ALL = 1 << 40
OVER = Hint(over=True)


class Result(NamedTuple):
    requests: int
    asked: int
    ram: int
    """Hits in RAM. ``lower`` counts the hits in NVMe, and ``redis`` those in Redis."""
    lower: int
    writes: int
    """Chunks written to NVMe. ``unread`` counts those of them that left unread."""
    unread: int
    late: int
    """Chunks that left RAM before they were offered to NVMe."""
    refused: int
    """Chunks not taken into RAM, because only chunks of the same prompt could have left for
    them."""
    shadows: dict[str, int]
    redis: int = 0
    redis_writes: int = 0
    redis_unread: int = 0
    compute: float = 0.0
    """The prefill of all chunks asked for, in chunks at a prompt's beginning. ``saved`` is that of
    the hits: :mod:`kvtier.eviction.saved_compute`."""
    saved: float = 0.0

    @property
    def hits(self) -> int:
        return self.ram + self.lower + self.redis

    def percent(self, chunks: int) -> float:
        return 100 * chunks / self.asked if self.asked else 0.0

    @property
    def saved_percent(self) -> float:
        """Of the prefill, as :meth:`percent` is of the chunks."""
        return 100 * self.saved / self.compute if self.compute else 0.0


class Begun(NamedTuple):
    """A request that is being computed."""

    request: Request
    hits: int


class _Tier(NamedTuple):
    """A tier below RAM."""

    number: int
    name: str
    on_evict: bool
    unread: set[ChunkKey]
    """The chunks that were written to it and not read since."""


class Cache:
    """A Store without bytes.

    Args:
        slots: chunks in RAM.
        lower: chunks in NVMe. 0 for none.
        policy: one of :data:`POLICIES`.
        on_evict: write to NVMe when RAM drops a chunk. False: write when a chunk is saved.
        redis: chunks in Redis, the lowest tier. 0 for none. It is written when a chunk is saved.
        compute: what a hit of the model saves.
    """

    def __init__(
        self,
        slots: int,
        lower: int = 0,
        policy: str = "auto",
        on_evict: bool = True,
        redis: int = 0,
        compute: SavedCompute = TYPICAL,
    ) -> None:
        adaptive = None if policy in FIXED else Adaptive(compute)
        order: PolicyOf = Segments
        if adaptive is not None:
            order = adaptive
        elif policy != "lru":
            order = partial(Segments, setting=FIXED[policy])
        self._adaptive, self._now = adaptive, 0.0
        rooms = {name: room for name, room in (("nvme", lower), ("redis", redis)) if room}
        self._tiers = [
            _Tier(number, name, on_evict and name == "nvme", set())
            for number, name in enumerate(rooms)
        ]
        orders = ALL_LRU if adaptive is None else adaptive.orders()
        below = [orders.on_evict if tier.on_evict else orders.lower for tier in self._tiers]
        self.directory = Directory(slots, [*rooms.values()], order, lower=below)
        self._on_evict = [tier for tier in self._tiers if tier.on_evict]
        self._follower = Follower(
            self.directory,
            nullcontext(),
            adaptive,
            lambda: self._now,
            {"ram": slots, **rooms},
        )
        self._counts: Counter[str] = Counter()
        self._of, self._asked, self._saved = compute.of, 0.0, 0.0

    def serve(self, request: Request) -> None:
        self.save(self.load(request, request.at), request.at)

    def load(self, request: Request, now: float) -> Begun:
        """The request is begun at this time, and loads its hits."""
        run, directory, self._now = request.run, self.directory, now
        self._counts["requests"] += request.about is None
        self._counts["asked"] += len(run)
        _last_first(directory.used, run, 4 * PIECE_CHUNKS)
        held = self._load(run)
        self._asked += self._of(len(run))
        self._saved += self._of(len(held))
        self._follower.prompt(run, Asker(request.session))
        self._follow()
        directory.unpin(held)
        return Begun(request, len(held))

    def save(self, begun: Begun, now: float) -> None:
        request, run, self._now = begun.request, begun.request.run, now
        self._save(run)
        if request.hint != NO_HINT:
            self._follower.hint(request.about or run, request.session, request.hint)
            self._follow()

    def _load(self, run: Sequence[ChunkKey]) -> list[Entry]:
        directory, held, promoted = self.directory, list[Entry](), list[tuple[Entry, _Tier]]()
        held += directory.pin_ready(run)
        for key in run[len(held) :]:
            entry = directory.get(key)
            if entry is None:
                number = next(directory.holders(key), None)
                entry = None if number is None else directory.reserve(key, (), number)
                if entry is None or number is None:
                    break
                promoted.append((entry, self._tiers[number]))
            directory.pin(entry)
            held.append(entry)
        for entry, tier in promoted:
            tier.unread.discard(entry.key)
            self._counts[tier.name] += 1
            directory.filled((entry,), tier.number)
        self._counts["ram"] += len(held) - len(promoted)
        if promoted:
            self._look_ahead()
        return held

    def _save(self, run: Sequence[ChunkKey]) -> None:
        directory = self.directory
        _last_first(directory.ordered, run)
        absent = directory.absent(run)
        new = directory.reserve_run(absent, frozenset(run))
        self._counts["refused"] += len(absent) - len(new)
        directory.filled(new)
        _last_first(directory.ordered, run)
        for tier in self._tiers:
            if not tier.on_evict:
                self._spill(new, tier)
                directory.tiers[tier.number].order.ordered(run)
        if new:
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self._on_evict:
            entries = self.directory.next_out()
            for tier in self._on_evict:
                self._spill(entries, tier)

    def _spill(self, entries: Iterable[Entry], tier: _Tier) -> None:
        directory, unread = self.directory, tier.unread
        for entry in entries:
            victims = directory.spill_begun(entry, tier.number)
            if victims is None:
                continue
            directory.tiers[tier.number].deleted(victims)
            for victim in victims:
                if victim in unread:
                    unread.discard(victim)
                    self._counts[f"{tier.name}_unread"] += 1
            directory.spill_ended(entry, tier.number, stored=True)
            unread.add(entry.key)
            self._counts[f"{tier.name}_writes"] += 1

    def _follow(self) -> None:
        while self._follower.work(lambda: None):
            pass

    def result(self) -> Result:
        counts = self._counts
        return Result(
            counts["requests"],
            counts["asked"],
            counts["ram"],
            counts["nvme"],
            counts["nvme_writes"],
            counts["nvme_unread"],
            self.directory.evicted_unoffered if self._on_evict else 0,
            counts["refused"],
            self._adaptive.counts() if self._adaptive else {},
            counts["redis"],
            counts["redis_writes"],
            counts["redis_unread"],
            self._asked,
            self._saved,
        )


def _last_first(
    note: Callable[[Sequence[ChunkKey]], object], run: Sequence[ChunkKey], size: int = PIECE_CHUNKS
) -> None:
    """In the pieces in which a Store tells its index of a run."""
    for part in reversed(list(pieces(run, size))):
        note(part)


def simulate(
    trace: Iterable[Request], cache: Cache, tell: Callable[[int], object] = lambda requests: None
) -> Result:
    for number, request in enumerate(trace, 1):
        cache.serve(request)
        tell(number)
    return cache.result()


def unique(trace: Iterable[Request]) -> int:
    """Number of different chunks: the room for all of them."""
    return len({key for request in trace for key in request.run})


def unhinted(trace: Iterable[Request]) -> list[Request]:
    return [request._replace(hint=NO_HINT) for request in trace]


def oracle(trace: Sequence[Request], cover: float = 1.0, wrong: float = 0.0) -> list[Request]:
    """The requests with hints that know the future: after the last request of a session comes the
    hint that it is over.

    Args:
        cover: the part of the sessions that give the hint.
        wrong: the part of the other requests, after which a session goes on, that give it too.
    """
    sessions, draw = Sessions(_ALL), random.Random(1)
    turns: dict[int, list[int]] = {}
    for at, request in enumerate(trace):
        if request.run:
            turns.setdefault(sessions.seen(request.run, request.session), []).append(at)
    said = set[int]()
    for own in turns.values():
        said.update(at for at in own[:-1] if draw.random() < wrong)
        if draw.random() < cover:
            said.add(own[-1])
    return [
        request._replace(hint=OVER if at in said else NO_HINT) for at, request in enumerate(trace)
    ]


_NEVER = 1 << 60


def belady(trace: Sequence[Request], slots: int, saves: SavedCompute = TYPICAL) -> Result:
    """Hits with room for ``slots`` chunks, all in RAM, and what they spare. Chunks that will never
    be used again are not taken. It is the optimum of hits, and not of what they spare."""
    after = _next_uses(trace)
    held: dict[ChunkKey, int] = {}
    leaving: list[tuple[int, int, ChunkKey]] = []
    hits, saved = 0, 0.0
    for at, request in enumerate(trace):
        run = request.run
        found = next((place for place, key in enumerate(run) if key not in held), len(run))
        hits, saved = hits + found, saved + saves.of(found)
        for place, key in enumerate(run):
            use = after[at][place]
            held.pop(key, None)
            if use < _NEVER:
                held[key] = use
                heapq.heappush(leaving, (-use, -place, key))
        while len(held) > slots:
            use, _, key = heapq.heappop(leaving)
            if held.get(key) == -use:
                del held[key]
    asked = sum(len(request.run) for request in trace)
    compute = sum(saves.of(len(request.run)) for request in trace)
    return Result(len(trace), asked, hits, 0, 0, 0, 0, 0, {}, compute=compute, saved=saved)


def _next_uses(trace: Sequence[Request]) -> list[list[int]]:
    """For each chunk of each request, the number of the next request that contains it."""
    seen: dict[ChunkKey, int] = {}
    uses: list[list[int]] = []
    for at in range(len(trace) - 1, -1, -1):
        uses.append([seen.get(key, _NEVER) for key in trace[at].run])
        seen.update(dict.fromkeys(trace[at].run, at))
    return uses[::-1]
