"""Changes: which chunk came to which place, and which one left it, for engines and servers that
publish. Pure.

They are noted between ``watch`` and its end, and wait in one bounded list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvtier.core.chunk import ChunkKey
from kvtier.core.places import RAM_PLACE, Change
from kvtier.store.directory import Directory
from kvtier.store.entry import READY
from kvtier.store.observer import Left, Observer

_MOST = 1 << 16


class Changes(Observer):
    """A :class:`kvtier.api.Watched`. One thread asks. ``lock`` is the Store's.

    Args:
        place_names: RAM's name and the tiers', in the order of the places.
        most: how many changes wait. Beyond that all of them are lost, and their reader learns
            that.
    """

    def __init__(
        self,
        directory: Directory,
        lock: AbstractContextManager[object],
        place_names: list[str],
        most: int = _MOST,
    ) -> None:
        self.place_names = place_names
        self._directory, self._lock, self._most = directory, lock, most
        self._waiting: list[Change] = []
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
        if len(self._waiting) >= self._most:
            self._waiting, self._lost = [], True
        if not self._lost:
            self._waiting.append(change)

    @property
    def has_changes(self) -> bool:
        return self._lost or bool(self._waiting)

    def changes(self) -> list[Change] | None:
        if not self.has_changes:
            return []
        with self._lock:
            taken, lost = self._waiting, self._lost
            self._waiting, self._lost = [], False
        return None if lost else taken

    def places(self, keys: Sequence[ChunkKey]) -> list[list[int]]:
        with self._lock:
            return [self._places(key) for key in keys]

    def _places(self, key: ChunkKey) -> list[int]:
        entry = self._directory.get(key)
        ready = entry is not None and entry.state is READY
        return [RAM_PLACE] * ready + [1 + index for index in self._directory.holders(key)]

    def announce(self, key: ChunkKey, place: int, event: Mapping[str, Any]) -> None:
        """See Watched. Its engine alone publishes."""

    def end(self) -> None:
        """Changes are not noted any more."""
        with self._lock:
            self._directory.observers.remove(self)
