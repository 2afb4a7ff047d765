"""KV bytes per token and weights from config.json: the published numbers, one row a model."""

import pytest

from kvtier.autoconfig.model import describe, kv_shape, parameters
from kvtier.core.errors import ConfigError
from tests.model_configs import MODELS

KIB = 1024

PUBLISHED = [
    ("qwen2.5-1.5b", 28 * KIB),
    ("qwen2.5-7b", 56 * KIB),
    ("qwen2.5-72b", 320 * KIB),
    ("qwen3-8b", 144 * KIB),
    ("llama-3.1-8b", 128 * KIB),
    ("llama-3.1-70b", 320 * KIB),
    ("mixtral-8x7b", 128 * KIB),
    ("phi-3-mini", 384 * KIB),
    ("deepseek-v3", 61 * 576 * 2),
    ("jamba-mini", 4 * 2 * 8 * 128 * 2),
]


@pytest.mark.parametrize(("name", "expected"), PUBLISHED)
def test_kv_bytes_per_token_equal_the_published(name, expected):
    assert kv_shape(MODELS[name]).bytes_per_token == expected
    assert kv_shape(MODELS[name], "fp8").bytes_per_token * 2 == expected
    assert kv_shape(MODELS[name], "float32").bytes_per_token == expected * 2


@pytest.mark.parametrize(
    ("name", "all_layers", "global_layers"),
    [("gemma-3-27b", 62 * 8 * KIB, 10 * 8 * KIB), ("gemma-3-4b", 34 * 4 * KIB, 5 * 4 * KIB)],
)
def test_sliding_window_models_give_both_costs(name, all_layers, global_layers):
    shape = kv_shape(MODELS[name])
    assert (shape.bytes_per_token, shape.global_bytes_per_token) == (all_layers, global_layers)


def test_unused_sliding_window_is_ignored_and_layer_types_win():
    assert kv_shape(MODELS["qwen2.5-7b"]).global_layers == 28
    kinds = ["sliding_attention", "full_attention", "linear_attention", "full_attention"]
    shape = kv_shape({**MODELS["qwen2.5-7b"], "num_hidden_layers": 4, "layer_types": kinds})
    assert (shape.bytes_per_token, shape.global_layers) == (3 * 2 * KIB, 2)


@pytest.mark.parametrize(
    "quantization",
    [{"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}],
)
def test_a_checkpoint_with_fp8_kv_halves_auto_but_not_what_is_asked(quantization):
    config = {**MODELS["llama-3.1-8b"], "quantization_config": quantization}
    assert kv_shape(config).bytes_per_token == 64 * KIB
    assert kv_shape(config, "bfloat16").bytes_per_token == 128 * KIB


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen2.5-1.5b", 1.54, 1.54),
        ("qwen2.5-7b", 7.62, 7.62),
        ("qwen2.5-72b", 72.7, 72.7),
        ("llama-3.1-8b", 8.03, 8.03),
        ("llama-3.1-70b", 70.6, 70.6),
        ("mixtral-8x7b", 46.7, 12.9),
        ("deepseek-v3", 671, 37.5),
        ("phi-3-mini", 3.82, 3.82),
        ("gemma-3-27b", 27.0, 27.0),
    ],
)
def test_parameters_within_one_percent_of_the_model_cards(name, billions, active):
    total, used = parameters(MODELS[name])
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
    assert used / 1e9 == pytest.approx(active, rel=0.015)


def test_weights_are_estimated_by_dtype_and_quantization_and_say_so():
    fp8 = describe(MODELS["deepseek-v3"], "v3").weight_bytes
    assert fp8.value == pytest.approx(671e9, rel=0.01)
    assert "estimated" in fp8.source
    awq = {**MODELS["llama-3.1-8b"], "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert describe(awq, "awq").weight_bytes.value == pytest.approx(4.0e9, rel=0.01)


def test_errors_name_what_is_missing():
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        kv_shape({"model_type": "mystery"})
    with pytest.raises(ConfigError, match="fp4"):
        kv_shape(MODELS["qwen3-8b"], "fp4")
    with pytest.raises(ConfigError, match="not counted"):
        parameters(MODELS["jamba-mini"])
    assert describe(MODELS["jamba-mini"], "jamba").weight_bytes.value is None
    with pytest.raises(ConfigError, match="no attention layer"):
        kv_shape({**MODELS["qwen3-8b"], "layer_types": ["mamba"] * 36})
