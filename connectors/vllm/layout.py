"""vLLM's KV cache configuration -> ChunkLayout: what makes KV bytes equal, and which models are refused by name."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvtier.chunk import PAGE_BYTES, ChunkLayout, fingerprint
from kvtier.connectors.vllm.metadata import RankLayout
from kvtier.errors import LayoutError
from kvtier.layerwise import cut

logger = logging.getLogger("kvtier.connectors.vllm")

_ONLY_FULL = "kvtier keeps full-attention KV only (MHA, GQA, MLA). Run this model without the kvtier connector"
_FORMAT = 1
"""Version of the bytes inside a slot; raise it when their meaning changes."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


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

    ``ranks`` is keyed by (pp rank, tp rank). Ranks of one pipeline stage that hold identical KV (MLA's latent) share
    one part, written by the first of them.
    """
    tokens = block_tokens(kv_cache_config)
    _refuse_context_parallel(vllm_config.parallel_config)
    replicated = bool(vllm_config.model_config.use_mla)
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
    identity = _identity(vllm_config) | {
        "block_tokens": tokens,
        "ranks": [[*place, rank.block_bytes, rank.description] for place, rank in sorted(ranks.items())],
    }
    layout = ChunkLayout(fingerprint(identity), chunk_tokens, tokens, tuple(parts))
    return layout, tuple((layout.rank_span(part)[0], writes) for part, writes in owners)


def layer_cuts(
    ranks: Mapping[tuple[int, int], RankLayout], layout: ChunkLayout
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """See :func:`kvtier.layerwise.cut`. None where layers cannot be loaded by themselves: with several ranks, whose
    parts of a slot lie one behind the other, on GPUs, and in caches whose layers lie together in a block."""
    if len(ranks) != 1:
        return None
    (rank,) = ranks.values()
    rows = rank.description["row_bytes"]
    if not rank.loads_regions or len(rows) < 2:
        return None
    return cut(list(accumulate(row * layout.blocks_per_chunk for row in rows)), PAGE_BYTES, layout.slot_bytes)


def refuse_recurrent(model: Any) -> None:
    """Raise LayoutError for a model with recurrent state (mamba, short convolutions), alone or beside attention."""
    if model.is_hybrid or model.is_attention_free:
        raise LayoutError(
            f"{', '.join(model.architectures)} keeps recurrent state (mamba, convolutions), which cannot be cut into "
            f"chunks: {_ONLY_FULL}"
        )


def attention_backends(vllm_config: Any) -> list[str]:
    """Names of the attention backends of this process's layers; a worker's, after the model is loaded."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})


def of_namespace(layout: ChunkLayout, namespace: str) -> ChunkLayout:
    """The same layout with keys of its own, which nobody outside the namespace can name."""
    return replace(layout, fingerprint=fingerprint({"of": layout.fingerprint.hex(), "namespace": namespace}))


def _refuse_context_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(
                f"{name}={getattr(parallel, name)}: kvtier does not keep context-parallel KV; set it to 1"
            )


def _identity(vllm_config: Any) -> dict[str, Any]:
    """Everything but the layout that decides KV bytes. Ids of machine, process and path are left out on purpose."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None) if speculative else None
    return {
        "format": _FORMAT,
        "model": _model_identity(model, vllm_config.load_config),
        "draft": _model_identity(draft, vllm_config.load_config) if draft is not None else None,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
    }


def _model_identity(model: Any, load: Any) -> dict[str, Any]:
    config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"):
        config.pop(volatile, None)
    identity = {"config": json.loads(json.dumps(config, sort_keys=True, default=str))}
    if str(load.load_format).endswith("dummy"):
        return identity | {"dummy_seed": model.seed}
    folder = _model_folder(model)
    if folder is None:
        logger.warning("no local weight files of %s: its cache is keyed by name and revision only", model.model)
        return identity | {"name": model.model, "revision": model.revision}
    return identity | {"weights": weights_digest(folder)}


def _model_folder(model: Any) -> Path | None:
    folder = Path(model.model)
    if folder.exists():
        return folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(cached).parent if isinstance(cached, str) else None


def weights_digest(path: Path) -> str:
    """Hex digest of the weight files under ``path``: every file's name and size, and 64 samples of 4 KiB of each.

    A sample, not a full read: 70B weights take milliseconds. Another checkpoint of the same model differs nearly
    everywhere, so it differs in the samples.
    """
    return files_digest(_weight_files(path))


def files_digest(files: Iterable[Path]) -> str:
    """See :func:`weights_digest`. Raises OSError when a file cannot be read."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _weight_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)
