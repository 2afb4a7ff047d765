"""Auto-config at the start of an engine or a server (the key ``engine.auto``)."""

from __future__ import annotations

import logging
from typing import Any

from kvtier.autoconfig.draft import Plan
from kvtier.autoconfig.explain import PLANNED, summary, table, value_text
from kvtier.autoconfig.facts import Facts, Model, Serving
from kvtier.autoconfig.measure import measure
from kvtier.autoconfig.model import usual
from kvtier.autoconfig.plan import make_plan
from kvtier.autoconfig.probe.gpus import probe_gpus
from kvtier.autoconfig.probe.memory import probe_memory
from kvtier.autoconfig.probe.model import probe_engine
from kvtier.config.keys import Config
from kvtier.config.load import filled
from kvtier.core.errors import ConfigError
from kvtier.core.fact import known
from kvtier.eviction.saved_compute import SavedCompute, balance
from kvtier.load_policy.prefill import PrefillTime
from kvtier.tiers.nvme.disks import probe_disks, reusable
from kvtier.tiers.registry import configured

logger = logging.getLogger("kvtier")


def probe_host(config: Config, model: Model, engine: Serving, *, server: bool = False) -> Facts:
    """Facts for ``model`` and ``engine``, or a ``server``. Candidates for a disk tier are the usual
    mounts where ``config`` names no folder."""
    disks = probe_disks([str(folder) for folder in config.nvme.folders()])
    return Facts(
        probe_memory(),
        probe_gpus(),
        tuple(reusable(disk, server=server) for disk in disks),
        model,
        engine,
        tiers={tier.name: tier.probe(own) for tier, own in configured(config.tiers)},
    )


def plan_for_engine(vllm_config: Any, config: Config) -> Plan:
    """Probe, measure (at most 5 s) and plan for a vLLM engine that starts on this host. Raises
    ConfigError when the model keeps no KV by token."""
    engine, model = probe_engine(vllm_config, config.engine.host_engines)
    return make_plan(measure(probe_host(config, model, engine)))


def settled(given: Config, plan: Plan) -> Config:
    """``given`` with logged values of the plan for the keys that are not set. Raises ConfigError
    where there is no room for a RAM tier."""
    values = plan.values()
    config = filled(given, values, PLANNED)
    for line in table(plan, config).splitlines():
        logger.debug("auto-config: %s", line)
    logger.info("auto-config: %s", summary(plan, config))
    for warning in plan.warnings:
        logger.warning("auto-config: %s", warning)
    if "ram_bytes" not in values and given.ram.bytes_ is None:
        raise ConfigError(
            f"auto-config finds no room for a RAM tier: {dict(plan.left_out)}; set ram_bytes by "
            "hand"
        )
    return config


def prefill_for_engine(vllm_config: Any) -> PrefillTime | None:
    """The plan's estimate of the engine's speed, without measuring. None for an unknown model's."""
    try:
        engine, model = probe_engine(vllm_config)
        facts = Facts(probe_memory(), probe_gpus(), model=model, engine=engine)
        return make_plan(facts).prefill
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None


def compute_for_engine(vllm_config: Any, chunk_tokens: int) -> SavedCompute:
    """Compute that hits save of the engine's model, or of a typical one where it is unknown."""
    try:
        _, model = probe_engine(vllm_config)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return SavedCompute(chunk_tokens)
    parameters, attention = model.active_parameters.value, model.attention_flops.value
    if not parameters or attention is None:
        return SavedCompute(chunk_tokens)
    return SavedCompute(chunk_tokens, balance(parameters, attention), "the model's config.json")


logger = logging.getLogger("kvtier")


def sized(config: Config) -> Config:
    """``config`` with auto-config's sizes for one server, which all ranks and engines that attach
    share. Each size's reason is logged: a later plan would say something else. Takes at most 5 s.
    Raises ConfigError as an engine does."""
    if not config.engine.auto:
        return config
    one = known(1, "one server")
    serving = Serving(one, one, one, engines=known(config.engine.host_engines, "host_engines"))
    facts = probe_host(config, usual("a server is told no model"), serving, server=True)
    plan = make_plan(measure(facts))
    full = settled(config, plan)
    for row in plan.settings:
        if full.source(row.key) == PLANNED:
            size = value_text(row.key, row.value)
            logger.info("auto-config: %s %s: %s (%s)", row.key, size, row.reason, row.source)
    return full
