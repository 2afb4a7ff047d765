"""vLLM's KV cache configuration -> ChunkLayout, and which models are refused or left alone, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtier.connectors.vllm.identity import identity, start_word
from kvtier.connectors.vllm.metadata import RankLayout
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import LayoutError

_ONLY_FULL = "kvtier keeps full-attention KV only (MHA, GQA, MLA). Run this model without the kvtier connector"


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens of one engine block. Raises LayoutError, naming model state kvtier does not keep."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise LayoutError(
            f"this model's KV cache has {len(groups)} groups ({kinds}); kvtier keeps models with one. Sliding-window "
            "and full attention together work when vLLM's hybrid KV cache manager is off "
            "(--disable-hybrid-kv-cache-manager, its default with this connector)"
        )
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    for one in specs:
        if not isinstance(one, FullAttentionSpec):
            raise LayoutError(
                f"this model's KV cache is {type(one).__name__}, which drops or overwrites what a prefix needs: "
                f"{_ONLY_FULL}"
            )
    return int(spec.block_size)


def chunk_tokens(configured: int, default: int, block: int) -> int:
    """Tokens a chunk: what is configured; the untouched default grows to the next whole number of blocks."""
    if configured == default and configured % block:
        return -(-configured // block) * block
    return configured


def chunk_layout(
    vllm_config: Any, kv_cache_config: Any, ranks: Mapping[tuple[int, int], RankLayout], chunk_tokens: int
) -> tuple[ChunkLayout, tuple[tuple[int, bool], ...]]:
    """The layout of chunks for this engine, and for each rank ``(first byte in the slot, writes it)``.

    ``ranks`` is keyed by (pp rank, tp rank). Ranks of one pipeline stage that hold identical KV in every layer (MLA's
    latent, but not beside a draft model with heads of its own) share one part, written by the first of them.
    """
    tokens = block_tokens(kv_cache_config)
    _refuse_context_parallel(vllm_config.parallel_config)
    _refuse_several_hosts(vllm_config.parallel_config)
    replicated = _replicated(vllm_config, kv_cache_config)
    parts: list[int] = []
    owners: list[tuple[int, bool]] = []
    first_of_stage: dict[int, int] = {}
    for (stage, _), rank in sorted(ranks.items()):
        shared = first_of_stage.get(stage) if replicated else None
        if shared is not None and parts[shared] != rank.block_bytes:
            raise LayoutError(f"ranks of stage {stage} disagree: {parts[shared]} and {rank.block_bytes} bytes a block")
        if shared is None:
            first_of_stage[stage] = len(parts)
            parts.append(rank.block_bytes)
            owners.append((len(parts) - 1, True))
        else:
            owners.append((shared, False))
    found = identity(vllm_config, ranks) | {
        "block_tokens": tokens,
        "ranks": [[*place, rank.block_bytes, rank.description, rank.model] for place, rank in sorted(ranks.items())],
    }
    layout = ChunkLayout(fingerprint(found), chunk_tokens, tokens, tuple(parts))
    return layout, tuple((layout.rank_span(part)[0], writes) for part, writes in owners)


def on_cpu(ranks: Mapping[tuple[int, int], RankLayout]) -> bool:
    """Whether the workers themselves copy between slots and blocks."""
    return all(str(rank.description["device"]).startswith("cpu") for rank in ranks.values())


def refuse_recurrent(model: Any) -> None:
    """Raise LayoutError for a model with recurrent state (mamba, short convolutions), alone or beside attention."""
    if model.is_hybrid or model.is_attention_free:
        raise LayoutError(
            f"{', '.join(model.architectures)} keeps recurrent state (mamba, convolutions), which cannot be cut into "
            f"chunks: {_ONLY_FULL}"
        )


def why_no_prefixes(vllm_config: Any) -> str:
    """Why kvtier has to leave this engine alone: the platform has turned prefix caching off because its kernels do not
    continue a prefix as they computed it. "" when it may serve; also when it was the user who turned it off."""
    from vllm.platforms import CpuArchEnum, current_platform

    if vllm_config.cache_config.enable_prefix_caching or not current_platform.is_cpu():
        return ""
    if vllm_config.model_config.use_mla:
        return "vLLM allows no prefix caching for MLA on this CPU"
    if current_platform.get_cpu_architecture() == CpuArchEnum.RISCV:
        return "vLLM allows no prefix caching on RISC-V"
    return ""


def of_namespace(layout: ChunkLayout, namespace: str) -> ChunkLayout:
    """The same layout with keys of its own, which nobody outside the namespace can name."""
    return replace(layout, fingerprint=fingerprint({"of": layout.fingerprint.hex(), "namespace": namespace}))


def start_only(layout: ChunkLayout, why: str) -> ChunkLayout:
    """The same layout with keys that no other start of any engine can name."""
    return replace(layout, fingerprint=fingerprint({"of": layout.fingerprint.hex(), "start": start_word(why)}))


def _replicated(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether all tensor ranks hold the same KV. Before 0.32 vLLM does not count them, and MLA has to do for it."""
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is None:
        return bool(vllm_config.model_config.use_mla)
    return bool(replicas == vllm_config.parallel_config.tensor_parallel_size)


def _refuse_several_hosts(parallel: Any) -> None:
    hosts = getattr(parallel, "nnodes", 1)
    if hosts > 1:
        raise LayoutError(
            f"nnodes={hosts}: the workers of one engine share kvtier's RAM, so they have to be on one host. Run an "
            "engine on each host, or this one without the kvtier connector"
        )


def _refuse_context_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(
                f"{name}={getattr(parallel, name)}: kvtier does not keep context-parallel KV; set it to 1"
            )
