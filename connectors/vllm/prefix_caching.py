"""Whether prefixes may be served in an engine at all: one rule, asked in every process.

vLLM's prefix caching is off because the user, the platform or the model has turned it off. Only the
user's wish may be passed over: it is about vLLM's own cache. The others know why a part of a prompt
must not be taken from anywhere. Then kvtier keeps and serves nothing, and the engine runs on.

``README.md`` beside this file has each place in vLLM's source that turns prefix caching off or
restricts it. A test fails when a vLLM has another one.
"""

from __future__ import annotations

from typing import Any

from kvtier.connectors.vllm.layout import specs_of


def why_no_prefixes(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why kvtier must keep and serve nothing in this engine. Empty: it may, also where the user
    turned prefix caching off.

    Workers are asked too, once the model is loaded: an attention layer turns prefix caching off
    in its own process only.
    """
    return _of_model(vllm_config.model_config, kv_cache_config) or (
        "" if vllm_config.cache_config.enable_prefix_caching else _of_engine(vllm_config)
    )


def _of_model(model: Any, kv_cache_config: Any) -> str:
    """The model's reason, whatever the user wishes."""
    groups = kv_cache_config.kv_cache_groups
    specs = (one for group in groups for one in specs_of(group.kv_cache_spec))
    if any(getattr(spec, "non_causal", False) for spec in specs):
        return "this model's KV of a token depends on those behind it (a prefix LM)"
    if not model.is_prefix_caching_supported:
        names = ", ".join(model.architectures)
        return f"vLLM can compute no part of a prompt by itself for {names} as it is used here"
    return ""


def _of_engine(vllm_config: Any) -> str:
    """What turned prefix caching off, if it was not the user: batch invariance, or the platform,
    because its kernels do not continue a prefix as they computed it."""
    from vllm import envs
    from vllm.platforms import CpuArchEnum, current_platform

    if envs.VLLM_BATCH_INVARIANT:
        return "prefix caching is off and answers are to be equal to the bit (batch invariance)"
    if current_platform.is_out_of_tree():
        return "prefix caching is off, and this platform's plug-in may have its reasons"
    if not current_platform.is_cpu():
        return ""
    if vllm_config.model_config.use_mla:
        return "vLLM allows no prefix caching for MLA on this CPU"
    if current_platform.get_cpu_architecture() == CpuArchEnum.RISCV:
        return "vLLM allows no prefix caching on RISC-V"
    return ""
