"""Follower: work that prompts and hints cause in a Store later, without its lock: sessions, shadows
and the marks of hints.

Prompts and hints wait in one bounded queue, in the order in which they came. The Store's spare lane
works on them. It takes the lock for short pieces only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker
from kvtier.core.steps import Steps, pieces
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.hints import NO_HINT, Hint
from kvtier.eviction.sessions import Sessions
from kvtier.eviction.what_if import Curve, Point
from kvtier.store.directory import Directory
from kvtier.store.observer import Observer

_MOST_CHUNKS = 1 << 17
_WAITING_NOTES = 256
_TURN_NOTES = 8
_READ_WITHIN_S = 600.0


class UsesSince(Observer):
    """Record of up to ``most`` chunks that were used or saved after a hint came and before it was
    followed. Hints are followed in the order in which they came. Under the Store's lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last_use: dict[ChunkKey, int] = {}
        """Chunk -> number of the newest hint at its last use."""
        self._came = self._followed = 0
        """Numbers of the newest hint, and of the last one that was followed."""
        self._lost = 0
        """Number of the newest hint for which too many chunks were used to remember them."""

    def hinted(self) -> int:
        self._came += 1
        return self._came

    def used(self, run: Sequence[ChunkKey]) -> None:
        if self._followed == self._came:
            return
        self._last_use.update(dict.fromkeys(run, self._came))
        if len(self._last_use) > self._most:
            self._last_use.clear()
            self._lost = self._came

    stored = used

    def unused(self, run: Sequence[ChunkKey], hint: int) -> list[ChunkKey]:
        """Return the chunks of ``run`` not used since this hint; none if they were forgotten."""
        if hint <= self._lost:
            return []
        return [key for key in run if self._last_use.get(key, 0) < hint]

    def followed(self, hint: int) -> None:
        self._followed = hint
        if hint == self._came:
            self._last_use.clear()


class _Item(NamedTuple):
    run: Sequence[ChunkKey]
    session: str
    hint: Hint = NO_HINT
    """Hint of a client, or :data:`NO_HINT` for a prompt."""
    number: int = 0
    """Number of the hint in :class:`UsesSince`."""
    at: float = 0.0


class Follower(Observer):
    """Queue of prompts and hints. One thread at a time calls :meth:`work`. ``adaptive``: RAM's
    policy, if it adapts. ``rooms``: of each place, in chunks."""

    def __init__(
        self,
        directory: Directory,
        lock: AbstractContextManager[object],
        adaptive: Adaptive | None,
        clock: Callable[[], float],
        rooms: Mapping[str, int],
    ) -> None:
        self._directory, self._lock, self._clock = directory, lock, clock
        self.adaptive = adaptive
        self.on_note: Callable[[], object] = lambda: None
        """Called on any thread, without the lock, when :meth:`work` is due on another."""
        self._uses = UsesSince(2 * sum(rooms.values()))
        directory.observers.add(self._uses)
        self._sessions = Sessions(min(2 * sum(rooms.values()), _MOST_CHUNKS))
        self._rooms = dict(rooms)
        self._curves = dict[str, Curve]()
        """Place -> its curve. Empty while nobody reads them."""
        self._read_at = -math.inf
        self._waiting: deque[_Item] = deque()
        self._working = 0
        self.counts = {
            "followed_prompts": 0,
            "dropped_prompts": 0,
            "hints_followed": 0,
            "hints_over": 0,
            "hints_dropped": 0,
        }
        """Counts of prompts and hints; ``hints_over`` called a session over."""

    def prompt(self, run: Sequence[ChunkKey], asker: Asker) -> None:
        if run and self._has_room("dropped_prompts"):
            self._waiting.append(_Item(tuple(run), asker.session, at=self._clock()))
        if self._waiting:
            self.on_note()

    def hint(self, run: Sequence[ChunkKey], session: str, hint: Hint) -> None:
        with self._lock:
            if self._has_room("hints_dropped"):
                number = self._uses.hinted()
                self._waiting.append(_Item(tuple(run), session, hint, number))
        self.on_note()

    def counted(self) -> Mapping[str, int]:
        adaptive = self.adaptive.counts() if self.adaptive is not None else {}
        return {**self.counts, **adaptive, "queued": self.waiting}

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._working

    def _has_room(self, dropped: str) -> bool:
        if len(self._waiting) >= _WAITING_NOTES:
            self.counts[dropped] += 1
            return False
        return True

    def work(self, pause: Callable[[], object]) -> bool:
        """Follow some of what waits, without the lock, with pauses. Returns whether more waits."""
        with self._lock:
            self._directory.tick(self._clock())
        self._working = 1
        for _ in range(_TURN_NOTES):
            try:
                item = self._waiting.popleft()
            except IndexError:
                self._working = 0
                return False
            if item.hint != NO_HINT:
                for _ in self._taking(item):
                    pause()
                with self._lock:
                    self._uses.followed(item.number)
                self.counts["hints_followed"] += 1
            elif item.run:
                for _ in self._following(item):
                    pause()
                self.counts["followed_prompts"] += 1
        self._working = 0
        return bool(self._waiting)

    def _following(self, item: _Item) -> Steps[None]:
        session = yield from self._sessions.seen.steps(item.run, item.session)
        if self.adaptive is not None:
            yield from self.adaptive.following(item.run, session, self._lock)
        yield from self._what_if(item, session)

    def _what_if(self, item: _Item, session: int) -> Steps[None]:
        if item.at - self._read_at > _READ_WITHIN_S:
            self._curves = {}
            return
        if not self._curves:
            self._curves = {place: Curve(room) for place, room in self._rooms.items()}
        for curve in self._curves.values():
            yield from curve.seen.steps(item.run, session)

    def read_curve(self, place: str) -> list[Point]:
        """Return the hits that LRU caches of other sizes would have had since reading began:
        prompts are counted only while this is called every ten minutes. Any thread."""
        self._read_at = self._clock()
        curve = self._curves.get(place)
        return [] if curve is None else curve.points()

    def _taking(self, item: _Item) -> Steps[None]:
        run = item.run or self._sessions.last(item.session)
        if item.hint.over:
            over = list[ChunkKey]()
            # From the beginning on, so that the end becomes the coldest.
            for part in self._sessions.exclusive(run):
                with self._lock:
                    unused = self._uses.unused(part, item.number)
                    self._directory.over(unused)
                over += unused
                yield 0.0
            if self.adaptive is not None:
                yield from self.adaptive.over(over)
            self.counts["hints_over"] += 1
        elif item.hint.keep_s:
            for kept in reversed(list(pieces(run))):
                with self._lock:
                    self._directory.keep(kept, item.hint.keep_s, item.hint.salt)
                yield 0.0
