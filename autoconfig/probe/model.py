"""The engine's configuration, and the model's."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.autoconfig.facts import Model, Serving
from kvtier.autoconfig.model import describe
from kvtier.autoconfig.probe import hub
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact, known, unknown
from kvtier.core.processes import environment


def probe_engine(vllm_config: Any, engines: int = 1) -> tuple[Serving, Model]:
    """The engine's own configuration object -> facts. It reads attributes and imports nothing of
    vLLM."""
    parallel, cache, model = (
        vllm_config.parallel_config,
        vllm_config.cache_config,
        vllm_config.model_config,
    )
    source = "the engine's configuration"

    def read(holder: Any, name: str) -> Fact[Any]:
        value = getattr(holder, name, None)
        return unknown(f"{source} has no {name}") if value is None else known(value, source)

    blocks = getattr(cache, "num_gpu_blocks", None)
    engine = Serving(
        tensor_parallel=read(parallel, "tensor_parallel_size"),
        pipeline_parallel=read(parallel, "pipeline_parallel_size"),
        data_parallel=read(parallel, "data_parallel_size_local"),
        hosts=read(parallel, "nnodes_within_dp"),
        expert_parallel=read(parallel, "enable_expert_parallel"),
        engines=known(engines, "given"),
        block_tokens=read(cache, "block_size"),
        max_model_len=read(model, "max_model_len"),
        kv_cache_tokens=known(blocks * cache.block_size, source)
        if blocks
        else unknown("the engine has no blocks yet"),
        started=known(bool(blocks), source),
    )
    name, kv_dtype = str(model.model), str(getattr(cache, "cache_dtype", "auto"))
    config = {**model.hf_config.to_dict(), "dtype": str(model.dtype)}
    folder = (
        Path(name)
        if Path(name).is_dir()
        else hub.snapshot(name, environment(), getattr(model, "revision", None))
    )
    weights = probe_weights(folder) if folder else unknown("the weights are not in a local folder")
    return engine, describe(config, name, kv_dtype, weights)


def probe_model(place: str, kv_dtype: str = "auto") -> Model:
    """A model folder, its ``config.json``, or a name that is in this host's hub cache. Raises
    ConfigError when it is none of them, or lacks what is needed."""
    path, source = Path(place), "given"
    if not path.exists():
        path = hub.model_folder(place, environment())
        source = f"hub cache, commit {path.name[:12]}"
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {place}: {error}; expected a local model folder or config.json"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file} contains a {type(config).__name__}, expected a model's config.json"
        )
    weights = probe_weights(path) if path.is_dir() else unknown("only a config.json was given")
    return replace(describe(config, place, kv_dtype, weights), name=known(place, source))


def probe_weights(folder: Path) -> Fact[int]:
    """Bytes of the weights: from the safetensors index, or else the files, or else the .bin
    files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return known(int(index["metadata"]["total_size"]), "model.safetensors.index.json")
    for pattern in ("*.safetensors", "*.bin"):
        if sizes := [file.stat().st_size for file in folder.glob(pattern)]:
            return known(sum(sizes), f"{len(sizes)} {pattern} files")
    return unknown(f"no .safetensors or .bin file in {folder}")
