"""What the connector tells vLLM's own metrics: chunks loaded by place and declined by reason since it last told, which
vLLM adds up in its log ("KV Transfer metrics") and on its /metrics.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_METRICS = {
    "loaded": ("place", "Chunks of KV loaded into the engine, by the tier they came from."),
    "declined": ("reason", "Chunks of KV a tier holds that were computed instead, by reason."),
}


class TierStats(KVConnectorStats):
    """``data``: chunks by ``loaded_<place>`` and ``declined_<reason>``."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> TierStats:
        return TierStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class TierMetrics(KVConnectorPromMetrics):
    """``vllm:kvtier_loaded_chunks_total{place}`` and ``vllm:kvtier_declined_chunks_total{reason}``."""

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            kind, _, value = name.partition("_")
            self._counters[kind].labels(*self.per_engine_labelvalues[engine_idx], value).inc(count)
