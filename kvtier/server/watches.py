"""Watches: what a Store's sessions are told of its chunks, for engines that tell routers. Pure.

A session is told only of chunks that it has named itself, by their keys. A session that names a key
has the tokens of the chunk. So no engine learns of another tenant's chunks, and chunks without an
owner are told as well.

Changes of the Store are given out when a session asks. While no session watches, the Store notes
nothing. A session that asks too seldom loses its changes, and is told so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from kvtier.api import Watched
from kvtier.core.chunk import ChunkKey
from kvtier.core.places import Change
from kvtier.core.steps import AT_ONCE, Steps
from kvtier.store.observers.changes import Changes

if TYPE_CHECKING:
    from kvtier.store.store import Store


_MOST_WAITING = 1 << 16
"""Of one session."""


class Watch:
    """Chunks that one session has named, and their changes that it has not been told of."""

    def __init__(self, store: Watched) -> None:
        self._store = store
        self._named: dict[ChunkKey, int] = {}
        """Of each chunk the places, as bits, that the session was told and that are not withdrawn
        yet: the Store may be ahead of that. Bounded by its room, because they are held or being
        filled."""
        self._waiting: deque[Change] = deque()
        self._lost = False

    @property
    def waits(self) -> bool:
        return self._lost or bool(self._waiting)

    def name(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._named.setdefault(key, 0)

    def unname(self, keys: Iterable[ChunkKey]) -> None:
        """Forget those of which nothing is told."""
        for key in keys:
            if self._named.get(key) == 0:
                del self._named[key]

    def find(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Places of the leading chunks that are held, as bits. They are named from now on."""
        held = takewhile(bool, self._store.places(keys))
        found = [sum(1 << place for place in places) for places in held]
        for key, bits in zip(keys, found, strict=False):
            self._named[key] = self._named.get(key, 0) | bits
        return found

    def note(self, change: Change) -> None:
        bits = self._named.get(change.key)
        if bits is None:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self.lose()
            return
        self._waiting.append(change)
        bit = 1 << change.place
        self._named[change.key] = bits | bit if change.there else bits & ~bit
        if not change.there:
            self.unname([change.key])

    def lose(self) -> None:
        self._waiting.clear()
        self._named.clear()
        self._lost = True

    def take(self, most: int) -> list[Change] | None:
        """The next changes, in order, or None where some before them were lost."""
        if self._lost:
            self._lost = False
            return None
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]


class Watches:
    """The watches of one Store, for the server's loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._all: set[Watch] = set()
        self._watched: Changes | None = None
        self._changes: deque[Change] = deque()

    def join(self) -> Watch:
        if self._watched is None:
            self._watched = self._store.watch()
        watch = Watch(self._watched)
        self._all.add(watch)
        return watch

    def leave(self, watch: Watch) -> None:
        self._all.discard(watch)
        if not self._all and self._watched is not None:
            self._watched.end()
            self._watched = None
            self._changes.clear()

    def give_out(self) -> Steps[None]:
        changes = self._watched.changes() if self._watched is not None else []
        if changes is None:
            self._changes.clear()
            for watch in self._all:
                watch.lose()
        self._changes.extend(changes or ())
        while self._changes:
            part = list(islice(self._changes, AT_ONCE))
            for change in part:
                self._changes.popleft()
                for watch in self._all:
                    watch.note(change)
            yield 0.0
