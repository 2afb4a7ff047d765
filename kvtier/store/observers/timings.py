"""Timings: a histogram for each kind of work in a Store that takes time. All of them exist from the
start. Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.core.histogram import Histogram
from kvtier.core.places import RAM
from kvtier.store.observer import Observer


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
