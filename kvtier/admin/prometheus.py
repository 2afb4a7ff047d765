"""Metrics: a server's Stats -> Prometheus' text. Owns no state: every scrape reads the objects' own counts.

All names begin with ``kvtier_``. ``tier`` is ``ram``, ``nvme`` or ``redis``; ``slot_bytes`` tells the realms of one
server apart. Counters begin at 0 with the process. prometheus_client is imported with this module, so this module is
imported by whoever serves metrics, and by nobody else.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.admin.status import RealmStatus, Stats, TierStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TIER_LABELS = ("slot_bytes", "tier")
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Sample = tuple[tuple[str, ...], float]


class _Row(NamedTuple):
    """One metric by tier: name without prefix, gauge or counter, help, where it is read. ``below``: not of RAM."""

    name: str
    family: Family
    text: str
    value: Callable[[RealmStatus, TierStatus], float]
    below: bool = True


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
# fmt: off
_TIER_ROWS = (
    _Row("capacity_chunks", _GAUGE, "Room, in chunks.", lambda _, tier: tier.capacity, below=False),
    _Row("capacity_bytes", _GAUGE, "Room, in bytes.", lambda r, tier: tier.capacity * r.slot_bytes, below=False),
    _Row("held_chunks", _GAUGE, "Chunks held; in RAM: ready.", lambda _, tier: tier.held, below=False),
    _Row("held_bytes", _GAUGE, "Bytes held; in RAM: ready.", lambda r, tier: tier.held * r.slot_bytes, below=False),
    _Row("loads", _COUNTER, "Chunks served from here.", lambda _, tier: tier.loads, below=False),
    _Row("stores", _COUNTER, "Chunks put here: saves in RAM, spills below.", lambda _, tier: tier.stores, below=False),
    _Row("refusals", _COUNTER, "Chunks not taken: no room, or no time.", lambda _, tier: tier.refused, below=False),
    _Row("load_misses", _COUNTER, "Chunks counted as held that could not be read.", lambda _, tier: tier.misses),
    _Row("late_spills", _COUNTER, "Chunks that left RAM before their spill.", lambda _, tier: tier.late),
    _Row("over_budget", _COUNTER, "Chunks not written to spare the device.", lambda _, tier: tier.over_budget),
    _Row("evicted_unread", _COUNTER, "Chunks written and deleted unread.", lambda _, tier: tier.evicted_unread),
    _Row("failures", _COUNTER, "Calls that failed with an I/O or network error.", lambda _, tier: tier.failed),
    _Row("corrupt_chunks", _COUNTER, "Checksums that did not match; never served.", lambda _, tier: tier.corrupt),
    _Row("read_bytes", _COUNTER, "Bytes read.", lambda _, tier: tier.bytes_read),
    _Row("written_bytes", _COUNTER, "Bytes written.", lambda _, tier: tier.bytes_written),
    _Row("open_breakers", _GAUGE, "Nodes left alone now because they failed.", lambda _, tier: tier.open_breakers),
    _Row("breaker_trips", _COUNTER, "Times a breaker opened.", lambda _, tier: tier.breaker_trips),
    _Row("owed_deletes", _GAUGE, "Deletes that wait for the tier to be back.", lambda _, tier: tier.owed_deletes),
)
# fmt: on


def exposition(stats: Stats) -> bytes:
    """The text of one scrape (:data:`CONTENT_TYPE`)."""
    registry = CollectorRegistry()
    registry.register(_Scrape(stats))
    return generate_latest(registry)


class _Scrape(Collector):
    """One look, in Prometheus' words."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._process()
        yield from self._connections()
        yield from self._realms()
        for row in _TIER_ROWS:
            yield self._metric(row.family, row.name, row.text, _TIER_LABELS, self._each_tier(row))
        yield from self._lanes()

    def _process(self) -> Iterator[Metric]:
        stats = self._stats
        facts = (stats.version, platform.python_version())
        labels = ("version", "python_version")
        yield self._metric(_GAUGE, "build_info", "Always 1; what runs.", labels, [(facts, 1)])
        yield GaugeMetricFamily("kvtier_ready", "1 while engines are let in.", stats.ready)
        yield GaugeMetricFamily("kvtier_trouble", "Things that are wrong now; /healthz names them.", len(stats.trouble))
        yield GaugeMetricFamily("kvtier_uptime_seconds", "Since the start.", stats.uptime_s)
        memory = [(("process",), stats.memory.process), (("pools",), stats.memory.pools)]
        text = "Resident memory: the RAM tiers, and all else."
        yield self._metric(_GAUGE, "memory_bytes", text, ("of",), memory)

    def _connections(self) -> Iterator[Metric]:
        now = self._stats.connections
        states = [(("open",), now.open), (("lingering",), now.lingering)]
        text = "Connections; lingering: closed, with the pool still mapped by some process."
        yield self._metric(_GAUGE, "connections", text, ("state",), states)
        events = [((event,), getattr(now, event)) for event in ("accepted", "rejected", "dropped", "ended")]
        text = "What happened to connections; dropped: the client did what it should not."
        yield self._metric(_COUNTER, "connection_events", text, ("event",), events)
        yield GaugeMetricFamily("kvtier_leases", "Leases that engines have open.", now.leases)

    def _realms(self) -> Iterator[Metric]:
        realms = self._stats.realms
        slots = [
            ((str(realm.slot_bytes), state), count)
            for realm in realms
            for state, count in (("free", realm.free), ("filling", realm.filling), ("ready", realm.tiers[0].held))
        ]
        text = "Slots of the RAM tier by state."
        yield self._metric(_GAUGE, "slots", text, ("slot_bytes", "state"), slots)
        yield self._realm(_GAUGE, "pinned_slots", "Slots in use by somebody.", lambda r: r.pinned)
        yield self._realm(_GAUGE, "namespaces", "Tenants and models so far.", lambda r: r.namespaces)
        yield self._realm(_COUNTER, "asked_chunks", "Chunks that loads named.", lambda r: r.asked)
        text = "Chunks held below that RAM had no slot for."
        yield self._realm(_COUNTER, "load_refusals", text, lambda realm: realm.loads_refused)
        text = "Chunks held below that a full lane did not fetch."
        yield self._realm(_COUNTER, "promotion_refusals", text, lambda realm: realm.promotions_refused)
        text = "Chunks that could be had and were computed instead."
        yield self._reasons("declined_chunks", text, lambda realm: realm.declined)
        yield self._reasons("missed_chunks", "Chunks that loads named and could not have.", lambda realm: realm.missed)
        text = "1: not one chunk that was asked for has been a hit for long; kvtier stats says why."
        yield self._realm(_GAUGE, "zero_hits", text, lambda realm: bool(realm.zero_hits))
        text = "Chunks that each setting of RAM's order of leaving was tried with."
        yield self._realm(_COUNTER, "policy_asked_chunks", text, lambda realm: realm.policy_asked)
        hits = [((str(r.slot_bytes), name), count) for r in realms for name, count in r.policy_hits.items()]
        labels = ("slot_bytes", "setting")
        yield self._metric(_COUNTER, "policy_hit_chunks", "Chunks of them that it would have hit.", labels, hits)
        rules = [((str(r.slot_bytes), name), float(name == r.policy)) for r in realms for name in r.policy_hits]
        yield self._metric(_GAUGE, "policy_rules", "1 for the setting that rules.", labels, rules)
        points = [
            ((str(realm.slot_bytes), tier.tier, scale), ratio)
            for realm in realms
            for tier in realm.tiers
            for scale, ratio in tier.what_if.items()
        ]
        text = "Part of the chunks asked for that an LRU of so many times the size would have hit."
        yield self._metric(_GAUGE, "whatif_hit_ratio", text, (*_TIER_LABELS, "scale"), points)
        text = "Loaded chunks compared with their copy below."
        yield self._realm(_COUNTER, "audited_chunks", text, lambda realm: realm.audited)
        text = "Audited chunks that had other bytes: bad memory, or a bug."
        yield self._realm(_COUNTER, "audit_mismatches", text, lambda realm: realm.audit_mismatches)

    def _lanes(self) -> Iterator[Metric]:
        lanes = [
            ((str(realm.slot_bytes), tier.tier), tier.lane)
            for realm in self._stats.realms
            for tier in realm.tiers
            if tier.lane is not None
        ]
        queued = [
            ((*labels, queue), count)
            for labels, lane in lanes
            for queue, count in (("reads", lane.queued_reads), ("writes", lane.queued_writes))
        ]
        text = "Works that wait in front of a tier."
        yield self._metric(_GAUGE, "lane_queued", text, (*_TIER_LABELS, "queue"), queued)
        failures = [(labels, lane.failures) for labels, lane in lanes]
        yield self._metric(_COUNTER, "lane_failures", "Works that raised: a bug.", _TIER_LABELS, failures)

    # ---- forms ---------------------------------------------------------------------------------------------------

    def _each_tier(self, row: _Row) -> Iterator[Sample]:
        for realm in self._stats.realms:
            for tier in realm.tiers[row.below :]:
                yield (str(realm.slot_bytes), tier.tier), row.value(realm, tier)

    def _realm(self, family: Family, name: str, text: str, value: Callable[[RealmStatus], float]) -> Metric:
        samples = [((str(realm.slot_bytes),), value(realm)) for realm in self._stats.realms]
        return self._metric(family, name, text, ("slot_bytes",), samples)

    def _reasons(self, name: str, text: str, counts: Callable[[RealmStatus], Mapping[str, int]]) -> Metric:
        samples = [
            ((str(realm.slot_bytes), reason), count)
            for realm in self._stats.realms
            for reason, count in counts(realm).items()
        ]
        return self._metric(_COUNTER, name, text, ("slot_bytes", "reason"), samples)

    @staticmethod
    def _metric(family: Family, name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
        metric = family(f"kvtier_{name}", text, labels=labels)
        for values, value in samples:
            metric.add_metric(values, value)
        return metric
