"""The engine's configuration and the model's: KV bytes a token, parameters and weights, from a
Hugging Face ``config.json``.

One token's KV has ``2 * kv_heads * head_dim * item`` bytes a layer (keys and values). With
multi-head latent attention (MLA) it is one shared row of ``kv_lora_rank + qk_rope_head_dim``.
Layers with linear attention or a state space keep a state per request and not per token, so they
count nothing here.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.autoconfig.facts import Model, Serving
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact, known, unknown
from kvtier.core.processes import environment

HfConfig = Mapping[str, Any]

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd")
_ITEM_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "int8": 1,
}

_DEFAULTS: dict[str, HfConfig] = {
    # Values that a family's published config.json leaves to its class.
    "gemma2": {"sliding_window_pattern": 2, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2304,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "cohere2": {"sliding_window_pattern": 4},
}


def usual(why: str) -> Model:
    """Return the model to plan for if none is known, for the reason ``why``."""
    source = "usual for models of 8 billion parameters"
    return replace(
        Model(*[unknown(why)] * 8),
        attention_flops=known(2 * 32 * 32 * 128, source),
        max_tokens=known(131_072, source),
    )


class KVShape(NamedTuple):
    """Shape of one token's KV, one copy. ``global_layers`` see the whole context."""

    bytes_per_token: int
    global_bytes_per_token: int
    global_layers: int
    kv_heads: int


def text_config(config: HfConfig) -> HfConfig:
    """Return a config's part for the language model, with inherited dtype and family's defaults."""
    inner: HfConfig = config
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            inherited = {
                k: config[k] for k in ("torch_dtype", "dtype", "quantization_config") if k in config
            }
            inner = {**inherited, **config[name]}
            break
    defaults = _DEFAULTS.get(str(inner.get("model_type")), {})
    return {**defaults, **{k: v for k, v in inner.items() if v is not None or k not in defaults}}


def _need(config: HfConfig, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    kind = config.get("model_type", "unknown type")
    raise ConfigError(
        f"config.json of {kind} has none of {', '.join(names)}; give the language model's "
        "own config"
    )


def _heads(config: HfConfig) -> tuple[int, int]:
    heads = _need(config, "num_attention_heads", "n_head")
    return heads, int(config.get("head_dim") or _need(config, *_HIDDEN) // heads)


def _layer_kinds(config: HfConfig) -> list[str]:
    count = _need(config, *_LAYERS)
    shared = int(config.get("num_kv_shared_layers") or 0)
    kinds = config.get("layer_types")
    if not kinds:
        pattern, period = config.get("sliding_window_pattern"), config.get("attn_layer_period")
        windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
        if period:
            offset = int(config.get("attn_layer_offset", 0))
            kinds = ["full_attention" if i % period == offset else "state" for i in range(count)]
        elif windowed and pattern:
            kinds = [
                "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
                for i in range(count)
            ]
        else:
            kinds = ["sliding_attention" if windowed else "full_attention"] * count
    return list(kinds)[: count - shared]


def _kv_item_bytes(config: HfConfig, kv_dtype: str) -> int:
    quantized = config.get("quantization_config") or {}
    scheme = quantized.get("kv_cache_scheme") or {}
    if kv_dtype == "auto" and (
        scheme.get("num_bits") == 8 or quantized.get("kv_cache_quant_algo") == "FP8"
    ):
        return 1
    name = _dtype(config) if kv_dtype == "auto" else kv_dtype.removeprefix("torch.")
    if name not in _ITEM_BYTES:
        raise ConfigError(
            f"KV dtype {name!r} is not known; expected auto or one of {', '.join(_ITEM_BYTES)}"
        )
    return _ITEM_BYTES[name]


def _dtype(config: HfConfig) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return str(name).removeprefix("torch.")


def kv_shape(config: HfConfig, kv_dtype: str = "auto") -> KVShape:
    """Read the KV's shape. ConfigError if a key is missing, or no layer keeps KV by token."""
    config = text_config(config)
    kinds = _layer_kinds(config)
    whole = sum("full" in kind or kind in ("attention", "global_attention") for kind in kinds)
    windowed = sum(any(word in kind for word in ("sliding", "chunked", "local")) for kind in kinds)
    if not whole + windowed:
        raise ConfigError("the model has no attention layer: there is no KV by token to cache")
    item = _kv_item_bytes(config, kv_dtype)
    if config.get("kv_lora_rank"):
        kv_heads = 1
        row = (int(config["kv_lora_rank"]) + _need(config, "qk_rope_head_dim")) * item
    else:
        heads, head_dim = _heads(config)
        kv_heads = int(config.get("num_key_value_heads") or config.get("num_kv_heads") or 0)
        kv_heads = kv_heads or (1 if config.get("multi_query") else heads)
        row = 2 * kv_heads * head_dim * item
    return KVShape((whole + windowed) * row, whole * row, whole, kv_heads)


def parameters(config: HfConfig) -> tuple[int, int]:
    """Count all parameters, and those active for one token, by the usual formula for decoders,
    without norms and biases (less than 0.1 %). ConfigError if layers are not of one kind."""
    config = text_config(config)
    if not all("attention" in kind and "linear" not in kind for kind in _layer_kinds(config)):
        raise ConfigError(
            "the parameters of a model with state or linear-attention layers are not counted"
        )
    layers, hidden = _need(config, *_LAYERS), _need(config, *_HIDDEN)
    heads, head_dim = _heads(config)
    attention = 2 * hidden * heads * head_dim
    if config.get("kv_lora_rank"):
        rank, rope = int(config["kv_lora_rank"]), _need(config, "qk_rope_head_dim")
        nope, value = _need(config, "qk_nope_head_dim"), _need(config, "v_head_dim")
        query, query_in = int(config.get("q_lora_rank") or 0), heads * (nope + rope)
        attention = hidden * query + query * query_in if query else hidden * query_in
        attention += hidden * (rank + rope)
        attention += rank * heads * (nope + value) + heads * value * hidden
    else:
        attention += 2 * hidden * kv_shape(config, "bfloat16").kv_heads * head_dim
    wide = int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = int(next(filter(None, map(config.get, names)), 0))
    tables = 1 if config.get("tie_word_embeddings") else 2
    embedding = _need(config, "vocab_size") * hidden * tables
    dense = layers if not experts else int(config.get("first_k_dense_replace") or 0)
    base = embedding + layers * attention + dense * 3 * hidden * wide
    expert = 3 * hidden * int(config.get("moe_intermediate_size") or wide) * (layers - dense)
    used = int(config.get("num_experts_per_tok") or 0)
    base += int(config.get("n_shared_experts") or 0) * expert
    return base + experts * expert, base + used * expert


def _weight_item_bytes(config: HfConfig) -> float:
    quantized = config.get("quantization_config") or {}
    groups = quantized.get("config_groups") or {}
    bits = [(group.get("weights") or {}).get("num_bits") for group in groups.values()]
    if width := next(filter(None, [*bits, quantized.get("bits")]), None):
        return float(width) / 8
    if quantized.get("quant_method") == "fp8":
        return 1.0
    return float(_ITEM_BYTES.get(_dtype(config), 2))


def describe(
    config: HfConfig, name: str, kv_dtype: str = "auto", weight_bytes: Fact[int] | None = None
) -> Model:
    """Describe a model for :mod:`.plan`. ``weight_bytes``: of the files, if they were found."""
    shape, text = kv_shape(config, kv_dtype), text_config(config)
    source = f"config.json, KV dtype {kv_dtype}"
    heads, head_dim = _heads(text)
    active: Fact[int] = unknown("the parameters cannot be counted from this config.json")
    weights = weight_bytes or unknown(
        "only a config.json was given, and its parameters cannot be counted"
    )
    try:
        total, used = parameters(text)
        active = known(used, "counted from config.json")
        if weights.value is None:
            size = int(total * _weight_item_bytes(text))
            weights = known(
                size, f"estimated: {total / 1e9:.1f} billion parameters counted from config.json"
            )
    except ConfigError:
        pass
    longest = text.get("max_position_embeddings") or text.get("n_positions")
    return Model(
        name=known(name, "given"),
        kv_bytes_per_token=known(shape.bytes_per_token, source),
        kv_bytes_global=known(shape.global_bytes_per_token, source),
        kv_heads=known(shape.kv_heads, source),
        weight_bytes=weights,
        active_parameters=active,
        attention_flops=known(2 * shape.global_layers * heads * head_dim, source),
        max_tokens=known(int(longest), "config.json")
        if longest
        else unknown("config.json names no longest context"),
    )


# ---- looks at this host -------------------------------------------------------------------------


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
