"""What the connector tells vLLM's own metrics: chunks loaded by place, declined and missed by reason since it last
told, which vLLM adds up in its log ("KV Transfer metrics") and on its /metrics; and whether nothing is ever hit.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.connectors.vllm.misses import ZERO_HITS

_METRICS = {
    "loaded": ("place", "Chunks of KV loaded into the engine, by the tier they came from."),
    "declined": ("reason", "Chunks of KV a tier holds that were computed instead, by reason."),
    "missed": ("reason", "Chunks of KV that no tier gave and that were computed, by reason."),
}


class TierStats(KVConnectorStats):
    """``data``: chunks by ``loaded_<place>``, ``declined_<reason>`` and ``missed_<reason>``; ``zero_hits``, 1 or 0
    where that has changed."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> TierStats:
        both = dict(Counter(self.data) + Counter(other.data))
        if ZERO_HITS in self.data or ZERO_HITS in other.data:
            both[ZERO_HITS] = other.data.get(ZERO_HITS, self.data.get(ZERO_HITS))
        return TierStats(data=both)

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class TierMetrics(KVConnectorPromMetrics):
    """``vllm:kvtier_loaded_chunks_total{place}``, ``..._declined_chunks_total{reason}``,
    ``..._missed_chunks_total{reason}`` and ``vllm:kvtier_zero_hits``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            kind: self._counter_cls(f"vllm:kvtier_{kind}_chunks", about, labelnames=[*labelnames, label])
            for kind, (label, about) in _METRICS.items()
        }
        about = "1: not one chunk that was asked for has been a hit for long; the engine's log says why."
        self._zero_hits = self._gauge_cls(f"vllm:kvtier_{ZERO_HITS}", about, labelnames=labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name == ZERO_HITS:
                self._zero_hits.labels(*self.per_engine_labelvalues[engine_idx]).set(count)
                continue
            kind, _, value = name.partition("_")
            self._counters[kind].labels(*self.per_engine_labelvalues[engine_idx], value).inc(count)
