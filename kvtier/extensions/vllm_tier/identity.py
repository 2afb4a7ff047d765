"""Names for the chunks of an engine under vLLM's OffloadingConnector.

vLLM's key of a chunk is a hash over tokens, salt, and the names of adapters and media. This adds
what decides the bytes: vLLM's configuration by the closed table of kvtier's own connector, the
weights by their content, and the shape of a chunk. Where one of these is only a name here, a random
word is part of it, and what is kept is of use to this start of the engine alone.
"""

from __future__ import annotations

import sys
from itertools import islice
from traceback import walk_stack
from typing import Any

from kvtier.connectors.vllm.identity import identity, is_local, start_word

_FORMAT = 1
_MOST_FRAMES = 16
_TOPOLOGY = (
    *("tensor_parallel_size", "disable_custom_all_reduce"),
    *("enable_sp", "fuse_gemm_comms", "fuse_allreduce_rms"),
)
"""Configuration fields that follow from the number of GPUs that share a layer."""


def engine_identity(spec: Any) -> dict[str, Any]:
    """Return the fingerprint's parts for a vLLM ``OffloadingSpec``. Reads the weight files, unless
    their digests are kept. Logs why a name is of this start only."""
    config, vllm_config = spec.config, _vllm_config()
    if vllm_config is None:
        return {"start": start_word("vLLM's configuration was not found")}
    engine = identity(vllm_config, {})
    why = _unnamed(vllm_config)
    if why and "start" not in engine:
        engine["start"] = start_word(why)
    parallel = config.parallel
    is_free = config.canonical_layout and parallel.is_parallelism_agnostic
    if is_free:
        engine["config"] = _without_topology(engine["config"])
    sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    return {
        "vllm_tier": _FORMAT,
        "engine": engine,
        "hardware": _hardware(),
        "longest": vllm_config.model_config.max_model_len,  # models choose rotary tables by it
        "dtype": config.model.dtype,
        "hash": [vllm_config.cache_config.prefix_caching_hash_algo, config.cache.tokens_per_hash],
        "chunk_blocks": config.cache.blocks_per_chunk,
        "groups": [[one.tokens_per_block, *one.layer_names] for one in config.groups],
        "layout": [config.kv_cache_layout, config.canonical_layout, spec.replicated_layout],
        "parallel": [] if is_free else [*sizes, parallel.world_size],
    }


def _vllm_config() -> Any:
    """Find vLLM's configuration in the frame of the caller that makes the tiers: a tier is given
    only a digest of it, without what names the model's content."""
    frames = islice(walk_stack(sys._getframe()), _MOST_FRAMES)
    found = (frame.f_locals.get("vllm_config") for frame, _ in frames)
    return next((one for one in found if hasattr(one, "model_config")), None)


def _unnamed(vllm_config: Any) -> str:
    """Return why vLLM's keys and the weights' files do not name all that decides, or ""."""
    model, algorithm = vllm_config.model_config, vllm_config.cache_config.prefix_caching_hash_algo
    if not is_local(vllm_config):
        return f"the weights of {model.model} are not local files"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "vLLM's keys have adapters by their names alone"
    if model.is_multimodal_model:
        return "vLLM's keys have media by names that a client may give"
    if not str(algorithm).startswith("sha256"):
        return f"prefix_caching_hash_algo={algorithm} may give two prompts one key; sha256 does not"
    return ""


def _without_topology(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: _without_topology(one) for name, one in config.items() if name not in _TOPOLOGY}


def _hardware() -> str:
    """Name the hardware as ranks do, without opening a GPU in the scheduler's process."""
    from vllm.platforms import current_platform

    from kvtier.connectors.vllm.worker_side.loaded import hardware

    device = current_platform.device_type
    if device == "cpu":
        return hardware(device)
    return f"{device} {current_platform.get_device_capability()}"
