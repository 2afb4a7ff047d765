"""Curve: what an LRU cache of other sizes would have hit, for all sizes at once and exactly. Pure.

One list of chunks by recency, as long as the largest size, is cut at each size. An LRU of any size
holds the front of that list (Mattson, Gecsei, Slutz, Traiger, *Evaluation techniques for storage
hierarchies*, IBM Systems Journal 9(2), 1970). A chunk that is used moves to the front, and at each
cut that it passes one other chunk moves back. Nothing walks over the list.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import Steps, pieces, whole

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_MOST_KEYS = 100_000
_GROUPS = 8
_LEAST_GROUPS = 2
_AT_ONCE = 32
"""Chunks that move at once: each may move one at every cut."""


class Point(NamedTuple):
    """What one size would have hit."""

    scale: float
    """The size, as a multiple of the present size."""
    ratio: float
    """The part of the chunks asked for that would have been hits."""
    error: float
    """The standard error of the ratio, estimated from the sample. 0 when all sessions were
    followed."""


class Curve:
    """For a place with room for ``room`` chunks. Used by one thread at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.part = min(1.0, _MOST_KEYS / max(1.0, room * max(SCALES)))
        """The part of the sessions that is followed."""
        cuts = [0, *(max(1, int(room * scale * self.part)) for scale in SCALES)]
        self._rooms = [larger - smaller for smaller, larger in pairwise(cuts)]
        self._bands: list[OrderedDict[ChunkKey, None]] = [OrderedDict() for _ in SCALES]
        """The chunks between two cuts, coldest first."""
        self._asked = [0] * _GROUPS
        self._hits = [[0] * len(SCALES) for _ in range(_GROUPS)]

    def seen(self, run: Sequence[ChunkKey], session: int) -> None:
        """A prompt of this session asked for ``run``. Then all of it is stored."""
        whole(self.seeing(run, session))

    def seeing(self, run: Sequence[ChunkKey], session: int) -> Steps[None]:
        """:meth:`seen` in pieces."""
        if self.part < 1 and session * 0.7548776662466927 % 1.0 >= self.part:
            return
        hits, bands = self._hits[session % _GROUPS], self._bands
        self._asked[session % _GROUPS] += len(run)
        deepest, counts = 0, [0] * len(bands)
        for part in pieces(run):
            for key in part:
                while deepest < len(bands) and key not in bands[deepest]:
                    if any(key in bands[band] for band in range(deepest)):
                        break
                    deepest += 1
                if deepest == len(bands):
                    break
                counts[deepest] += 1
            yield 0.0
            if deepest == len(bands):
                break
        total = 0
        for band, count in enumerate(counts):
            total += count
            hits[band] += total
        for part in reversed(list(pieces(run, _AT_ONCE))):
            self._use(part)
            yield 0.0

    def _use(self, run: Sequence[ChunkKey]) -> None:
        """Move a part of a run to the front, its first chunk foremost. At each cut as many chunks
        move back as came from behind it."""
        bands = self._bands
        own = frozenset(run)
        for keys in bands:
            for key in keys.keys() & own:
                del keys[key]
        bands[0].update(dict.fromkeys(reversed(run)))
        for band, keys in enumerate(bands):
            beyond, following = (
                len(keys) - self._rooms[band],
                bands[band + 1] if band + 1 < len(bands) else None,
            )
            for _ in range(beyond):
                moved, _ = keys.popitem(last=False)
                if following is not None:
                    following[moved] = None

    def points(self) -> list[Point]:
        """The curve of what has been seen so far. Empty before a chunk was asked for."""
        asked = sum(self._asked)
        if not asked:
            return []
        return [
            Point(scale, sum(hits) / asked, self._error(hits))
            for scale, hits in zip(SCALES, self._by_scale(), strict=True)
        ]

    def _by_scale(self) -> list[list[int]]:
        return [list(hits) for hits in zip(*self._hits, strict=True)]

    def _error(self, hits: Sequence[int]) -> float:
        """The standard error of the mean of the groups of sessions."""
        ratios = [each / asked for each, asked in zip(hits, self._asked, strict=True) if asked]
        if self.part == 1 or len(ratios) < _LEAST_GROUPS:
            return 0.0
        mean = sum(ratios) / len(ratios)
        return math.sqrt(
            sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1) / len(ratios)
        )
