"""Auto-config at the start of an engine or a server (key ``engine.auto``), and its measurements.

They take :data:`MEASURE_S` at most. Memory and disks are measured with one thread. A disk with many
queues may do better than measured, so the plan errs on the slow side.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.autoconfig.draft import Plan
from kvtier.autoconfig.explain import PLANNED, summary, table, value_text
from kvtier.autoconfig.facts import MIB, Facts, Model, Serving
from kvtier.autoconfig.gpus import probe_gpus
from kvtier.autoconfig.memory import probe_memory
from kvtier.autoconfig.model import probe_engine, usual
from kvtier.autoconfig.plan import make_plan
from kvtier.config.keys import Config
from kvtier.config.load import filled
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact, known, rate, unknown
from kvtier.eviction.saved_compute import SavedCompute, balance
from kvtier.load_policy.prefill import PrefillTime
from kvtier.tiers.nvme.disks import (
    NETWORK_FILESYSTEMS,
    RAM_FILESYSTEMS,
    Disk,
    open_direct,
    probe_disks,
    reusable,
)
from kvtier.tiers.registry import configured
from kvtier.tiers.seam import TierFacts

MEASURE_S = 5.0
_BLOCK_BYTES = 4 * MIB
_COPY_BYTES = 64 * MIB
_FILE_BLOCKS = 64
_FREE_PARTS = 8
"""Parts of the free space, of which a trial file takes one at most."""


def measure(facts: Facts, seconds: float = MEASURE_S) -> Facts:
    """Measure the speeds in ``facts``. A failure is an unknown fact with its reason. A trial stops
    when its share of ``seconds`` is used up, but for the operation (4 MiB) that has begun."""
    copy = _copy_speed(seconds * 0.1)
    worth = [disk for disk in facts.disks if _can_time(disk)]
    share = seconds * 0.5 / max(1, len(worth))
    disks = tuple(_timed_disk(disk, share) if disk in worth else disk for disk in facts.disks)
    timed = sum(type(found).measured is not TierFacts.measured for found in facts.tiers.values())
    each = seconds * 0.4 / max(2, timed)
    tiers = {name: found.measured(each) for name, found in facts.tiers.items()}
    return replace(facts, copy_speed=copy, disks=disks, tiers=tiers)


def _copy_speed(seconds: float) -> Fact[float]:
    with mmap.mmap(-1, _COPY_BYTES) as source, mmap.mmap(-1, _COPY_BYTES) as target:
        source[:] = b"\1" * _COPY_BYTES
        target[:] = b"\2" * _COPY_BYTES  # the pages are present before the clock starts
        with memoryview(source) as src, memoryview(target) as dst:

            def copy(_: int) -> int:
                dst[:] = src
                return _COPY_BYTES

            return known(rate(copy, seconds, 64), "measured, one thread")


def _can_time(disk: Disk) -> bool:
    kind = disk.filesystem.value or ""
    if disk.read_speed.value is not None:  # a what-if option gave it
        return False
    return (
        bool(disk.o_direct.value)
        and kind not in RAM_FILESYSTEMS
        and (disk.free.value or 0) >= _FREE_PARTS * _BLOCK_BYTES
    )


def _timed_disk(disk: Disk, seconds: float) -> Disk:
    place = Path(disk.path)
    while not place.is_dir():
        place = place.parent
    blocks = max(1, min(_FILE_BLOCKS, (disk.free.value or 0) // _FREE_PARTS // _BLOCK_BYTES))
    try:
        with open_direct(place) as fd, mmap.mmap(-1, _BLOCK_BYTES) as buffer:
            buffer[:] = os.urandom(_BLOCK_BYTES)
            rate(lambda i: os.pwrite(fd, buffer, i * _BLOCK_BYTES), seconds / 2, blocks)
            whole = max(1, os.fstat(fd).st_size // _BLOCK_BYTES)
            speed = rate(
                lambda i: os.preadv(fd, [buffer], i * 7 % whole * _BLOCK_BYTES),
                seconds / 2,
                4 * blocks,
            )
    except OSError as error:
        return replace(disk, read_speed=unknown(f"O_DIRECT trial failed: {error}"))
    note = "network file system, " if disk.filesystem.value in NETWORK_FILESYSTEMS else ""
    source = f"measured, {note}O_DIRECT, one thread, 4 MiB"
    return replace(disk, read_speed=known(speed, source))


logger = logging.getLogger("kvtier")


def probe_host(config: Config, model: Model, engine: Serving, *, server: bool = False) -> Facts:
    """Probe this host for ``model`` and ``engine``, or a ``server``. Candidates for a disk tier are
    the usual mounts if ``config`` names no folder."""
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
    """Fill the plan's values, logged, into ``given`` for the keys that are not set. Raises
    ConfigError if there is no room for a RAM tier."""
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
    """Return the plan's estimate of the engine's speed, unmeasured; None for an unknown model."""
    try:
        engine, model = probe_engine(vllm_config)
        facts = Facts(probe_memory(), probe_gpus(), model=model, engine=engine)
        return make_plan(facts).prefill
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None


def compute_for_engine(vllm_config: Any, chunk_tokens: int) -> SavedCompute:
    """Return the compute that hits save with the engine's model, or a typical one if unknown."""
    try:
        _, model = probe_engine(vllm_config)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return SavedCompute(chunk_tokens)
    parameters, attention = model.active_parameters.value, model.attention_flops.value
    if not parameters or attention is None:
        return SavedCompute(chunk_tokens)
    return SavedCompute(chunk_tokens, balance(parameters, attention), "the model's config.json")


def sized(config: Config) -> Config:
    """Fill in auto-config's sizes for one server, which all ranks and engines that attach share.
    Each size's reason is logged: a later plan would say something else. Takes at most 5 s. Raises
    ConfigError as an engine does."""
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
