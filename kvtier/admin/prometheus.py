"""Metrics: a server's Stats as Prometheus' text. It keeps no state: every scrape reads the objects'
own counts, which begin at 0 with the process. Only code that serves metrics imports this module,
and prometheus_client with it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
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
from kvtier.core.report import BOUNDS, SizeClassStatus
from kvtier.store.reports import figures
from kvtier.store.reports.figures import COUNTER, GAUGE, Figure, of_label, of_store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[tuple[str, ...], float]
_KINDS: Mapping[str, type[GaugeMetricFamily | CounterMetricFamily]] = {
    GAUGE: GaugeMetricFamily,
    COUNTER: CounterMetricFamily,
}
_LE = [*map(floatToGoString, BOUNDS), "+Inf"]
_DECLINED = "Chunks that could be had and were computed instead."
_MODEL = "Always 1; a model that has chunks of this size."
_NO_HITS = "1: no asked chunk has been a hit for long; kvtier stats says why."


def _slots(report: SizeClassStatus) -> Mapping[str, float]:
    return {"free": report.free, "filling": report.filling, "ready": report.tiers[0].held}


def _declined(report: SizeClassStatus) -> Mapping[str, float]:
    return dict.fromkeys(figures.DECLINED, 0) | report.declined


def _missed(report: SizeClassStatus) -> Mapping[str, float]:
    return dict.fromkeys(figures.MISSED, 0) | report.missed


_OF_SERVERS = (
    of_store("namespaces", GAUGE, "namespaces", "Tenants and models so far."),
    of_label("declined_chunks", COUNTER, "reason", _declined, _DECLINED),
    of_label(
        "missed_chunks", COUNTER, "reason", _missed, "Chunks that loads named and could not have."
    ),
    of_label("model_info", GAUGE, "model", lambda r: dict.fromkeys(r.models, 1), _MODEL),
    of_store("zero_hits", GAUGE, lambda r: bool(r.zero_hits), _NO_HITS),
)
"""Figures of servers only: an engine counts these itself."""
_FIGURES = (
    of_label("slots", GAUGE, "state", _slots, "Slots of the RAM tier by state."),
    *figures.STORE_FIGURES,
    *_OF_SERVERS,
    *figures.TIER_FIGURES,
    *figures.DISK_FIGURES,
    *figures.LABELLED_FIGURES,
    *figures.LANE_FIGURES,
)


def exposition(stats: Stats) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Scrape(stats))
    return generate_latest(registry)


class _Scrape(Collector):
    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._process()
        yield from self._connections()
        for row in _FIGURES:
            yield self._figure(row)
        for what, text in figures.TIMINGS.items():
            yield self._timing(what, text)
        yield from self._engines()

    def _process(self) -> Iterator[Metric]:
        stats = self._stats
        facts = (stats.version, platform.python_version())
        labels = ("version", "python_version")
        yield self._metric(
            GAUGE, "build_info", "Always 1; the labels say what runs.", labels, [(facts, 1)]
        )
        yield GaugeMetricFamily("kvtier_ready", "1 while engines are let in.", stats.ready)
        yield GaugeMetricFamily(
            "kvtier_trouble", "Things that are wrong now; /healthz names them.", len(stats.trouble)
        )
        yield GaugeMetricFamily("kvtier_uptime_seconds", "Seconds since the start.", stats.uptime_s)
        memory = [(("process",), stats.memory.process), (("pools",), stats.memory.pools)]
        text = "Resident memory: the RAM tiers (pools), and everything else (process)."
        yield self._metric(GAUGE, "memory_bytes", text, ("of",), memory)

    def _connections(self) -> Iterator[Metric]:
        now = self._stats.connections
        states = [(("open",), now.open), (("lingering",), now.lingering)]
        text = "Connections; lingering: closed, but some process still has the pool mapped."
        yield self._metric(GAUGE, "connections", text, ("state",), states)
        events = [
            ((event,), getattr(now, event))
            for event in ("accepted", "rejected", "dropped", "ended")
        ]
        text = "Events of connections; dropped: the client broke the rules."
        yield self._metric(COUNTER, "connection_events", text, ("event",), events)
        yield GaugeMetricFamily("kvtier_leases", "Leases that engines have open.", now.leases)

    def _engines(self) -> Iterator[Metric]:
        engines = self._stats.engines
        followed = [((engine.engine,), engine.followed) for engine in engines]
        text = "1: the engine's KV events are followed; 0: nothing is known of it."
        yield self._metric(GAUGE, "engine_followed", text, ("engine",), followed)
        blocks = [
            ((engine.engine, tier), count)
            for engine in engines
            for tier, count in engine.blocks.items()
        ]
        text = "Blocks of vLLM's that the engine said it can serve."
        yield self._metric(GAUGE, "engine_blocks", text, ("engine", "tier"), blocks)
        ignored = [((engine.engine,), engine.ignored_blocks) for engine in engines]
        text = "Blocks that were told and do not count in lookups."
        yield self._metric(COUNTER, "engine_ignored_blocks", text, ("engine",), ignored)
        events = [
            ((engine.engine, event), count)
            for engine in engines
            for event, count in engine.events.items()
        ]
        text = "Messages, gaps, dropped pictures and refused messages of event streams."
        yield self._metric(COUNTER, "engine_stream_events", text, ("engine", "event"), events)

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

    def _figure(self, row: Figure) -> Metric:
        samples = [
            ((str(size_class.slot_bytes), *labels), value)
            for size_class in self._stats.size_classes
            for labels, value in row.values(size_class).items()
        ]
        return self._metric(row.kind, row.name, row.text, ("slot_bytes", *row.labels), samples)

    @staticmethod
    def _metric(
        kind: str, name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]
    ) -> Metric:
        metric = _KINDS[kind](f"kvtier_{name}", text, labels=labels)
        for values, value in samples:
            metric.add_metric(values, value)
        return metric
