"""The gaps between the tokens of requests that decode, while a long request waits for its first
token. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvtier.bench.compare.calls import Step

_WORKER = "clear_connector_metadata"
"""What only a worker's half is called with, once in each step."""


@dataclass(frozen=True, slots=True)
class Window:
    """One long request, from its arrival to its first token. Times are seconds.

    Attributes:
        quiet: gaps between the tokens of the other requests before it came.
        gaps: by request, its gaps that lie in the window at least in part.
        cached: prompt tokens of the long request that were not computed.
        since: when the first of the quiet gaps began, by ``time.perf_counter``.
        began: when the long request came, by the same clock.
        spent: how long the engine was in its connector, by step of either half. Only in the engine.
    """

    quiet: Sequence[float]
    gaps: Sequence[Sequence[float]]
    ttft: float
    cached: int
    since: float = 0.0
    began: float = 0.0
    spent: Sequence[float] = ()

    @classmethod
    def of(
        cls, times: Sequence[Sequence[float]], first: int, arrival: float, ttft: float, cached: int
    ) -> Window:
        """``times``: by request, when each of its tokens came. Its tokens before the one numbered
        ``first`` do not count, because other requests were only beginning then."""
        until = arrival + ttft
        pairs = [list(pairwise(one[first:])) for one in times]
        quiet = [after - before for one in pairs for before, after in one if after <= arrival]
        gaps = [
            [after - before for before, after in one if after > arrival and before < until]
            for one in pairs
        ]
        return cls(quiet, gaps, ttft, cached)

    def of_engine(self, steps: Sequence[Step]) -> Window:
        """The same window in the engine: gaps between the ends of its steps. What a server and a
        client add is not in it. ``steps``: those of the engine's whole life."""
        ends = [one.at for one in steps if _WORKER in one.calls and one.at >= self.since]
        own = [one for one in steps if self.began < one.at <= self.began + self.ttft]
        window = Window.of([ends], 0, self.began, self.ttft, self.cached)
        return replace(window, spent=[sum(one.calls.values()) for one in own])

    @property
    def every(self) -> list[float]:
        """The gaps of all requests."""
        return [gap for one in self.gaps for gap in one]

    @property
    def quiet_gap(self) -> float:
        """The mean. A busy server sends several tokens at once, and most gaps are nothing then."""
        return statistics.fmean(self.quiet)

    @property
    def gap(self) -> float:
        return statistics.median(self.every)

    @property
    def longest(self) -> float:
        return max(self.every)

    @property
    def lost(self) -> float:
        """By how much longer a request's gaps of the window took than as many quiet ones. The mean
        over the requests."""
        quiet = self.quiet_gap
        return statistics.fmean(sum(gap - quiet for gap in one) for one in self.gaps)


@dataclass(frozen=True, slots=True)
class Pair:
    """A long request whose document was loaded, and then one whose document was in vLLM's own
    cache. The same engine answered both."""

    loaded: Window
    warm: Window

    def of_engine(self, steps: Sequence[Step]) -> Pair:
        return Pair(self.loaded.of_engine(steps), self.warm.of_engine(steps))

    @property
    def lost(self) -> float:
        """What the load alone took from another request."""
        return self.loaded.lost - self.warm.lost

    @property
    def cost(self) -> float:
        """What the load alone added to the time to the first token."""
        return self.loaded.ttft - self.warm.ttft
