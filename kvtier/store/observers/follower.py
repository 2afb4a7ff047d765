"""Follower: the work that prompts and hints cause in a Store later, without its lock: sessions,
shadows and the marks of hints.

Prompts and hints wait in one bounded queue, in the order in which they came. The Store's spare lane
works on them. It takes the lock for short pieces only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker
from kvtier.core.steps import pieces
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.hints import NOTHING, Hint
from kvtier.eviction.sessions import Sessions
from kvtier.eviction.what_if import Curve
from kvtier.store.directory import Directory
from kvtier.store.observer import Observer
from kvtier.store.observers.uses_since import UsesSince

_MOST_CHUNKS = 1 << 17
_MOST_WAITING = 256
_AT_ONCE = 8


class _Item(NamedTuple):
    run: Sequence[ChunkKey]
    session: str
    hint: Hint = NOTHING
    """A prompt has none."""
    number: int = 0
    """Of the hint. See :class:`kvtier.store.observers.uses_since.UsesSince`."""


class Follower(Observer):
    """One thread at a time calls :meth:`work`.

    Args:
        adaptive: RAM's policy, where it adapts.
        clock: monotonic seconds.
        rooms: the room of each place, in chunks.
        what_if: also find out what other sizes would have hit.
    """

    def __init__(
        self,
        directory: Directory,
        lock: AbstractContextManager[object],
        adaptive: Adaptive | None,
        clock: Callable[[], float],
        rooms: Mapping[str, int],
        *,
        what_if: bool = True,
    ) -> None:
        self._directory, self._lock, self._adaptive, self._clock = directory, lock, adaptive, clock
        self.on_note: Callable[[], object] = lambda: None
        """Called on any thread, without the lock, when something waits: :meth:`work` is to be
        called soon, on another thread."""
        self._uses = UsesSince(2 * sum(rooms.values()))
        directory.observers.add(self._uses)
        self._sessions = Sessions(min(2 * sum(rooms.values()), _MOST_CHUNKS))
        self.curves = {place: Curve(room) for place, room in rooms.items() if what_if}
        """What LRU caches of other sizes would have hit, by place."""
        self._waiting: deque[_Item] = deque()
        self._working = 0
        self.counts = {
            "followed_prompts": 0,
            "dropped_prompts": 0,
            "hints_followed": 0,
            "hints_over": 0,
            "hints_dropped": 0,
        }
        """Counts of prompts and hints. Those that came faster than the work are dropped.
        ``hints_over`` are those that said so of a session."""

    def prompt(self, run: Sequence[ChunkKey], asker: Asker) -> None:
        """See Observer."""
        if run and self._has_room("dropped_prompts"):
            self._waiting.append(_Item(tuple(run), asker.session))
        if self._waiting:
            self.on_note()

    def hint(self, run: Sequence[ChunkKey], session: str, hint: Hint) -> None:
        """See Observer."""
        with self._lock:
            if self._has_room("hints_dropped"):
                number = self._uses.hinted()
                self._waiting.append(_Item(tuple(run), session, hint, number))
        self.on_note()

    def counted(self) -> Mapping[str, int]:
        """See Observer."""
        adaptive = self._adaptive.counts() if self._adaptive is not None else {}
        return {**self.counts, **adaptive, "queued": self.waiting}

    @property
    def waiting(self) -> int:
        """Prompts and hints that wait, or are worked on."""
        return len(self._waiting) + self._working

    def _has_room(self, dropped: str) -> bool:
        if len(self._waiting) >= _MOST_WAITING:
            self.counts[dropped] += 1
            return False
        return True

    def work(self, pause: Callable[[], object]) -> bool:
        """Work on some of what waits, without the lock. ``pause`` is called often. True: more is
        waiting."""
        with self._lock:
            self._directory.tick(self._clock())
        self._working = 1
        for _ in range(_AT_ONCE):
            try:
                item = self._waiting.popleft()
            except IndexError:
                self._working = 0
                return False
            if item.hint != NOTHING:
                self._take(item)
                with self._lock:
                    self._uses.followed(item.number)
            elif item.run:
                self._follow(item, pause)
        self._working = 0
        return bool(self._waiting)

    def _follow(self, item: _Item, pause: Callable[[], object]) -> None:
        self.counts["followed_prompts"] += 1
        session = self._sessions.seen(item.run, item.session)
        if self._adaptive is not None:
            self._adaptive.follow(item.run, session, self._lock, pause)
        for curve in self.curves.values():
            curve.seen(item.run, session)
            pause()

    def _take(self, item: _Item) -> None:
        self.counts["hints_followed"] += 1
        run = item.run or self._sessions.last(item.session)
        if item.hint.over:
            self.counts["hints_over"] += 1
            over = list[ChunkKey]()
            # The beginning first: the end is the coldest.
            for part in pieces(self._sessions.exclusive(run)):
                with self._lock:
                    unused = self._uses.unused(part, item.number)
                    self._directory.over(unused)
                over += unused
            if self._adaptive is not None:
                self._adaptive.shadows.over(over)
        elif item.hint.keep_s:
            for part in reversed(list(pieces(run))):
                with self._lock:
                    self._directory.keep(part, item.hint.keep_s, item.hint.salt)
