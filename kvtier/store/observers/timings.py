"""Timings: a histogram for each kind of work in a Store that takes time. All of them exist from the
start. Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.core.places import RAM
from kvtier.core.report import FIRST_BIT, PLACES
from kvtier.store.observer import Observer

_PER_PLACE = 1e9 / 2**FIRST_BIT
_ALL = 64 - FIRST_BIT


class Histogram:
    """Counts and sums of seconds by powers of two, cheap enough for operations that take
    microseconds. Not thread-safe: its owner guards it."""

    __slots__ = ("_counts", "_sums")

    def __init__(self) -> None:
        self._counts = [0] * _ALL
        self._sums = [0.0] * _ALL

    def add(self, seconds: float) -> None:
        place = int(seconds * _PER_PLACE).bit_length()
        self._counts[place] += 1
        self._sums[place] += seconds

    @property
    def counts(self) -> list[int]:
        """Counts by bucket, not cumulated. There is one more bucket than :data:`BOUNDS`."""
        return [*self._counts[:PLACES], sum(self._counts[PLACES:])]

    @property
    def sums(self) -> list[float]:
        """Sums of seconds by bucket."""
        return [*self._sums[:PLACES], sum(self._sums[PLACES:])]


class Timings(Observer):
    """The Store's lock guards it. ``tiers``: the names of the lower tiers."""

    __slots__ = ("_all",)

    def __init__(self, tiers: Sequence[str]) -> None:
        each = [("lookup", ""), ("load_wait", ""), ("save", "")]
        each += [("load", place) for place in (RAM, *tiers)]
        each += [(what, tier) for what in ("promotion", "spill") for tier in tiers]
        self._all = {one: Histogram() for one in each}

    def took(self, what: str, place: str, seconds: float) -> None:
        self._all[what, place].add(seconds)

    def of(self, what: str, place: str = "") -> Histogram:
        """One of them."""
        return self._all[what, place]

    def each(self) -> Iterator[tuple[str, str, Histogram]]:
        """(what, place or "", its histogram) for each."""
        return ((*one, histogram) for one, histogram in self._all.items())
