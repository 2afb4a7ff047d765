"""Curve: what an LRU cache of other sizes would have hit, all of them at once and exactly. Pure.

One list of chunks by recency, as long as the largest size, is cut at each size (Mattson, Gecsei, Slutz, Traiger,
*Evaluation techniques for storage hierarchies*, IBM Systems Journal 9(2), 1970: an LRU of any size holds the front of
it). A chunk that is used moves to the front, and one chunk crosses each cut that it came from beyond. No walk.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_MOST_KEYS = 100_000
_GROUPS = 8
_LEAST_GROUPS = 2


class Point(NamedTuple):
    """One size."""

    scale: float
    """As a multiple of the size there is."""
    ratio: float
    """The part of the chunks asked for that would have been hits."""
    error: float
    """The standard error of the ratio, from the sample; 0 where nothing was left out."""


class Curve:
    """Of a place with room for ``room`` chunks. One thread at a time."""

    def __init__(self, room: int, scales: Sequence[float] = SCALES) -> None:
        self.room, self.scales = room, tuple(scales)
        self.part = min(1.0, _MOST_KEYS / max(1.0, room * max(scales)))
        """Of the sessions, the part that is followed."""
        cuts = [0, *(max(1, int(room * scale * self.part)) for scale in scales)]
        self._rooms = [larger - smaller for smaller, larger in pairwise(cuts)]
        self._bands: list[OrderedDict[ChunkKey, None]] = [OrderedDict() for _ in scales]
        """What lies between two cuts, coldest first."""
        self._asked = [0] * _GROUPS
        self._hits = [[0] * len(scales) for _ in range(_GROUPS)]

    def seen(self, run: Sequence[ChunkKey], session: int) -> None:
        """A prompt of this session asked for ``run``; then all of it is stored."""
        if self.part < 1 and session * 0.7548776662466927 % 1.0 >= self.part:
            return
        hits, deepest, last = self._hits[session % _GROUPS], 0, len(self._bands) - 1
        self._asked[session % _GROUPS] += len(run)
        counts = [0] * (last + 1)
        for key in run:
            band = self._band(key)
            deepest = max(deepest, band)
            if deepest > last:
                break
            counts[deepest] += 1
        total = 0
        for band, count in enumerate(counts):
            total += count
            hits[band] += total
        for key in reversed(run):
            self._use(key)

    def _band(self, key: ChunkKey) -> int:
        for band, keys in enumerate(self._bands):
            if key in keys:
                return band
        return len(self._bands)

    def _use(self, key: ChunkKey) -> None:
        bands, rooms = self._bands, self._rooms
        at = self._band(key)
        if at < len(bands):
            del bands[at][key]
        bands[0][key] = None
        for band in range(min(at, len(bands))):
            if len(bands[band]) <= rooms[band]:
                return
            moved, _ = bands[band].popitem(last=False)
            if band + 1 < len(bands):
                bands[band + 1][moved] = None

    def points(self) -> list[Point]:
        """What has been seen so far; nothing before a chunk was asked for."""
        asked = sum(self._asked)
        if not asked:
            return []
        return [
            Point(scale, sum(hits) / asked, self._error(hits))
            for scale, hits in zip(self.scales, self._by_scale(), strict=True)
        ]

    def _by_scale(self) -> list[list[int]]:
        return [list(hits) for hits in zip(*self._hits, strict=True)]

    def _error(self, hits: Sequence[int]) -> float:
        """Of the mean of the groups of sessions."""
        ratios = [each / asked for each, asked in zip(hits, self._asked, strict=True) if asked]
        if self.part == 1 or len(ratios) < _LEAST_GROUPS:
            return 0.0
        mean = sum(ratios) / len(ratios)
        return math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1) / len(ratios))
