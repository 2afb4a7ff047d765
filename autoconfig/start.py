"""What an engine's start asks when auto-config is on (the key ``engine.auto``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.autoconfig.draft import Plan


def plan_for_engine(
    vllm_config: Any,
    paths: Sequence[str] = (),
    redis_url: str | None = None,
    bucket: tuple[str, int | None] | None = None,
    *,
    engines: int = 1,
    timed: bool = True,
) -> Plan:
    """Probe, measure (at most 5 s, unless ``timed`` is false) and plan for a vLLM engine that is
    starting on this host.

    ``paths`` are candidate directories for the disk tier (default: the usual mounts). ``bucket`` is
    an object store's URL, and our share of it where one was given. Raises ConfigError when the
    model keeps no KV by token.
    """
    from kvtier.autoconfig.facts import Facts
    from kvtier.autoconfig.measure import measure
    from kvtier.autoconfig.plan import make_plan
    from kvtier.autoconfig.probe.bucket import probe_objects
    from kvtier.autoconfig.probe.disks import probe_disks
    from kvtier.autoconfig.probe.gpus import probe_gpus
    from kvtier.autoconfig.probe.memory import probe_memory
    from kvtier.autoconfig.probe.model import probe_engine
    from kvtier.autoconfig.probe.redis import probe_redis

    engine, model = probe_engine(vllm_config, engines)
    facts = Facts(
        probe_memory(),
        probe_gpus(),
        probe_disks(paths),
        probe_redis(redis_url) if redis_url else None,
        model,
        engine,
        objects=probe_objects(*bucket) if bucket else None,
    )
    return make_plan(measure(facts) if timed else facts)


def chunk_tokens_for_engine(vllm_config: Any, block: int) -> int:
    """The plan's ``chunk_tokens``, from the engine's configuration alone. The scheduler and all
    workers must agree on it before anything is planned, and so they do. ``block``: the tokens of
    one engine block."""
    from kvtier.autoconfig.chunks import TYPICAL_KV_BYTES, chunk_tokens, stored_kv_bytes
    from kvtier.autoconfig.probe.model import probe_engine

    engine, model = probe_engine(vllm_config)
    tensor, single = (
        engine.tensor_parallel.value or 1,
        model.kv_bytes_per_token.value or TYPICAL_KV_BYTES,
    )
    stored = stored_kv_bytes(single, model.kv_heads.value or tensor, tensor)
    return chunk_tokens(stored, block, engine.max_model_len.value or model.max_tokens.value or 1)
