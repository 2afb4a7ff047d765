"""Rows about configuration: the model's, the engine's, its environment, another vLLM."""

from dataclasses import replace

from tests.integration.engine_modes import V2_ASYNC
from tests.trust.identity.lives import newer, older
from tests.trust.identity.rows import (
    ANSWERS,
    CONTROL,
    Base,
    Row,
    config,
    engine,
    environment,
    family,
    switch,
)

_HF = "model_config.hf_config."


def longrope(folder):
    return family(
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 0.5 * index for index in range(16)],
        },
    )(folder)


def scaled(kind, **more):
    """Rotary positions of this kind."""
    return family(rope_parameters={"rope_type": kind, "rope_theta": 10000.0} | more)


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 128}  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
         "beta_slow": 1.0, "attention_factor": 1.0}  # fmt: skip


def window(folder):
    return family("mistral", sliding_window=96)(folder)


def gemma(folder):
    return family(
        "gemma3_text",
        hidden_act=None,
        query_pre_attn_scalar=32,
        sliding_window=96,
        layer_types=["sliding_attention", "full_attention"],
    )(folder)


_ROPE = "rope_parameters"

BASES = [
    Base("longrope", longrope, swept=True),
    Base("llama3", scaled("llama3", **_LLAMA3), swept=True),
    Base("yarn", scaled("yarn", **_YARN), swept=True),
    Base("linear", scaled("linear", factor=2.0)),
    Base("dynamic", scaled("dynamic", factor=2.0, alpha=2.0)),
    Base("window", window, swept=True),
    Base("gemma", gemma, swept=True),
    Base("bf16", lambda folder: family()(folder).engine_with(dtype="bfloat16")),
    Base("v2", lambda folder: replace(family()(folder), mode=V2_ASYNC)),
]


def fields(base, **given):
    """A row for each field of the model's configuration."""
    return [Row(name, base, config(name, value=value)) for name, value in given.items()]


def positions(base, **given):
    """A row for each of its rotary parameters."""
    return [
        Row(f"rope_parameters.{name} {value}", base, config(_ROPE, name, value=value))
        for name, value in given.items()
    ]


_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODEL = [
    Row("rope_theta", "tiny", config(_ROPE, "rope_theta", value=50000.0),
        {f"{_HF}rope_parameters.rope_theta": "50000.0"}, slice=True),
    Row("rope_type linear", "tiny", config(_ROPE, value=_LINEAR)),
    Row("partial_rotary_factor", "tiny", config(_ROPE, "partial_rotary_factor", value=0.5)),
    *fields("tiny", rms_norm_eps=1e-2),
    Row("tie_word_embeddings", "tiny", config("tie_word_embeddings", value=True),
        {f"{_HF}tie_word_embeddings": "True"}),
    Row("architectures", "tiny", config("architectures", value=["Ernie4_5ForCausalLM"]),
        {"runs.model": "Ernie4_5ForCausalLM"}),
    Row("max_position_embeddings", "tiny", config("max_position_embeddings", value=1024), None),
    Row("sliding_window in a Llama", "tiny", config("sliding_window", value=64), None),
    *positions("llama3", factor=2.0, low_freq_factor=2.0, high_freq_factor=16.0,
               original_max_position_embeddings=32),
    *positions("yarn", factor=2.0, original_max_position_embeddings=128, beta_fast=4.0,
               beta_slow=8.0, attention_factor=1.5),
    Row("rope_parameters.mscale 0.5", "yarn", config(_ROPE, "mscale", value=0.5), None),
    *positions("linear", factor=4.0),
    *positions("dynamic", alpha=8.0),
    Row("max_model_len with dynamic positions", "dynamic", engine(max_model_len=1024), None),
    Row("max_model_len beyond what LongRoPE was trained on", "longrope",
        engine(max_model_len=1536), slice=True),
    Row("max_model_len within what LongRoPE was trained on", "longrope",
        engine(max_model_len=768), None, warm=True, slice=True),
    Row("long_factor that is not used", "longrope",
        config(_ROPE, "long_factor", value=[3.0] * 16), None),
    Row("short_factor", "longrope", config(_ROPE, "short_factor", value=[1.5] * 16)),
    *fields("window", sliding_window=64),
    Row("sliding_window none", "window", config("sliding_window", value=None)),
    *fields("gemma", sliding_window=64, layer_types=["full_attention", "sliding_attention"],
            query_pre_attn_scalar=64, final_logit_softcapping=2.0),
    Row("rope_local_base_freq", "gemma",
        config(_ROPE, "sliding_attention", "rope_theta", value=5000.0)),
]  # fmt: skip
_ERNIE = ["Ernie4_5ForCausalLM"]
_ROTATED = {"rope_parameters": {"rope_theta": 99.0, "rope_type": "default"}}
_UNSCALED = {"LlamaForCausalLM": "tests.trust.identity.model_class:Unscaled"}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
_STEPS = "scheduler_config.max_num_batched_tokens"


def _engine(name, shown, **given):
    return Row(name, "tiny", engine(**given), shown)


ENGINE = [
    _engine("hf_overrides rope_theta", ANSWERS, hf_overrides=_ROTATED),
    _engine("hf_overrides architectures", {"runs.model": _ERNIE[0]},
            hf_overrides={"architectures": _ERNIE}),
    _engine("hf_overrides rms_norm_eps", ANSWERS, hf_overrides={"rms_norm_eps": 0.01}),
    _engine("model_class_overrides", {"runs.model": "Unscaled"}, model_class_overrides=_UNSCALED),
    switch(model_impl="transformers"),
    replace(switch("model_config", dtype="bfloat16"), slice=True),
    switch("model_config", dtype="float16"),
    _engine("kv_cache_dtype fp8_e5m2", {"cache_config.cache_dtype": "fp8_e5m2"},
            kv_cache_dtype="fp8_e5m2"),
    _engine("kv_cache_dtype fp8_e4m3", {"cache_config.cache_dtype": "fp8_e4m3"},
            kv_cache_dtype="fp8_e4m3"),
    _engine("kv_cache_dtype bfloat16", {"runs.caches": "bfloat16"}, kv_cache_dtype="bfloat16"),
    _engine("attention_backend TRITON_ATTN", {"runs.backends": "TRITON_ATTN"},
            attention_config={"backend": "TRITON_ATTN"}),
    _engine("block_size 64", {"cache_config.block_size": "64"},
            block_size=64, num_gpu_blocks_override=32),
    switch("cache_config", enable_prefix_caching=False, warm=True),
    replace(switch("model_config", max_model_len=384, warm=True), slice=True),
    switch("scheduler_config", max_num_seqs=4, warm=True),
    switch("scheduler_config", max_num_batched_tokens=512, warm=True),
    Row("a prefill in steps of 96 tokens", "tiny",
        engine(max_num_batched_tokens=96, max_num_seqs=8), {_STEPS: "96"}, warm=True),
    switch("model_config", served_model_name="other", warm=True),
    Row("scheduling_policy", "tiny", engine(scheduling_policy="priority"),
        {"scheduler_config.policy": "priority"}, warm=True),
    Row("num_gpu_blocks_override", "tiny", engine(num_gpu_blocks_override=40),
        {"cache_config.num_gpu_blocks": "40"}, warm=True),
    _engine("enable_lora", None, enable_lora=True, max_lora_rank=8),
    switch("model_config", generation_config="vllm", warm=True),
    switch("cache_config", prefix_caching_hash_algo="sha256_cbor", warm=True),
    switch("model_config", max_logprobs=40, warm=True),
    switch("scheduler_config", enable_chunked_prefill=False, warm=True),
    _engine("custom_ops none", {"compilation_config.custom_ops": "['none'"},
            compilation_config={"custom_ops": ["none"]}),
    switch("model_config", enforce_eager=False),
    _engine("speculative_config ngram", {"speculative_config.method": "ngram"},
            speculative_config=_NGRAM),
    switch("load_config", load_format="safetensors"),
    switch("load_config", safetensors_load_strategy="eager"),
    switch("model_config", code_revision="abc"),
    switch("model_config", revision="abc"),
    _engine("kv_cache_dtype_skip_layers", {"cache_config.kv_cache_dtype_skip_layers": "0"},
            kv_cache_dtype="fp8_e5m2", kv_cache_dtype_skip_layers=["0"]),
]  # fmt: skip

# Of vLLM's ways to quantise at the load this one alone starts on a CPU, for experts only.
_INT8 = "int8_per_channel_weight_only"
QUANTIZED = [
    Row(CONTROL, "bf16", lambda spec, _: spec, None, warm=True),
    Row("quantization", "bf16", engine(quantization=_INT8), {"model_config.quantization": _INT8}),
]


def variable(*, warm=False, shown=True, **given):
    ((name, value),) = given.items()
    fact = {f"env.{name}": value} if shown else None
    return Row(f"{name} {value}", "tiny", environment(**given), fact, warm=warm)


ENVIRONMENT = [
    variable(VLLM_FLOAT32_MATMUL_PRECISION="medium"),
    variable(VLLM_CPU_SGL_KERNEL="1", shown=False),
    variable(VLLM_CPU_ATTN_SPLIT_KV="0", shown=False),
    variable(VLLM_CPU_KVCACHE_SPACE="2", warm=True),
    variable(OMP_NUM_THREADS="2", shown=False, warm=True),
    variable(VLLM_LOGGING_LEVEL="WARNING", warm=True),
    Row("another HOME", "tiny", lambda spec, folder: spec.environment_with(HOME=str(folder)),
        None, warm=True),
]  # fmt: skip


def of_runner(spec, _):
    return replace(spec, mode=V2_ASYNC)


def of_version(place):
    return lambda spec, _: replace(spec, vllm=place)


VERSIONS = [
    Row("Model Runner V2, async scheduling", "tiny", of_runner, {"runs.runner": "V2"}),
    Row(CONTROL, "v2", lambda spec, folder: spec, None, warm=True),
    *(Row(place.name, "tiny", of_version(place), None) for place in (older(), newer()) if place),
]

ROWS = [*MODEL, *ENGINE, *QUANTIZED, *ENVIRONMENT, *VERSIONS]
