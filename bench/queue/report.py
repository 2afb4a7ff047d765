"""Rows and tables of the queue's benchmark, and how requests wait there: first come, first served.

A simulation of discrete events, without a clock. An engine computes one prompt at a time. It takes
the request that has waited longest as soon as it is free.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtier.bench.report import Row, percentile
from kvtier.bench.traces.simulate import Result
from kvtier.core.terminal import table

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


NAME = "queue"


class Felt(NamedTuple):
    policy: str
    result: Result
    waited: Sequence[Waited]
    """Of each request, at least one."""
    engines: int

    @property
    def ttft(self) -> list[float]:
        return [one.ttft for one in self.waited]

    @property
    def queued(self) -> float:
        return statistics.fmean(one.begun - one.came for one in self.waited)

    @property
    def busy(self) -> float:
        computed = sum(one.answered - one.begun for one in self.waited)
        whole = max(one.answered for one in self.waited) - self.waited[0].came
        return computed / (self.engines * whole)


_TIMES: dict[str, Callable[[Felt], float]] = {
    "TTFT mean": lambda felt: statistics.fmean(felt.ttft),
    "TTFT p50": lambda felt: percentile(felt.ttft, 50),
    "TTFT p95": lambda felt: percentile(felt.ttft, 95),
    "in the queue, mean": lambda felt: felt.queued,
}
_PARTS: dict[str, Callable[[Felt], float]] = {
    "hits": lambda felt: felt.result.percent(felt.result.hits) / 100,
    "saved compute": lambda felt: felt.result.saved_percent / 100,
    "engines busy": lambda felt: felt.busy,
}


def rows_of(felt: Sequence[Felt]) -> list[Row]:
    """Each policy's numbers. Ratios are to the first policy's."""
    rows = []
    for one in felt:
        for name, value in _TIMES.items():
            first = value(felt[0])
            ratio = value(one) / first if first else None
            rows.append(Row(f"{one.policy}: {name}", value(one), "s", first, ratio))
        rows += [Row(f"{one.policy}: {name}", part(one), "share") for name, part in _PARTS.items()]
    return rows


def shown(rows: Mapping[str, float], policies: Sequence[str]) -> list[list[str]]:
    cells = [
        [
            f"`{policy}`",
            *(f"{rows[f'{policy}: {name}']:.1%}" for name in _PARTS),
            *(f"{rows[f'{policy}: {name}']:.2f} s" for name in _TIMES),
        ]
        for policy in policies
    ]
    return [["policy", *_PARTS, *_TIMES], *cells]


def print_table(felt: Sequence[Felt]) -> None:
    values = {row.name: row.value or 0.0 for row in rows_of(felt)}
    heads, *rows = shown(values, [one.policy for one in felt])
    first = statistics.fmean(felt[0].ttft)
    heads.append(f"mean against {felt[0].policy}")
    for one, row in zip(felt, rows, strict=True):
        row[0] = one.policy
        row.append(f"{statistics.fmean(one.ttft) / first:.2f} x")
    print("\n".join(table(heads, rows, numbers=range(1, len(heads)))))
