"""Curve: what an LRU cache of each size would have hit of recorded requests, and from which size on
more room adds little. Exact for every size, from one pass (Mattson, Gecsei, Slutz, Traiger,
*Evaluation techniques for storage hierarchies*, IBM Systems Journal 9(2), 1970). Pure.

A running server asks :mod:`kvtier.eviction.what_if` for a few sizes. This needs the whole trace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import NamedTuple

from kvtier.bench.traces.formats import FORMS, read
from kvtier.bench.traces.mooncake import Request
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text

POINT = 0.01
"""A percentage point of hits."""
_BEND = 0.05
"""A curve that is nowhere so much above a straight line to its end has no knee."""


class Curve:
    def __init__(self, trace: Sequence[Request]) -> None:
        self.requests = len(trace)
        self.asked = sum(len(request.run) for request in trace)
        needed, self.unique = _needed(request.run for request in trace)
        self._sizes = sorted(needed)
        self._hits = list(accumulate(needed[size] for size in self._sizes))

    @property
    def largest(self) -> int:
        """The smallest size that hits all that can be hit."""
        return self._sizes[-1] if self._sizes else 0

    def ratio(self, size: int) -> float:
        """The part of the chunks asked for that an LRU of this size hits."""
        at = bisect_right(self._sizes, size)
        return self._hits[at - 1] / self.asked if at else 0.0

    def knee(self, above: int = 0) -> int:
        """The size from which on more room adds the least for its size, of the part of the curve
        ``above`` a size.

        It is where the curve is farthest above the straight line between its ends (Satopää,
        Albrecht, Irwin, Raghavan, *Finding a "Kneedle" in a Haystack*, ICDCS Workshops 2011). A
        part that is about straight, or bends upwards, has its knee at its end. 0: nothing is
        above.
        """
        begin = bisect_right(self._sizes, above)
        sizes, hits = self._sizes[begin:], self._hits[begin:]
        if not sizes:
            return 0
        base = self._hits[begin - 1] if begin else 0
        wide, high = sizes[-1] - above, hits[-1] - base
        over, size = max(
            ((count - base) / high - (size - above) / wide, -size)
            for size, count in zip(sizes, hits, strict=True)
        )
        return -size if over > _BEND else sizes[-1]

    def enough(self, limit: int, above: int = 0) -> int:
        """The smallest size of at most ``limit`` that hits within a point of the knee, or of the
        limit where that is less. 0: it would add less than a point to what ``above`` hits."""
        least = self.ratio(min(limit, self.knee(above))) - POINT
        if least <= 0:
            return 0
        size = self._sizes[bisect_left(self._hits, ceil(least * self.asked))]
        return 0 if above and self.ratio(size) < self.ratio(above) + POINT else size


def _needed(runs: Iterable[Sequence[ChunkKey]]) -> tuple[Counter[int], int]:
    """Number of chunks by the size of LRU that makes them hits, and number of chunks. A chunk
    is a hit with those before it in its prompt only."""
    recency, needed = _Recency(), Counter[int]()
    for run in runs:
        size = 0
        for key in run:
            depth = recency.depth(key)
            if depth is None:
                break
            size = max(size, depth)
            needed[size] += 1
        recency.use(run)
    return needed, len(recency)


class _Recency:
    """Chunks by their last use. A Fenwick tree counts those that were used after another one."""

    def __init__(self) -> None:
        self._places: dict[ChunkKey, int] = {}
        self._tree = [0, 0]
        self._next = 1

    def __len__(self) -> int:
        return len(self._places)

    def depth(self, key: ChunkKey) -> int | None:
        """Which one in the list of chunks it is, the hottest being 1. None: it is new."""
        place = self._places.get(key)
        if place is None:
            return None
        tree, colder, place = self._tree, 0, place - 1
        while place:
            colder += tree[place]
            place &= place - 1
        return len(self._places) - colder

    def use(self, run: Sequence[ChunkKey]) -> None:
        """Move the whole run to the front, its first chunk foremost."""
        own = dict.fromkeys(reversed(run))
        for key in own:
            if key in self._places:
                self._add(self._places.pop(key), -1)
        if self._next + len(own) > len(self._tree):
            self._renumber(len(own))
        for key in own:
            self._places[key] = self._next
            self._add(self._next, 1)
            self._next += 1

    def _add(self, place: int, count: int) -> None:
        tree, end = self._tree, len(self._tree)
        while place < end:
            tree[place] += count
            place += place & -place

    def _renumber(self, more: int) -> None:
        held = len(self._places)
        for place, key in enumerate(self._places, 1):
            self._places[key] = place
        tree = [0] + [1] * held + [0] * (held + more + 1)
        for place in range(1, len(tree)):
            parent = place + (place & -place)
            if parent < len(tree):
                tree[parent] += tree[place]
        self._tree, self._next = tree, held + 1


__all__ = ["FORMS", "Recorded", "recorded"]

_SHOWN = (1 / 4, 1 / 2, 1, 2, 4)
"""The points of the curve that a reason shows, as multiples of the size that it explains."""


class Recorded(NamedTuple):
    """Recorded requests, and what LRUs of all sizes hit of them. ``kv_bytes``: of one token."""

    name: str
    curve: Curve
    block_tokens: int

    def enough(self, kv_bytes: int, limit: int, above: int = 0) -> int:
        """The fewest bytes, at most ``limit``, that hit within a point of the knee of the curve
        above a tier of ``above`` bytes. 0: they would add less than a point to that tier."""
        block = self.block_tokens * kv_bytes
        return self.curve.enough(limit // block, above // block) * block

    def knee(self, kv_bytes: int, above: int = 0) -> int:
        """The bytes at the knee of the curve above a tier of ``above`` bytes."""
        block = self.block_tokens * kv_bytes
        return self.curve.knee(above // block) * block

    def largest(self, kv_bytes: int) -> int:
        return self.curve.largest * self.block_tokens * kv_bytes

    def percent(self, kv_bytes: int, size: int) -> str:
        return f"{self.curve.ratio(size // (self.block_tokens * kv_bytes)):.1%}"

    def why(self, kv_bytes: int, size: int) -> str:
        """The curve around this size."""
        points = [int(size * scale) for scale in _SHOWN]
        points = [each for each in points if each < self.largest(kv_bytes)]
        sizes = [*points, self.largest(kv_bytes)]
        shown = (f"{self.percent(kv_bytes, each)} with {size_text(each)}" for each in sizes)
        return f"an LRU hits {', '.join(shown)} of {self.name}"


def recorded(path: str, form: str | None) -> Recorded:
    """The requests of ``kvtier plan --trace``. Raises ConfigError for a file that is no trace of
    prompts."""
    trace = read(path, form)
    curve = Curve(trace.requests)
    if not trace.block_tokens or not curve.asked:
        what = "has no full block" if trace.block_tokens else "counts objects and no tokens"
        raise ConfigError(
            f"--trace {path}: this {trace.form} trace {what}, so that its bytes are not known: "
            "give a trace of prompts (Mooncake, Bailian, kv-cache-tester)"
        )
    return Recorded(Path(path).name, curve, trace.block_tokens)
