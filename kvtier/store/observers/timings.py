"""Timings: a histogram for each kind of work in a Store that takes time. All of them exist from the
start. Pure: no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.core.histogram import Histogram

RAM = "ram"


class Timings:
    """The Store's lock guards it. ``tiers``: the names of the lower tiers."""

    __slots__ = ("load", "lookup", "promotion", "save", "spill", "wait")

    def __init__(self, tiers: Sequence[str]) -> None:
        self.lookup, self.wait, self.save = Histogram(), Histogram(), Histogram()
        self.load = {place: Histogram() for place in (RAM, *tiers)}
        self.promotion = {tier: Histogram() for tier in tiers}
        self.spill = {tier: Histogram() for tier in tiers}

    def each(self) -> Iterator[tuple[str, str, Histogram]]:
        """(what, tier or "", its histogram) for each."""
        yield from (
            ("lookup", "", self.lookup),
            ("load_wait", "", self.wait),
            ("save", "", self.save),
        )
        for what in ("load", "promotion", "spill"):
            yield from ((what, tier, histogram) for tier, histogram in getattr(self, what).items())
