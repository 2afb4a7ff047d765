"""The engine's configuration, and the model's."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.autoconfig.facts import Model, Serving
from kvtier.autoconfig.model import describe
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact, known, unknown
from kvtier.core.processes import environment


def probe_engine(vllm_config: Any, engines: int = 1) -> tuple[Serving, Model]:
    """Read attributes of the engine's configuration object, without importing vLLM."""
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
        else snapshot(name, environment(), getattr(model, "revision", None))
    )
    weights = probe_weights(folder) if folder else unknown("the weights are not in a local folder")
    return engine, describe(config, name, kv_dtype, weights)


def probe_model(place: str, kv_dtype: str = "auto") -> Model:
    """Read a model folder, its ``config.json``, or a name in this host's hub cache. Raises
    ConfigError for anything else, and if a needed key is missing."""
    path, source = Path(place), "given"
    if not path.exists():
        path = model_folder(place, environment())
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
    """Count the weights' bytes: from the safetensors index, else the files, else the .bin files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return known(int(index["metadata"]["total_size"]), "model.safetensors.index.json")
    for pattern in ("*.safetensors", "*.bin"):
        if sizes := [file.stat().st_size for file in folder.glob(pattern)]:
            return known(sum(sizes), f"{len(sizes)} {pattern} files")
    return unknown(f"no .safetensors or .bin file in {folder}")


_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def hub_cache_folder(env: Mapping[str, str]) -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(variable):
            return Path(env[variable]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def snapshot(name: str, env: Mapping[str, str], revision: str | None = None) -> Path | None:
    """Find the cached folder of a hub name at ``revision`` (default: main, or the newest that is
    cached). None without a ``config.json``, or if it is no hub name."""
    if not _NAME.fullmatch(name):
        return None
    place = _hub_folder(name, env)
    try:
        commit = (place / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision or ""
    if commit:
        named = place / "snapshots" / commit
        return named if (named / "config.json").is_file() else None
    found = [file for file in place.glob("snapshots/*/config.json") if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def model_folder(name: str, env: Mapping[str, str]) -> Path:
    found = snapshot(name, env)
    if found is not None:
        return found
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--model {name}: no such file or folder; expected a local model folder, its "
            "config.json, or a name on the hub such as Qwen/Qwen2.5-7B-Instruct"
        )
    raise ConfigError(
        f"--model {name}: there is no such folder here, and nothing of that name in the hub cache "
        f"(looked for {_hub_folder(name, env)}/snapshots/*/config.json; the network is never "
        f"asked): run 'hf download {name} config.json', or give "
        "a local model folder or its config.json"
    )


def _hub_folder(name: str, env: Mapping[str, str]) -> Path:
    return hub_cache_folder(env) / f"models--{name.replace('/', '--')}"
