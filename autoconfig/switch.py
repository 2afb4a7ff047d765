"""When auto-config is on, and the one call that an engine's start makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.autoconfig.plan import Plan

_SWITCHES = ("OPTION_LMCACHE_AUTO_CONFIG", "KVTIER_AUTO")
_FILES = ("KVTIER_CONFIG_FILE", "OPTION_LMCACHE_CONFIG_FILE", "LMCACHE_CONFIG_FILE")
_PROPERTY_SWITCHES = ("option.lmcache_auto_config", "lmcache_auto_config")
_PROPERTY_FILES = ("option.lmcache_config_file", "lmcache_config_file")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")


def enabled(env: Mapping[str, str], serving_properties: Mapping[str, str] | None = None) -> bool:
    """Is auto-config asked for? LMI's environment form, its ``serving.properties`` form (with and without
    ``option.``), or kvtier's own variable.

    Raises ConfigError for a value that is neither true nor false, and when a manual file is named as well.
    """
    properties = serving_properties or {}
    asked = [(name, env[name]) for name in _SWITCHES if name in env]
    asked += [(name, properties[name]) for name in _PROPERTY_SWITCHES if name in properties]
    for name, value in asked:
        if value.strip().lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{name}={value!r}: expected true or false")
    on = [name for name, value in asked if value.strip().lower() in _TRUE]
    files = [f"{name}={env[name]}" for name in _FILES if env.get(name)]
    files += [f"{name}={properties[name]}" for name in _PROPERTY_FILES if properties.get(name)]
    if on and files:
        raise ConfigError(
            f"{on[0]} asks for auto-config and {files[0]} names a manual file: remove one of the two "
            f"('kvtier plan --yaml' writes the file that auto-config would use)"
        )
    return bool(on)


def plan_for_engine(
    vllm_config: Any, paths: Sequence[str] = (), redis_url: str | None = None, *, engines: int = 1, timed: bool = True
) -> Plan:
    """Look, time (<= 5 s unless ``timed`` is false) and plan for a vLLM engine that is starting on this host.

    ``paths`` are candidate directories for the disk tier (default: the usual mounts). Raises ConfigError when the
    model keeps no KV by token.
    """
    from kvtier.autoconfig import probe
    from kvtier.autoconfig.facts import Facts
    from kvtier.autoconfig.measure import measure
    from kvtier.autoconfig.plan import make_plan

    engine, model = probe.probe_engine(vllm_config, engines)
    redis = probe.probe_redis(redis_url) if redis_url else None
    facts = Facts(probe.probe_memory(), probe.probe_gpus(), probe.probe_disks(paths), redis, model, engine)
    return make_plan(measure(facts) if timed else facts)
