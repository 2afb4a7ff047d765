"""What an engine's own Store has to tell vLLM's metrics: everything that a server's ``/metrics``
has of it, as numbers by name, so that vLLM can carry them from the process that schedules to the
one that serves ``/metrics``.

A name is ``kind|figure|tier``, a histogram's ``kind|what|tier|place``. Counts are those since the
last time they were told, gauges are as they are now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from kvtier.api import KVStore
from kvtier.store import figures
from kvtier.store.status import SizeClassStatus

SEPARATOR = "|"
TIMES, SECONDS = "times", "seconds"
"""Kinds of a histogram's numbers: how often, and how long altogether."""
QUEUES = ("reads", "writes")
SERVER_COUNTS = {
    "unanswered": "Questions that the server did not answer in time: misses.",
    "lost": "Times the connection to the server was lost.",
}
"""What an engine counts of its server -> help."""
HELD = SEPARATOR.join((figures.GAUGE, "held_chunks", ""))
"""Before a tier's name: what it holds."""
_EVERY_S = 1.0


class Figures:
    """Read at most once a second, by vLLM's scheduling loop. ``clock``: monotonic seconds."""

    def __init__(self, store: KVStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._due = clock()
        self._told: dict[str, float] = {}

    def new(self) -> dict[str, float]:
        """What has changed since the last call; everything the first time."""
        if self._clock() < self._due:
            return {}
        self._due = self._clock() + _EVERY_S
        own = self._store.status()
        now = dict(_server(self._store.counts) if own is None else _own(own))
        changed = {name: value for name, value in now.items() if self._told.get(name) != value}
        if changed:  # vLLM's log always has something to show then
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
    for of_store in figures.STORE_FIGURES:
        yield _name(of_store.kind, of_store.name), of_store.value(now)
    for of_tier in figures.TIER_FIGURES:
        for tier in now.tiers[of_tier.lower_only :]:
            yield _name(of_tier.kind, of_tier.name, tier.tier), of_tier.value(now, tier)
    for tier in now.tiers:
        if tier.lane is not None:
            for queue, count in zip(
                QUEUES, (tier.lane.queued_reads, tier.lane.queued_writes), strict=True
            ):
                yield _name(figures.GAUGE, "lane_queued", tier.tier, queue), count
            yield _name(figures.COUNTER, "lane_failures", tier.tier), tier.lane.failures
    for timing in now.timings:
        for place, (count, seconds) in enumerate(zip(timing.counts, timing.seconds, strict=True)):
            if (
                count or not place
            ):  # the first of all places is told at the start: the series is there from then on
                yield _name(TIMES, timing.what, timing.tier, str(place)), count
                yield _name(SECONDS, timing.what, timing.tier, str(place)), seconds


def _name(*parts: str) -> str:
    return SEPARATOR.join(parts)
