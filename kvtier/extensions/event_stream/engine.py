"""KV events of an engine, where vLLM's configuration asks for them."""

from __future__ import annotations

from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.extensions.event_stream.announcer import Announcer, are_wanted, groups_of


def extensions(tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    if not are_wanted(facts.vllm_config):
        return ()
    groups = groups_of(facts.vllm_config, facts.kv_cache_config, tools.geometry)
    return (Announcer(tools.store.watch(), tools.geometry, groups),)
