"""First come, first served: when engines that share one queue begin each request, and when they are
through with its prompt. Pure: a simulation of discrete events, without a clock.

An engine computes one prompt at a time. It takes the request that has waited longest as soon as it
is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

Begin = Callable[[int, float], float]
"""The request with this number is begun at this time. Returns the seconds that its prompt takes."""
End = Callable[[int, float], object]
"""The prompt of the request with this number is computed at this time."""


class Waited(NamedTuple):
    came: float
    begun: float
    answered: float
    """Its prompt was computed: the first token is there."""

    @property
    def ttft(self) -> float:
        return self.answered - self.came


def first_come(arrivals: Sequence[float], engines: int, begin: Begin, end: End) -> list[Waited]:
    """Serve requests that come at these times, which never go back.

    ``begin`` and ``end`` are called in the order of their times, an end before a begin at the same
    time.
    """
    computing: list[tuple[float, int]] = []
    served = list[Waited]()
    for number, came in enumerate(arrivals):
        begun = came
        while computing and (len(computing) == engines or computing[0][0] <= begun):
            free, ended = heapq.heappop(computing)
            end(ended, free)
            begun = max(begun, free)
        answered = begun + begin(number, begun)
        heapq.heappush(computing, (answered, number))
        served.append(Waited(came, begun, answered))
    while computing:
        free, ended = heapq.heappop(computing)
        end(ended, free)
    return served
