"""Counts for vLLM's own metrics: chunks loaded by place, declined and missed by
reason, whether nothing is ever hit, and all metrics of a Store that a server's ``/metrics`` has,
under the same names. Counts are since the last report. vLLM adds them up in its log ("KV Transfer
metrics") and on its /metrics.

An engine whose cache is a server's tells what it sees of the server. The server tells its tiers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.config.keys import places
from kvtier.config.load import load
from kvtier.connectors.vllm import settings
from kvtier.connectors.vllm.hints import KINDS
from kvtier.core.errors import KVTierError
from kvtier.core.lookup import RAM
from kvtier.core.report import BOUNDS
from kvtier.store.reports import figures

if TYPE_CHECKING:
    from kvtier.api import KVStore
    from kvtier.core.report import SizeClassStatus

SEPARATOR = "|"
TIMES, SECONDS = "times", "seconds"
"""Kinds of a histogram's numbers: counts and sums."""
SERVER_COUNTS = {
    "unanswered": "Questions that the server did not answer in time: misses.",
    "lost": "Times the connection to the server was lost.",
}
"""Counts of a server's client -> their help texts."""
ZERO_HITS = "zero_hits"
HELD = SEPARATOR.join((figures.GAUGE, "held_chunks", ""))
_EVERY_S = 1.0


class Figures:
    """All metrics of an engine's own Store, as numbers by name, so that vLLM can carry them to the
    process that serves ``/metrics``. Read at most once a second.

    A name is ``kind|figure`` and the values of the figure's labels (mostly ``tier``), and for a
    histogram ``kind|what|tier|bucket``. Counters are since the last report."""

    def __init__(self, store: KVStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._due = clock()
        self._told: dict[str, float] = {}

    def new(self) -> dict[str, float]:
        if self._clock() < self._due:
            return {}
        self._due = self._clock() + _EVERY_S
        own, told = self._store.status(), self._told
        now = {  # a counter that falls, as while a disk is opened again, is told when it has grown
            name: value if is_gauge(name) else max(value, told.get(name, 0))
            for name, value in (_server(self._store.counts) if own is None else _own(own))
        }
        changed = {name: value for name, value in now.items() if told.get(name) != value}
        if changed:  # so that vLLM's log always has something to show
            changed |= {name: value for name, value in now.items() if name.startswith(HELD)}
        self._told = told | now
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


logger = logging.getLogger("kvtier.connectors.vllm")

UNBLENDED = (
    *("off", "malformed", "many", "unsupported", "salt"),
    *("missing", "exact", "slower", "room", "failed"),
)
_METRICS: dict[str, tuple[str, str, Sequence[str], str]] = {
    "loaded": (
        "loaded_chunks",
        "place",
        (),
        "Chunks of KV loaded into the engine, by the tier from which they came.",
    ),
    "declined": (
        "declined_chunks",
        "reason",
        figures.DECLINED,
        "Chunks of KV a tier holds that were computed instead, by reason.",
    ),
    "missed": (
        "missed_chunks",
        "reason",
        (*figures.MISSED, "salt", "adapter", "media", "unnamed"),
        "Chunks of KV that no tier gave and that were computed, by reason.",
    ),
    "hints": (
        "hints",
        "kind",
        KINDS,
        "Hints about the future of requests, by kind; bad: not understood.",
    ),
    "spans": (
        "span_tokens",
        "kind",
        ("moved", "kept", "computed"),
        "Tokens of blended prompts; moved: from another place; computed: in place.",
    ),
    "unblended": (
        "unblended_requests",
        "reason",
        UNBLENDED,
        "Requests that ask for spans, computed exactly, by reason.",
    ),
    "extension": (
        "extension_counts",
        "what",
        (),
        "What extensions of other packages count; what: its name and the count's.",
    ),
}
"""Part of a count's name before the first ``_`` -> the metric's name, its label, known values of
the label, and its help. Places are known by the configuration."""
_SERVER = "server_"
_LATER = {row.name for row in (*figures.LABELLED_FIGURES, *figures.DISK_FIGURES)}
"""Metrics whose series appear when they are told first: their labels follow from the policy and the
disks."""
_registered: list[Any] = []
"""Metrics of the last TierMetrics. vLLM clears only its own prefix from Prometheus' registry."""


class TierStats(KVConnectorStats):
    """Counts: chunks ``loaded_<place>``, ``declined_<reason>``, ``missed_<reason>``,
    hints ``hints_<kind>``, ``zero_hits`` as 1 or 0 where changed, and :class:`Figures`."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> TierStats:
        both = dict(self.data)
        for name, value in other.data.items():
            is_latest = name == ZERO_HITS or is_gauge(name)
            both[name] = value if is_latest else both.get(name, 0) + value
        return TierStats(data=both)

    def reduce(self) -> dict[str, int | float]:
        shown = {name: value for name, value in self.data.items() if SEPARATOR not in name}
        return shown | {
            f"{n.removeprefix(HELD)}_held": v for n, v in self.data.items() if n.startswith(HELD)
        }

    def is_empty(self) -> bool:
        return not self.data


class TierMetrics(KVConnectorPromMetrics):
    """Metrics ``vllm:kvtier_loaded_chunks_total{place}``, ``..._declined_chunks_total{reason}``,
    ``..._missed_chunks_total{reason}``, ``vllm:kvtier_hints_total{kind}``,
    ``vllm:kvtier_zero_hits``, and a server's ``kvtier_*``. Every series exists from the start, but
    for those of the policy, of other sizes and of disks."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        for metric in _registered:
            with contextlib.suppress(KeyError):
                REGISTRY.unregister(metric)
        _registered.clear()
        self._places = _places(vllm_config)
        self._counters = {
            kind: self._counter_cls(f"vllm:kvtier_{name}", about, labelnames=[*labelnames, label])
            for kind, (name, label, _, about) in _METRICS.items()
        }
        about = "1: no asked chunk has been a hit for long; the engine's log says why."
        self._zero_hits = self._gauge(f"vllm:kvtier_{ZERO_HITS}", about, labelnames)
        self._figures = {row[:2]: self._made(*row) for row in self._rows()}
        _registered.extend(self._figures.values())
        for engine in per_engine_labelvalues:
            self._begin(engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            kind, _, rest = name.partition(SEPARATOR)
            if kind == TIMES:
                self._observe_times(rest, count, transfer_stats_data, values)
            elif rest and kind != SECONDS:
                figure, *labels = rest.split(SEPARATOR, 2)  # a disk's folder is the second label
                series = self._figures[kind, figure].labels(*values, *labels)
                series.set(count) if kind == figures.GAUGE else series.inc(count)
            elif name == ZERO_HITS:
                self._zero_hits.labels(*values).set(count)
            elif not rest:
                kind, _, value = name.partition("_")
                self._counters[kind].labels(*values, value).inc(count)

    def _observe_times(
        self, rest: str, count: float, data: dict[str, Any], values: list[object]
    ) -> None:
        """Observe the mean for each of ``count`` durations, so the bucket and the sum are exact."""
        what, tier, _ = rest.split(SEPARATOR)
        series = self._figures[TIMES, what].labels(*values, *([tier] if tier else []))
        seconds = data.get(f"{SECONDS}{SEPARATOR}{rest}", 0.0)
        for _ in range(round(count)):
            series.observe(seconds / count)

    # ---- the series ------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[str, str, str, list[str]]]:
        for name, text in SERVER_COUNTS.items():
            yield figures.COUNTER, f"{_SERVER}{name}", text, []
        for row in figures.OF_ENGINES:
            yield row.kind, row.name, row.text, [*row.labels]
        for what, text in figures.TIMINGS.items():
            yield TIMES, what, text, ["tier"] if what in figures.BY_TIER else []

    def _made(self, kind: str, name: str, text: str, labels: list[str]) -> Any:
        names = [*self._labelnames, *labels]
        if kind == TIMES:
            return self._histogram_cls(
                figures.seconds(name), text, labelnames=names, buckets=BOUNDS
            )
        if kind == figures.GAUGE:
            return self._gauge(f"{figures.PREFIX}{name}", text, names)
        return self._counter_cls(f"{figures.PREFIX}{name}", text, labelnames=names)

    def _gauge(self, name: str, text: str, names: Sequence[str]) -> Any:
        """Make a gauge. With several front ends (``--api-server-count``) it is the latest value."""
        mode = "mostrecent"
        return self._gauge_cls(name, text, labelnames=names, multiprocess_mode=mode)

    def _begin(self, engine: int) -> None:
        """Make the known series, so that they are 0 and not absent."""
        values, lower = self.per_engine_labelvalues[engine], self._places[1:]
        for kind, (_, _, reasons, _) in _METRICS.items():
            for reason in reasons:
                self._counters[kind].labels(*values, reason)
        for place in self._places:
            self._counters["loaded"].labels(*values, place)
        rows = {row.name: [*filter(row.tiers, self._places)] for row in figures.TIER_FIGURES}
        rows |= {"lane_failures": lower, "load": self._places, "promotion": lower, "spill": lower}
        pairs = {
            "lane_queued": [*product(lower, figures.QUEUES)],
            figures.WHAT_IF: [*product(self._places, figures.WHAT_IF_SCALES)],
        }
        for (_, name), metric in self._figures.items():
            if name.startswith(_SERVER) == bool(self._places):
                continue  # the cache is a server's, or the engine's own
            if name in pairs:
                for pair in pairs[name]:
                    metric.labels(*values, *pair)
            elif name in _LATER:
                continue
            elif name in rows:
                for tier in rows[name]:
                    metric.labels(*values, tier)
            else:
                metric.labels(*values)


def _places(vllm_config: Any) -> list[str]:
    """Return the configured places. Those that auto-config adds appear with the first step."""
    transfer = vllm_config.kv_transfer_config
    try:
        return places(load(flags=settings(transfer)))
    except KVTierError as error:  # among other connectors the settings are not ours alone
        logger.debug("where the engine keeps chunks is not known before its first step: %s", error)
        return [RAM]
