"""Metrics: a server's Stats as Prometheus' text. It keeps no state: every scrape reads the objects'
own counts.

All names begin with ``kvtier_``. ``tier`` is ``ram``, ``nvme``, ``redis``, ``mooncake``
or ``object``.
``slot_bytes`` tells the size classes of one server apart. Counters begin at 0 with the process.
This module imports prometheus_client, so only code that serves metrics imports this module.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvtier.admin.status import Stats
from kvtier.core.histogram import BOUNDS
from kvtier.store.reports import figures
from kvtier.store.reports.figures import (
    LABELLED_FIGURES,
    STORE_FIGURES,
    TIER_FIGURES,
    TIMINGS,
    LabelledFigure,
    TierFigure,
)
from kvtier.store.reports.status import SizeClassStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TIER_LABELS = ("slot_bytes", "tier")
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Sample = tuple[tuple[str, ...], float]
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_KINDS: Mapping[str, Family] = {figures.GAUGE: _GAUGE, figures.COUNTER: _COUNTER}
_LE = [*map(floatToGoString, BOUNDS), "+Inf"]
_DECLINED = LabelledFigure(
    "declined_chunks",
    figures.COUNTER,
    "Chunks that could be had and were computed instead.",
    ("reason",),
    lambda r: {(why,): r.declined.get(why, 0) for why in (*figures.DECLINED, *r.declined)},
)
_MISSED = LabelledFigure(
    "missed_chunks",
    figures.COUNTER,
    "Chunks that loads named and could not have.",
    ("reason",),
    lambda r: {(why,): r.missed.get(why, 0) for why in (*figures.MISSED, *r.missed)},
)


def exposition(stats: Stats) -> bytes:
    """The text of one scrape (:data:`CONTENT_TYPE`)."""
    registry = CollectorRegistry()
    registry.register(_Scrape(stats))
    return generate_latest(registry)


class _Scrape(Collector):
    """One scrape, as Prometheus' metrics."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._process()
        yield from self._connections()
        yield from self._size_classes()
        for row in TIER_FIGURES:
            yield self._metric(
                _KINDS[row.kind], row.name, row.text, _TIER_LABELS, self._each_tier(row)
            )
        for labelled in LABELLED_FIGURES:
            yield self._labelled(labelled)
        yield from self._lanes()
        for what, text in TIMINGS.items():
            yield self._timing(what, text)
        yield from self._engines()

    def _process(self) -> Iterator[Metric]:
        stats = self._stats
        facts = (stats.version, platform.python_version())
        labels = ("version", "python_version")
        yield self._metric(
            _GAUGE, "build_info", "Always 1; the labels say what runs.", labels, [(facts, 1)]
        )
        yield GaugeMetricFamily("kvtier_ready", "1 while engines are let in.", stats.ready)
        yield GaugeMetricFamily(
            "kvtier_trouble", "Things that are wrong now; /healthz names them.", len(stats.trouble)
        )
        yield GaugeMetricFamily("kvtier_uptime_seconds", "Seconds since the start.", stats.uptime_s)
        memory = [(("process",), stats.memory.process), (("pools",), stats.memory.pools)]
        text = "Resident memory: the RAM tiers (pools), and everything else (process)."
        yield self._metric(_GAUGE, "memory_bytes", text, ("of",), memory)

    def _connections(self) -> Iterator[Metric]:
        now = self._stats.connections
        states = [(("open",), now.open), (("lingering",), now.lingering)]
        text = "Connections; lingering: closed, but some process still has the pool mapped."
        yield self._metric(_GAUGE, "connections", text, ("state",), states)
        events = [
            ((event,), getattr(now, event))
            for event in ("accepted", "rejected", "dropped", "ended")
        ]
        text = "Events of connections; dropped: the client broke the rules."
        yield self._metric(_COUNTER, "connection_events", text, ("event",), events)
        yield GaugeMetricFamily("kvtier_leases", "Leases that engines have open.", now.leases)

    def _size_classes(self) -> Iterator[Metric]:
        size_classes = self._stats.size_classes
        slots = [
            ((str(size_class.slot_bytes), state), count)
            for size_class in size_classes
            for state, count in (
                ("free", size_class.free),
                ("filling", size_class.filling),
                ("ready", size_class.tiers[0].held),
            )
        ]
        text = "Slots of the RAM tier by state."
        yield self._metric(_GAUGE, "slots", text, ("slot_bytes", "state"), slots)
        for row in STORE_FIGURES:
            yield self._by_size_class(_KINDS[row.kind], row.name, row.text, row.value)
        yield self._by_size_class(
            _GAUGE, "namespaces", "Tenants and models so far.", lambda r: r.namespaces
        )
        for reasons in (_DECLINED, _MISSED):
            yield self._labelled(reasons)
        text = "1: no asked chunk has been a hit for long; kvtier stats says why."
        yield self._by_size_class(
            _GAUGE, "zero_hits", text, lambda size_class: bool(size_class.zero_hits)
        )

    def _lanes(self) -> Iterator[Metric]:
        lanes = [
            ((str(size_class.slot_bytes), tier.tier), tier.lane)
            for size_class in self._stats.size_classes
            for tier in size_class.tiers
            if tier.lane is not None
        ]
        queued = [
            ((*labels, queue), count)
            for labels, lane in lanes
            for queue, count in (("reads", lane.queued_reads), ("writes", lane.queued_writes))
        ]
        text = "Jobs that wait in front of a tier."
        yield self._metric(_GAUGE, "lane_queued", text, (*_TIER_LABELS, "queue"), queued)
        failures = [(labels, lane.failures) for labels, lane in lanes]
        yield self._metric(
            _COUNTER, "lane_failures", "Jobs that raised: a bug.", _TIER_LABELS, failures
        )

    def _engines(self) -> Iterator[Metric]:
        engines = self._stats.engines
        followed = [((engine.engine,), engine.followed) for engine in engines]
        text = "1: the engine's KV events are followed; 0: nothing is known of it."
        yield self._metric(_GAUGE, "engine_followed", text, ("engine",), followed)
        blocks = [
            ((engine.engine, tier), count)
            for engine in engines
            for tier, count in engine.blocks.items()
        ]
        text = "Blocks of vLLM's that the engine said it can serve."
        yield self._metric(_GAUGE, "engine_blocks", text, ("engine", "tier"), blocks)
        ignored = [((engine.engine,), engine.ignored_blocks) for engine in engines]
        text = "Blocks that were told and do not count in lookups."
        yield self._metric(_COUNTER, "engine_ignored_blocks", text, ("engine",), ignored)
        events = [
            ((engine.engine, event), count)
            for engine in engines
            for event, count in engine.events.items()
        ]
        text = "Messages, gaps, dropped pictures and refused messages of event streams."
        yield self._metric(_COUNTER, "engine_stream_events", text, ("engine", "event"), events)

    def _timing(self, what: str, text: str) -> Metric:
        labels = ["slot_bytes", *(["tier"] if what in figures.BY_TIER else [])]
        metric = HistogramMetricFamily(figures.seconds(what), text, labels=labels)
        for size_class in self._stats.size_classes:
            for timing in size_class.timings:
                if timing.what == what:
                    values = [str(size_class.slot_bytes), *([timing.tier] if timing.tier else [])]
                    buckets = list(zip(_LE, map(float, accumulate(timing.counts)), strict=True))
                    metric.add_metric(values, buckets, sum(timing.seconds))
        return metric

    # ---- forms -----------------------------------------------------------------------------------

    def _each_tier(self, row: TierFigure) -> Iterator[Sample]:
        for size_class in self._stats.size_classes:
            for tier in filter(row.has, size_class.tiers):
                yield (str(size_class.slot_bytes), tier.tier), row.value(size_class, tier)

    def _labelled(self, row: LabelledFigure) -> Metric:
        samples = [
            ((str(size_class.slot_bytes), *labels), value)
            for size_class in self._stats.size_classes
            for labels, value in row.values(size_class).items()
        ]
        labels = ("slot_bytes", *row.labels)
        return self._metric(_KINDS[row.kind], row.name, row.text, labels, samples)

    def _by_size_class(
        self, family: Family, name: str, text: str, value: Callable[[SizeClassStatus], float]
    ) -> Metric:
        samples = [
            ((str(size_class.slot_bytes),), value(size_class))
            for size_class in self._stats.size_classes
        ]
        return self._metric(family, name, text, ("slot_bytes",), samples)

    @staticmethod
    def _metric(
        family: Family, name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]
    ) -> Metric:
        metric = family(f"kvtier_{name}", text, labels=labels)
        for values, value in samples:
            metric.add_metric(values, value)
        return metric
