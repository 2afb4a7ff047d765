"""Curve: what an LRU cache of other sizes would have hit, for all sizes at once and exactly. Pure.

One list of chunks by recency, as long as the largest size, is cut at each size. An LRU of any size
holds the front of that list (Mattson, Gecsei, Slutz, Traiger, *Evaluation techniques for storage
hierarchies*, IBM Systems Journal 9(2), 1970). A place in the list is a number that grows with each
use, so a chunk that is used moves by getting the next number, and nothing else moves. A cut is a
number too: it grows past as many chunks as came from behind it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import neg
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import PIECE_CHUNKS, Steps, in_pieces, pieces

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_MOST_KEYS = 100_000
_GROUPS = 8
_LEAST_GROUPS = 2
_NOWHERE = -1
_SPARE_PLACES, _SWEPT_PLACES = 4096, 4
"""Places without a chunk that are left alone, and places swept for each new chunk beyond."""


class Point(NamedTuple):
    scale: float
    """The size, as a multiple of the present size."""
    ratio: float
    """Part of the chunks asked for that would have been hits."""
    error: float
    """Standard error of the ratio, estimated from the sample. 0 when all sessions were followed."""


class Curve:
    """Hit ratios of other sizes of a place with room for ``room`` chunks. One thread at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.part = min(1.0, _MOST_KEYS / max(1.0, room * max(SCALES)))
        """Part of the sessions that is followed."""
        self._sizes = [max(1, int(room * scale * self.part)) for scale in SCALES]
        self._places: dict[ChunkKey, int] = {}
        """Chunk -> its place in the list, whose front is the largest place."""
        self._keys: list[ChunkKey | None] = []
        """Place -> its chunk, or None where it was used again, or left."""
        self._taken = bytearray()
        """Place -> 1 if it has a chunk, else 0."""
        self._cuts = [0] * len(SCALES)
        """For each size, the lowest place that it holds."""
        self._counts = [0] * len(SCALES)
        self._sweep: tuple[int, int] | None = None
        """Progress of :meth:`_move_together`: places below the first number have chunks, and those
        from there to the second have none. None if no sweep is under way."""
        self._asked = [0] * _GROUPS
        self._hits = [[0] * len(SCALES) for _ in range(_GROUPS)]

    @in_pieces
    def seen(self, run: Sequence[ChunkKey], session: int) -> Steps[None]:
        """Count a prompt of this session, which asked for ``run``. Then all of it is stored."""
        if self.part < 1 and session * 0.7548776662466927 % 1.0 >= self.part:
            return
        hits, lowest = self._hits[session % _GROUPS], len(self._keys)
        self._asked[session % _GROUPS] += len(run)
        for part in pieces(run):
            lowest = self._look(part, lowest, hits)
            if len(part) == PIECE_CHUNKS:
                yield 0.0
            if lowest < self._cuts[-1]:
                break
        for part in reversed(list(pieces(run))):
            self._use(list(dict.fromkeys(part)))
            yield 0.0

    def _look(self, part: Sequence[ChunkKey], lowest: int, hits: list[int]) -> int:
        """Count each size's hits in a part of a run. ``lowest``: the lowest place before it in the
        run, as nothing is hit behind a miss. Returns that place with this part."""
        found = map(self._places.get, part, repeat(_NOWHERE))
        lows = list(accumulate(found, min, initial=lowest))
        first, last = lows[1], lows[-1]
        for number, cut in enumerate(self._cuts):
            if last >= cut:
                hits[number] += len(part)
            elif first >= cut:
                hits[number] += bisect_right(lows, -cut, lo=1, key=neg) - 1
        return last

    def _use(self, run: list[ChunkKey]) -> None:
        """Move a part of a run to the front, its first chunk foremost."""
        places, keys, taken = self._places, self._keys, self._taken
        before = sorted(map(places.get, run, repeat(_NOWHERE)))
        for place in before[bisect_left(before, 0) :]:
            taken[place], keys[place] = 0, None
        run.reverse()
        places.update(zip(run, range(len(keys), len(keys) + len(run)), strict=True))
        keys += run
        taken += b"\1" * len(run)
        for number, size in enumerate(self._sizes):
            self._counts[number] += bisect_left(before, self._cuts[number])
            if self._counts[number] > size:
                self._cut(number, self._counts[number] - size)
        if self._sweep is None and len(keys) > 2 * len(places) + _SPARE_PLACES:
            self._sweep = 0, 0
        if self._sweep is not None:
            self._move_together(*self._sweep, _SWEPT_PLACES * (1 + len(run)))

    def _cut(self, number: int, count: int) -> None:
        first, taken = self._cuts[number], self._taken
        self._counts[number] -= count
        place = first
        while count:
            begin = taken.find(1, place)
            place = begin + count
            count -= taken.count(1, begin, place)
        self._cuts[number] = place
        if number == len(self._cuts) - 1:
            for key in self._keys[first:place]:
                if key is not None:
                    del self._places[key]
            self._keys[first:place] = [None] * (place - first)
            taken[first:place] = bytes(place - first)

    def _move_together(self, to: int, first: int, count: int) -> None:
        """Move the chunks of ``count`` places from ``first`` on down to ``to`` and following."""
        keys, taken, places = self._keys, self._taken, self._places
        end = min(first + count, len(keys))
        new = [*accumulate(taken[first:end], initial=to)]
        self._cuts = [new[cut - first] if first <= cut < end else cut for cut in self._cuts]
        moved = [key for key in keys[first:end] if key is not None]
        keys[first:end] = [None] * (end - first)
        taken[first:end] = bytes(end - first)
        places.update(zip(moved, range(to, to + len(moved)), strict=True))
        keys[to : to + len(moved)] = moved
        taken[to : to + len(moved)] = b"\1" * len(moved)
        to += len(moved)
        self._sweep = to, end
        if end == len(keys):
            del keys[to:], taken[to:]
            self._cuts = [min(cut, to) for cut in self._cuts]
            self._sweep = None

    def points(self) -> list[Point]:
        """Return a point for each size, or none before a chunk was asked for."""
        asked = sum(self._asked)
        if not asked:
            return []
        return [
            Point(scale, sum(hits) / asked, self._error(hits))
            for scale, hits in zip(SCALES, zip(*self._hits, strict=True), strict=True)
        ]

    def _error(self, hits: Sequence[int]) -> float:
        """Return the standard error of the mean over the groups of sessions."""
        ratios = [each / asked for each, asked in zip(hits, self._asked, strict=True) if asked]
        if self.part == 1 or len(ratios) < _LEAST_GROUPS:
            return 0.0
        mean = sum(ratios) / len(ratios)
        return math.sqrt(
            sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1) / len(ratios)
        )
