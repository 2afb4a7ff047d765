"""vLLM's planner of cache groups, which lies in a module of its own from 0.33 on. vLLM is imported
when it is asked."""

import importlib


def _planner():
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def of_specs(config, specs, memory):
    """The plan of a worker with these layers and so many bytes."""
    planner, every = _planner(), [dict(specs)]
    if hasattr(planner, "get_global_kv_cache_groups"):
        groups = planner.get_global_kv_cache_groups(config, every)
        (plan,) = planner.get_kv_cache_configs(config, every, [memory], groups)
    else:
        (plan,) = planner.get_kv_cache_configs(config, every, [memory])
    return plan


def of_groups(config, groups, memory):
    """The plan of groups that are known."""
    return _planner().get_kv_cache_config_from_groups(config, groups, memory)
