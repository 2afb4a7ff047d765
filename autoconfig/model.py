"""KV bytes a token, parameters and weights, from a Hugging Face ``config.json``. Pure: the mapping
is given parsed.

One token's KV has ``2 * kv_heads * head_dim * item`` bytes a layer (keys and values). With
multi-head latent attention (MLA) it is one shared row of ``kv_lora_rank + qk_rope_head_dim``.
Layers with linear attention or a state space keep a state per request and not per token, so they
count nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvtier.autoconfig.facts import Model
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact, known, unknown

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

    layers: int
    global_layers: int
    kv_heads: int
    row_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.row_bytes

    @property
    def global_bytes_per_token(self) -> int:
        return self.global_layers * self.row_bytes


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
        row = (int(config["kv_lora_rank"]) + _need(config, "qk_rope_head_dim")) * item
        return KVShape(whole + windowed, whole, 1, row)
    heads, head_dim = _heads(config)
    kv_heads = int(config.get("num_key_value_heads") or config.get("num_kv_heads") or 0)
    kv_heads = kv_heads or (1 if config.get("multi_query") else heads)
    return KVShape(whole + windowed, whole, kv_heads, 2 * kv_heads * head_dim * item)


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
