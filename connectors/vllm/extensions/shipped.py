"""Which of kvtier's own extensions an engine has."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.vllm.extension import Extension, Tools
from kvtier.connectors.vllm.extensions.events import Announcer, are_wanted, groups_of
from kvtier.connectors.vllm.extensions.hint_delivery import HintDelivery
from kvtier.connectors.vllm.extensions.hit_log import HitLog
from kvtier.connectors.vllm.extensions.misses import Misses
from kvtier.connectors.vllm.extensions.spans import Able, Spans
from kvtier.connectors.vllm.extensions.tracing import Traces


def of_every_engine(tools: Tools, able: Able) -> tuple[Extension, ...]:
    """What no engine is without. ``able``: what its workers can do for requests that ask for
    documents from other prompts."""
    misses = Misses(tools.store, tools.geometry, tools.load_policy.clock)
    return Spans(tools, able), misses, HintDelivery(tools.store, tools.geometry)


def asked_for(tools: Tools, vllm_config: Any, kv_cache_config: Any) -> tuple[Extension, ...]:
    """What vLLM's own configuration asks for: events, and traces. A line for each hit is always
    logged."""
    found: list[Extension] = [HitLog()]
    if are_wanted(vllm_config):
        groups = groups_of(vllm_config, kv_cache_config, tools.geometry)
        found.insert(0, Announcer(tools.store.watch(), tools.geometry, groups))
    if vllm_config.observability_config.otlp_traces_endpoint:
        found.append(Traces())
    return tuple(found)
