"""Which of kvtier's own extensions an engine has. Those of ``kvtier.extensions`` are found by name:
``engine`` of each has a function that makes them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.connectors.vllm.extensions.hint_delivery import HintDelivery
from kvtier.connectors.vllm.extensions.hit_log import HitLog
from kvtier.connectors.vllm.extensions.misses import Misses
from kvtier.connectors.vllm.extensions.tracing import Traces
from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads

if TYPE_CHECKING:
    from kvtier.connectors.vllm.worker_side.extension import WorkerExtension


def shipped(tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    """In the order in which they are asked. vLLM's own configuration asks for events and traces."""
    wants_traces = facts.vllm_config.observability_config.otlp_traces_endpoint
    return (
        *_beside("spans", tools, facts),
        Misses(tools.store, tools.geometry, tools.load_policy.clock),
        HintDelivery(tools.store, tools.geometry),
        *_beside("event_stream", tools, facts),
        HitLog(),
        *([Traces()] if wants_traces else ()),
        EarlyLoads(tools, facts.duty),
    )


def _beside(name: str, tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    found: tuple[Extension, ...] = import_module(f"kvtier.extensions.{name}.engine").extensions(
        tools, facts
    )
    return found


def of_worker(vllm_config: Any, kept: Any, kv_caches: Any) -> tuple[WorkerExtension, ...]:
    """``kept``: see :func:`kvtier.connectors.vllm.layout.kept`."""
    mover = import_module("kvtier.extensions.spans.mover")
    made: WorkerExtension = mover.extension(vllm_config, kept, kv_caches)
    return (made,)
