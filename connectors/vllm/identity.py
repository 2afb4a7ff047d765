"""What decides an engine's KV bytes besides the layout: model, weights and numeric types. It runs
in the scheduler's process.

Equal identities must mean equal bytes. Where it is unknown which weights run, the identity
contains a random word. Such a cache serves this start of the engine and no other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import RankLayout

logger = logging.getLogger("kvtier.connectors.vllm")

_FORMAT = 2
"""The version of the bytes in a slot. Raise it when their meaning changes."""
_NAME = "_name_or_path"
_VOLATILE = frozenset((_NAME, "transformers_version", "architectures", "torch_dtype", "dtype"))
"""Fields of a configuration that tell where it lies and who wrote it, or what is told elsewhere."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_FROM_FOLDER = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "pt",
    "npcache",
    "mistral",
    "gguf",
    "bitsandbytes",
    "sharded_state",
    "runai_streamer",
    "runai_streamer_sharded",
)
"""vLLM's load formats that read the weight files of the model's own folder, unless
``model_weights`` names another place."""


def identity(vllm_config: Any, ranks: Mapping[tuple[int, int], RankLayout]) -> dict[str, Any]:
    """The identity, which can be written as JSON. Ids of machine and process and the names of local
    folders are left out on purpose."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    models = _models(vllm_config)
    found = {
        "format": _FORMAT,
        "models": [_model(one) for one in models],
        "weights": [_weights(one, vllm_config.load_config, ranks) for one in models],
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
    }
    unknown = _unknown(vllm_config, ranks)
    return found | {"start": start_word(unknown)} if unknown else found


def start_word(why: str) -> str:
    """A random word that makes the keys valid for this start only. It logs why, once a call."""
    logger.warning("%s: what kvtier keeps is of use to this start of the engine only", why)
    return secrets.token_hex(16)


def _unknown(vllm_config: Any, ranks: Mapping[tuple[int, int], RankLayout]) -> str:
    """Why equal identities might not mean equal bytes in this engine. "" when they do."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales takes the KV scales from the first prompts"
    if any(rank.model is None for rank in ranks.values()):
        return "the loaded model's layers cannot be looked at"
    hidden = [one for one in _models(vllm_config) if not _files(one, vllm_config.load_config)]
    if hidden and any(rank.weights is None for rank in ranks.values()):
        return (
            f"the weights of {_source(hidden[0])} can be read neither from local files nor from "
            "the loaded model"
        )
    return ""


def _models(vllm_config: Any) -> list[Any]:
    """The configurations of the model and of its draft model, if there is one."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None) if speculative else None
    return [one for one in (vllm_config.model_config, draft) if one is not None]


def _model(model: Any) -> dict[str, Any]:
    media = getattr(model, "multimodal_config", None)
    config = {
        name: _without_folders(value)
        for name, value in model.hf_config.to_dict().items()
        if name not in _VOLATILE
    }
    found = {"config": config, "processor": getattr(media, "mm_processor_kwargs", None)}
    plain: dict[str, Any] = json.loads(json.dumps(found, sort_keys=True, default=str))
    return plain


def _without_folders(value: Any) -> Any:
    """A configuration inside another one (an EAGLE draft's has its model's) without the names of
    local folders. All else in it stays, empty names too: older versions named chunks with it, so
    what they wrote would not be found without it."""
    if not isinstance(value, dict):
        return value
    return {
        name: _without_folders(inner)
        for name, inner in value.items()
        if name != _NAME or not os.path.isdir(str(inner))
    }


# ---- weights -------------------------------------------------------------------------------------


def _weights(model: Any, load: Any, ranks: Mapping[tuple[int, int], RankLayout]) -> dict[str, Any]:
    """The weights by the content of the files that vLLM reads. Where those are not local: by their
    name, and by what every rank sees in the model that it has loaded."""
    files = _files(model, load)
    if files:
        return {"files": files_digest(files)}
    return {"from": _source(model), "loaded": [rank.weights for _, rank in sorted(ranks.items())]}


def _source(model: Any) -> str:
    """The name of a checkpoint that is not a local folder."""
    return f"{getattr(model, 'model_weights', '') or model.model} (revision {model.revision})"


def _files(model: Any, load: Any) -> list[Path]:
    """The local files from which the model's weights are read. Empty if there are none, or if they
    lie elsewhere."""
    load_format = str(getattr(load.load_format, "value", load.load_format)).lower()
    if getattr(model, "model_weights", "") or load_format not in _FROM_FOLDER:
        return []
    place = Path(model.model)
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
        if not isinstance(cached, str):
            return []
        place = Path(cached).parent
    if place.is_file():
        return [place]
    return sorted(file for file in place.iterdir() if file.suffix in _WEIGHTS)


def files_digest(files: Iterable[Path]) -> str:
    """Hex digest of files: the name, the size, and 64 samples of 4 KiB of each. Raises OSError when
    a file cannot be read.

    It samples and does not read all, so 70B weights take milliseconds. Another checkpoint of the
    same model differs nearly everywhere, so it differs in the samples.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
