"""Timings: how long a Store's work took, and what its hits spared an engine. Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtier.core.lookup import RAM, Served
from kvtier.core.report import FIRST_BIT, PLACES
from kvtier.eviction.saved_compute import DEFAULT_S0_TOKENS, SavedCompute
from kvtier.store.observer import Observer

_PER_S = 1e9 / 2**FIRST_BIT
_ALL_PLACES = 64 - FIRST_BIT


class Histogram:
    """Counts and sums of seconds by powers of two, cheap enough for work of microseconds. Not
    thread-safe: its owner guards it."""

    def __init__(self) -> None:
        self._counts = [0] * _ALL_PLACES
        self._sums = [0.0] * _ALL_PLACES

    def add(self, seconds: float) -> None:
        place = int(seconds * _PER_S).bit_length()
        self._counts[place] += 1
        self._sums[place] += seconds

    @property
    def counts(self) -> list[int]:
        """Counts by bucket, not cumulated, with one more bucket than :data:`BOUNDS`."""
        return [*self._counts[:PLACES], sum(self._counts[PLACES:])]

    @property
    def sums(self) -> list[float]:
        return [*self._sums[:PLACES], sum(self._sums[PLACES:])]


class Timings(Observer):
    """Histogram for each kind of work, from the start on. ``tiers``: names of the lower tiers."""

    def __init__(self, tiers: Sequence[str]) -> None:
        each = [("lookup", ""), ("load_wait", ""), ("save", "")]
        each += [("load", place) for place in (RAM, *tiers)]
        each += [(what, tier) for what in ("promotion", "spill") for tier in tiers]
        self._all = {one: Histogram() for one in each}

    def took(self, what: str, place: str, seconds: float) -> None:
        self._all[what, place].add(seconds)

    def of(self, what: str, place: str = "") -> Histogram:
        return self._all[what, place]

    def each(self) -> Iterator[tuple[str, str, Histogram]]:
        return ((*one, histogram) for one, histogram in self._all.items())


class ComputeCounts(Observer):
    """Prefill asked for and spared, in tokens at a prompt's beginning that take as long. ``s0``:
    see :func:`kvtier.eviction.saved_compute.balance`."""

    def __init__(self, s0: float = DEFAULT_S0_TOKENS) -> None:
        self._of = SavedCompute(1, s0).of
        self._asked = self._saved = 0.0

    def served(self, served: Served) -> None:
        self._asked += self._of(served.asked, served.begin)
        if served.hits:
            self._saved += self._of(sum(served.hits.values()), served.begin)

    def counted(self) -> Mapping[str, int]:
        return {"asked_compute": round(self._asked), "saved_compute": round(self._saved)}
