"""Timings: how long a Store's walks take, a histogram each. All of them are there from the start.
Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.core.histogram import Histogram

RAM = "ram"


class Timings:
    """Guarded by the Store's lock. ``tiers``: the names of the lower ones."""

    __slots__ = ("load", "lookup", "promotion", "save", "spill", "wait")

    def __init__(self, tiers: Sequence[str]) -> None:
        self.lookup, self.wait, self.save = Histogram(), Histogram(), Histogram()
        self.load = {place: Histogram() for place in (RAM, *tiers)}
        self.promotion = {tier: Histogram() for tier in tiers}
        self.spill = {tier: Histogram() for tier in tiers}

    def each(self) -> Iterator[tuple[str, str, Histogram]]:
        """(what, tier or "", its histogram)."""
        yield from (
            ("lookup", "", self.lookup),
            ("load_wait", "", self.wait),
            ("save", "", self.save),
        )
        for what in ("load", "promotion", "spill"):
            yield from ((what, tier, histogram) for tier, histogram in getattr(self, what).items())
