"""What an engine's own Store tells vLLM's metrics: all metrics that a server's ``/metrics`` has of
it, as numbers by name, so that vLLM can carry them from the process that schedules to the one that
serves ``/metrics``.

A name is ``kind|figure``, with the values of the figure's labels after it (most have ``tier``
alone), and for a histogram ``kind|what|tier|bucket``. Counters are since the last report. Gauges
are the present values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvtier.store.reports import figures

if TYPE_CHECKING:
    from kvtier.api import KVStore
    from kvtier.core.report import SizeClassStatus

SEPARATOR = "|"
TIMES, SECONDS = "times", "seconds"
"""The kinds of a histogram's numbers: how often, and how long in total."""
SERVER_COUNTS = {
    "unanswered": "Questions that the server did not answer in time: misses.",
    "lost": "Times the connection to the server was lost.",
}
"""Counts of a server's client -> their help texts."""
ZERO_HITS = "zero_hits"
HELD = SEPARATOR.join((figures.GAUGE, "held_chunks", ""))
"""The name of what a tier holds, without the tier's name at its end."""
_EVERY_S = 1.0


class Figures:
    """vLLM's scheduling loop reads it, at most once a second. ``clock``: monotonic seconds."""

    def __init__(self, store: KVStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._due = clock()
        self._told: dict[str, float] = {}

    def new(self) -> dict[str, float]:
        """What has changed since the last call. Everything the first time."""
        if self._clock() < self._due:
            return {}
        self._due = self._clock() + _EVERY_S
        own = self._store.status()
        now = dict(_server(self._store.counts) if own is None else _own(own))
        changed = {name: value for name, value in now.items() if self._told.get(name) != value}
        if changed:  # so that vLLM's log always has something to show
            changed |= {name: value for name, value in now.items() if name.startswith(HELD)}
        told, self._told = self._told, now
        return {
            name: value - (0 if is_gauge(name) else told.get(name, 0))
            for name, value in changed.items()
        }


def is_gauge(name: str) -> bool:
    return name.startswith(figures.GAUGE + SEPARATOR)


def _server(counts: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    return (
        (_name(figures.COUNTER, f"server_{what}"), counts[what])
        for what in SERVER_COUNTS
        if counts.get(what)
    )


def _own(now: SizeClassStatus) -> Iterator[tuple[str, float]]:
    for row in figures.OF_ENGINES:
        for labels, value in row.values(now).items():
            yield _name(row.kind, row.name, *labels), value
    for timing in now.timings:
        for place, (count, seconds) in enumerate(zip(timing.counts, timing.seconds, strict=True)):
            # the first bucket is always told, so that the series exists from the start
            if count or not place:
                yield _name(TIMES, timing.what, timing.tier, str(place)), count
                yield _name(SECONDS, timing.what, timing.tier, str(place)), seconds


def _name(*parts: str) -> str:
    return SEPARATOR.join(parts)
