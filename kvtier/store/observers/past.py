"""Past: why chunks are not held, and what is remembered of those that left. Pure.

It has ghosts, as 2Q's A1out (Johnson and Shasha, *2Q*, VLDB 1994).

The reasons are those of :mod:`kvtier.store.reports.miss_reasons`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.store.directory import Directory
from kvtier.store.observer import Left, Observer
from kvtier.store.reports.miss_reasons import Marks

_LEAST_PLACES, _MOST_PLACES = 1 << 15, 1 << 20


class Past(Observer):
    """Remembers twice as many departures as its Directory has room for chunks, within 256 KiB and 8
    MiB, by parts of keys, which say nothing without the tokens. The Directory's lock guards it."""

    __slots__ = ("_directory", "_marks")

    def __init__(self, directory: Directory) -> None:
        room = directory.slots.limit + sum(tier.capacity for tier in directory.tiers)
        self._directory = directory
        self._marks = Marks(min(max(2 * room, _LEAST_PLACES), _MOST_PLACES))

    def left(self, place: int, key: ChunkKey, how: Left) -> None:
        """See Observer. What one place forgets another may still have: :meth:`missing` is told when
        none has."""
        if how is not Left.FORGOTTEN:
            self._marks.put(key, how)

    def missing(self, key: ChunkKey, how: Left) -> None:
        self._marks.put(key, how)

    def why(self, key: ChunkKey) -> str:
        if self._directory.get(key) is not None:
            return "saving"
        held = next(self._directory.holders(key), None) is not None
        return "tier_down" if held else self._how(key)

    def remembered_run(self, keys: Sequence[ChunkKey]) -> int:
        """Number of leading chunks that are held, or left to make room and are remembered. By
        bisection: the end of a run leaves and is forgotten first."""
        if not keys or not self._is_remembered(keys[0]):  # most prompts that miss are new
            return 0
        return bisect_left(keys, True, key=lambda key: not self._is_remembered(key))

    def _is_remembered(self, key: ChunkKey) -> bool:
        return self._directory.held_run((key,)) == 1 or self._how(key) in {"evicted", "corrupt"}

    def _how(self, key: ChunkKey) -> str:
        mark = self._marks.get(key)
        return Left(mark).name.lower() if mark else "cold"
