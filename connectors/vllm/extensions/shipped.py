"""Which of kvtier's own extensions an engine has. Those of ``kvtier.extensions`` are found by name:
``engine`` of each has a function that makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.connectors.vllm.extensions.hint_delivery import HintDelivery
from kvtier.connectors.vllm.extensions.hit_log import HitLog
from kvtier.connectors.vllm.extensions.misses import Misses
from kvtier.connectors.vllm.extensions.tracing import Traces


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
    )


def _beside(name: str, tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    found: tuple[Extension, ...] = import_module(f"kvtier.extensions.{name}.engine").extensions(
        tools, facts
    )
    return found


def span_mover(vllm_config: Any, kept: Any) -> Callable[..., Any]:
    """What makes a worker's :class:`~kvtier.connectors.vllm.worker_side.span_mover.SpanMover` of
    its KV caches. ``kept``: see :func:`kvtier.connectors.vllm.layout.kept`."""
    return partial(import_module("kvtier.extensions.spans.mover").mover_of, vllm_config, kept)
