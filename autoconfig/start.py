"""What an engine's start asks when auto-config is on (the key ``engine.auto``), and what a start
makes of the answer. A server's questions: :mod:`kvtier.autoconfig.server`."""

from __future__ import annotations

import logging
from typing import Any

from kvtier.autoconfig.chunks import TYPICAL_KV_BYTES, chunk_tokens, stored_kv_bytes
from kvtier.autoconfig.draft import Plan
from kvtier.autoconfig.explain import PLANNED, summary, table
from kvtier.autoconfig.facts import Facts, Model, Serving
from kvtier.autoconfig.measure import measure
from kvtier.autoconfig.plan import make_plan
from kvtier.autoconfig.probe.gpus import probe_gpus
from kvtier.autoconfig.probe.memory import probe_memory
from kvtier.autoconfig.probe.model import probe_engine
from kvtier.config.keys import Config
from kvtier.config.load import filled
from kvtier.core.errors import ConfigError
from kvtier.eviction.saved_compute import SavedCompute, balance
from kvtier.load_policy.prefill import PrefillTime
from kvtier.tiers.nvme.disks import probe_disks, reusable
from kvtier.tiers.registry import configured

logger = logging.getLogger("kvtier")


def probe_host(config: Config, model: Model, engine: Serving, *, server: bool = False) -> Facts:
    """The facts for this ``model`` and ``engine`` here, or for a ``server``. Where ``config`` names
    no folder for a disk tier, the usual mounts are candidates."""
    disks = probe_disks([config.nvme_path] if config.nvme_path else [])
    return Facts(
        probe_memory(),
        probe_gpus(),
        tuple(reusable(disk, server=server) for disk in disks),
        model,
        engine,
        tiers={tier.name: tier.probe(own) for tier, own in configured(config)},
    )


def plan_for_engine(vllm_config: Any, config: Config) -> Plan:
    """Probe, measure (at most 5 s) and plan for a vLLM engine that is starting on this host with
    kvtier's ``config``. Raises ConfigError when the model keeps no KV by token."""
    engine, model = probe_engine(vllm_config, config.host_engines)
    return make_plan(measure(probe_host(config, model, engine)))


def settled(given: Config, plan: Plan) -> Config:
    """``given`` with the plan's values for the keys that are not set, which the log tells. Raises
    ConfigError where there is no room for a RAM tier."""
    values = plan.values()
    values.pop("chunk_tokens", None)  # the processes of an engine agree on it before its plan
    config = filled(given, values, PLANNED)
    for line in table(plan, config).splitlines():
        logger.debug("auto-config: %s", line)
    logger.info("auto-config: %s", summary(plan, config))
    for warning in plan.warnings:
        logger.warning("auto-config: %s", warning)
    if "ram_bytes" not in values and given.ram_bytes is None:
        raise ConfigError(
            f"auto-config finds no room for a RAM tier: {dict(plan.left_out)}; set ram_bytes by "
            "hand"
        )
    return config


def prefill_for_engine(vllm_config: Any) -> PrefillTime | None:
    """The plan's estimate of how fast the engine is, where nothing else is planned: nothing is
    measured. None where the model's shape cannot be told."""
    try:
        engine, model = probe_engine(vllm_config)
        facts = Facts(probe_memory(), probe_gpus(), model=model, engine=engine)
        return make_plan(facts).prefill
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None


def chunk_tokens_for_engine(vllm_config: Any, block: int) -> int:
    """The plan's ``chunk_tokens``, from the engine's configuration alone. The scheduler and all
    workers must agree on it before anything is planned, and so they do. ``block``: the tokens of
    one engine block."""
    engine, model = probe_engine(vllm_config)
    tensor = engine.tensor_parallel.value or 1
    single = model.kv_bytes_per_token.value or TYPICAL_KV_BYTES
    hosts = engine.hosts.value or 1
    stored = stored_kv_bytes(single, model.kv_heads.value or tensor, tensor, hosts)
    return chunk_tokens(stored, block, engine.max_model_len.value or model.max_tokens.value or 1)


def compute_for_engine(vllm_config: Any, chunk_tokens: int) -> SavedCompute:
    """What hits save of the engine's model. Where its shape cannot be told, that of a typical
    one."""
    try:
        _, model = probe_engine(vllm_config)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return SavedCompute(chunk_tokens)
    parameters, attention = model.active_parameters.value, model.attention_flops.value
    if not parameters or attention is None:
        return SavedCompute(chunk_tokens)
    return SavedCompute(chunk_tokens, balance(parameters, attention), "the model's config.json")
