"""Changes: which chunk came to which place, and which one left it, for whoever tells others. Pure.

A Directory notes them while somebody asks. They wait in one bounded list.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtier.core.chunk import ChunkKey

RAM_PLACE = 0
"""RAM. Tier ``index`` is place ``1 + index``."""
_MOST = 1 << 16


class Change(NamedTuple):
    """A chunk can be served from a place from now on (``there``), or not any more."""

    place: int
    key: ChunkKey
    there: bool


class Changes:
    """The Store's lock guards every call."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._waiting: list[Change] = []
        self._lost = False

    def note(self, place: int, key: ChunkKey, *, there: bool) -> None:
        """Nothing more is kept once ``most`` changes wait: whoever takes them learns that."""
        if len(self._waiting) >= self._most:
            self._waiting, self._lost = [], True
        if not self._lost:
            self._waiting.append(Change(place, key, there))

    @property
    def waits(self) -> bool:
        return self._lost or bool(self._waiting)

    def take(self) -> list[Change] | None:
        """All since the last call, in order. None: some were lost, so nothing told before
        holds."""
        taken, lost = self._waiting, self._lost
        self._waiting, self._lost = [], False
        return None if lost else taken
