"""Changes: which chunks came to which place, and which left it, for engines and servers that
publish. Pure.

Each reader has a bounded list of its own. One that asks too seldom is told that it lost some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import RAM_PLACE, Change
from kvtier.store.directory import Directory
from kvtier.store.entry import READY
from kvtier.store.observer import Left, Observer

_WAITING_CHANGES = 1 << 16


class Changes(Observer):
    """The :class:`kvtier.api.Watched` of a Store, for one thread. ``lock`` is the Store's.

    Args:
        place_names: RAM's name and the tiers', in the order of the places.
        named_only: note only chunks that :meth:`name` or :meth:`find` was given. A session that
            names a key has the chunk's tokens, so no engine learns of another tenant's chunks."""

    def __init__(
        self,
        directory: Directory,
        lock: AbstractContextManager[object],
        place_names: list[str],
        *,
        named_only: bool = False,
    ) -> None:
        self.place_names = place_names
        self._directory, self._lock = directory, lock
        self._named: dict[ChunkKey, int] | None = {} if named_only else None
        """Places, as bits, of named chunks that are held or being filled: the Store bounds them."""
        self._waiting = deque[Change]()
        self._lost = False
        with lock:
            directory.observers.add(self)

    def came(self, place: int, key: ChunkKey) -> None:
        """See Observer. A chunk that comes to RAM is told again in each tier that holds it: the
        reader may know the chunk only since it was saved again."""
        self._note(Change(place, key, there=True))
        for index in self._directory.holders(key) if place == RAM_PLACE else ():
            self._note(Change(1 + index, key, there=True))

    def left(self, place: int, key: ChunkKey, how: Left) -> None:
        self._note(Change(place, key, there=False))

    def _note(self, change: Change) -> None:
        place, key, there = change
        if self._named is not None:
            bits = self._named.get(key)
            if bits is None:
                return
            bits = bits | 1 << place if there else bits & ~(1 << place)
            self._named[key] = bits
            if not there and not bits:
                del self._named[key]
        if len(self._waiting) < _WAITING_CHANGES:
            self._waiting.append(change)
            return
        self._lost = True
        self._waiting.clear()
        if self._named is not None:  # what is named again is told again
            self._named.clear()

    @property
    def has_changes(self) -> bool:
        return self._lost or bool(self._waiting)

    def changes(self, most: int = _WAITING_CHANGES) -> list[Change] | None:
        """See Watched. At most ``most`` changes are returned."""
        if not self.has_changes:
            return []
        with self._lock:
            if self._lost:
                self._lost = False
                return None
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def places(self, keys: Sequence[ChunkKey]) -> list[list[int]]:
        with self._lock:
            return [self._places(key) for key in keys]

    def _places(self, key: ChunkKey) -> list[int]:
        entry = self._directory.get(key)
        ready = entry is not None and entry.state is READY
        return [RAM_PLACE] * ready + [1 + index for index in self._directory.holders(key)]

    def announce(self, key: ChunkKey, place: int, event: Mapping[str, Any]) -> None:
        """Ignore events of an engine: it publishes them itself."""

    def end(self) -> None:
        """Stop noting changes."""
        with self._lock:
            self._directory.observers.remove(self)

    # ---- only named chunks -----------------------------------------------------------------------

    def name(self, keys: Iterable[ChunkKey]) -> None:
        """Note changes of these chunks from now on."""
        assert self._named is not None
        with self._lock:
            for key in keys:
                self._named.setdefault(key, 0)

    def unname(self, keys: Iterable[ChunkKey]) -> None:
        """Stop noting changes of those of these chunks that are in no place."""
        assert self._named is not None
        with self._lock:
            for key in keys:
                if self._named.get(key) == 0:
                    del self._named[key]

    def find(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the places, as bits, of the leading held chunks, whose changes are noted now."""
        assert self._named is not None
        with self._lock:
            held = takewhile(bool, map(self._places, keys))
            found = [sum(1 << place for place in places) for places in held]
            self._named.update(zip(keys, found, strict=False))
        return found
