"""Rows about configuration: the model's, the engine's, its environment, another vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.engine_modes import V2_ASYNC
from tests.trust.identity.lives import Spec, newer, older
from tests.trust.identity.rows import CONTROL, Base, Row, config, engine, environment, family

_HF = "model_config.hf_config."


def longrope(folder: Path) -> Spec:
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


def scaled(kind: str, **more: Any) -> Any:
    """Rotary positions of this kind."""
    return family(rope_parameters={"rope_type": kind, "rope_theta": 10000.0} | more)


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


def window(folder: Path) -> Spec:
    return family("mistral", sliding_window=96)(folder)


def gemma(folder: Path) -> Spec:
    return family(
        "gemma3_text",
        hidden_act=None,
        query_pre_attn_scalar=32,
        sliding_window=96,
        layer_types=["sliding_attention", "full_attention"],
    )(folder)


def rope(*path: str, value: Any, base: str, shown: bool = True) -> Row:
    name = ".".join(path)
    return Row(f"{name} {value}", base, config(*path, value=value))


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

MODEL = [
    Row(
        "rope_theta",
        "tiny",
        config(_ROPE, "rope_theta", value=50000.0),
        {f"{_HF}rope_parameters.rope_theta": "50000.0"},
        slice=True,
    ),
    Row(
        "rope_type linear",
        "tiny",
        config(_ROPE, value={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    ),
    Row("partial_rotary_factor", "tiny", config(_ROPE, "partial_rotary_factor", value=0.5)),
    Row("rms_norm_eps", "tiny", config("rms_norm_eps", value=1e-2)),
    Row(
        "tie_word_embeddings",
        "tiny",
        config("tie_word_embeddings", value=True),
        {f"{_HF}tie_word_embeddings": "True"},
    ),
    Row(
        "architectures",
        "tiny",
        config("architectures", value=["Ernie4_5ForCausalLM"]),
        {"runs.model": "Ernie4_5ForCausalLM"},
    ),
    Row("max_position_embeddings", "tiny", config("max_position_embeddings", value=1024), None),
    Row("sliding_window in a Llama", "tiny", config("sliding_window", value=64), None),
    *(
        rope(_ROPE, name, value=value, base="llama3")
        for name, value in (
            ("factor", 2.0),
            ("low_freq_factor", 2.0),
            ("high_freq_factor", 16.0),
            ("original_max_position_embeddings", 32),
        )
    ),
    *(
        rope(_ROPE, name, value=value, base="yarn")
        for name, value in (
            ("factor", 2.0),
            ("original_max_position_embeddings", 128),
            ("beta_fast", 4.0),
            ("beta_slow", 8.0),
            ("attention_factor", 1.5),
        )
    ),
    Row("rope_parameters.mscale 0.5", "yarn", config(_ROPE, "mscale", value=0.5), None),
    rope(_ROPE, "factor", value=4.0, base="linear"),
    rope(_ROPE, "alpha", value=8.0, base="dynamic"),
    Row("max_model_len with dynamic positions", "dynamic", engine(max_model_len=1024), None),
    Row(
        "max_model_len beyond what LongRoPE was trained on",
        "longrope",
        engine(max_model_len=1536),
        slice=True,
    ),
    Row(
        "max_model_len within what LongRoPE was trained on",
        "longrope",
        engine(max_model_len=768),
        None,
        warm=True,
        slice=True,
    ),
    Row(
        "long_factor that is not used",
        "longrope",
        config(_ROPE, "long_factor", value=[3.0] * 16),
        None,
    ),
    Row("short_factor", "longrope", config(_ROPE, "short_factor", value=[1.5] * 16)),
    Row("sliding_window", "window", config("sliding_window", value=64)),
    Row("sliding_window none", "window", config("sliding_window", value=None)),
    Row("sliding_window", "gemma", config("sliding_window", value=64)),
    Row(
        "layer_types", "gemma", config("layer_types", value=["full_attention", "sliding_attention"])
    ),
    Row("query_pre_attn_scalar", "gemma", config("query_pre_attn_scalar", value=64)),
    Row("final_logit_softcapping", "gemma", config("final_logit_softcapping", value=2.0)),
    Row(
        "rope_local_base_freq",
        "gemma",
        config(_ROPE, "sliding_attention", "rope_theta", value=5000.0),
    ),
]

ENGINE = [
    Row(
        "hf_overrides rope_theta",
        "tiny",
        engine(hf_overrides={"rope_parameters": {"rope_theta": 99.0, "rope_type": "default"}}),
    ),
    Row(
        "hf_overrides architectures",
        "tiny",
        engine(hf_overrides={"architectures": ["Ernie4_5ForCausalLM"]}),
        {"runs.model": "Ernie4_5ForCausalLM"},
    ),
    Row("hf_overrides rms_norm_eps", "tiny", engine(hf_overrides={"rms_norm_eps": 0.01})),
    Row(
        "model_class_overrides",
        "tiny",
        engine(
            model_class_overrides={"LlamaForCausalLM": "tests.trust.identity.model_class:Unscaled"}
        ),
        {"runs.model": "Unscaled"},
    ),
    Row("model_impl transformers", "tiny", engine(model_impl="transformers"), None),
    Row(
        "dtype bfloat16",
        "tiny",
        engine(dtype="bfloat16"),
        {"model_config.dtype": "bfloat16"},
        slice=True,
    ),
    Row("dtype float16", "tiny", engine(dtype="float16"), {"model_config.dtype": "float16"}),
    Row(
        "kv_cache_dtype fp8_e5m2",
        "tiny",
        engine(kv_cache_dtype="fp8_e5m2"),
        {"cache_config.cache_dtype": "fp8_e5m2"},
    ),
    Row(
        "kv_cache_dtype fp8_e4m3",
        "tiny",
        engine(kv_cache_dtype="fp8_e4m3"),
        {"cache_config.cache_dtype": "fp8_e4m3"},
    ),
    Row(
        "kv_cache_dtype bfloat16",
        "tiny",
        engine(kv_cache_dtype="bfloat16"),
        {"runs.caches": "bfloat16"},
    ),
    *(
        Row(
            f"attention_backend {name}",
            "tiny",
            engine(attention_config={"backend": name}),
            {"runs.backends": name},
        )
        for name in ("TRITON_ATTN",)
    ),
    Row(
        "block_size 64",
        "tiny",
        engine(block_size=64, num_gpu_blocks_override=32),
        {"cache_config.block_size": "64"},
    ),
    Row(
        "prefix caching off",
        "tiny",
        engine(enable_prefix_caching=False),
        {"cache_config.enable_prefix_caching": "False"},
        warm=True,
    ),
    Row(
        "max_model_len",
        "tiny",
        engine(max_model_len=384),
        {"model_config.max_model_len": "384"},
        warm=True,
        slice=True,
    ),
    Row(
        "max_num_seqs",
        "tiny",
        engine(max_num_seqs=4),
        {"scheduler_config.max_num_seqs": "4"},
        warm=True,
    ),
    Row(
        "max_num_batched_tokens",
        "tiny",
        engine(max_num_batched_tokens=512),
        {"scheduler_config.max_num_batched_tokens": "512"},
        warm=True,
    ),
    Row(
        "a prefill in steps of 96 tokens",
        "tiny",
        engine(max_num_batched_tokens=96, max_num_seqs=8),
        {"scheduler_config.max_num_batched_tokens": "96"},
        warm=True,
    ),
    Row(
        "served_model_name",
        "tiny",
        engine(served_model_name="other"),
        {"model_config.served_model_name": "other"},
        warm=True,
    ),
    Row(
        "scheduling_policy",
        "tiny",
        engine(scheduling_policy="priority"),
        {"scheduler_config.policy": "priority"},
        warm=True,
    ),
    Row(
        "num_gpu_blocks_override",
        "tiny",
        engine(num_gpu_blocks_override=40),
        {"cache_config.num_gpu_blocks": "40"},
        warm=True,
    ),
    Row("enable_lora", "tiny", engine(enable_lora=True, max_lora_rank=8), None),
    Row(
        "generation_config",
        "tiny",
        engine(generation_config="vllm"),
        {"model_config.generation_config": "vllm"},
        warm=True,
    ),
    Row(
        "prefix_caching_hash_algo",
        "tiny",
        engine(prefix_caching_hash_algo="sha256_cbor"),
        {"cache_config.prefix_caching_hash_algo": "sha256_cbor"},
        warm=True,
    ),
    Row(
        "logprobs_mode",
        "tiny",
        engine(max_logprobs=40),
        {"model_config.max_logprobs": "40"},
        warm=True,
    ),
    Row(
        "enable_chunked_prefill off",
        "tiny",
        engine(enable_chunked_prefill=False),
        {"scheduler_config.enable_chunked_prefill": "False"},
        warm=True,
    ),
    Row(
        "custom_ops none",
        "tiny",
        engine(compilation_config={"custom_ops": ["none"]}),
        {"compilation_config.custom_ops": "['none'"},
    ),
    Row(
        "compiled by inductor",
        "tiny",
        engine(enforce_eager=False),
        {"model_config.enforce_eager": "False"},
    ),
    Row(
        "speculative_config ngram",
        "tiny",
        engine(
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        ),
        {"speculative_config.method": "ngram"},
    ),
    Row(
        "load_format pt over safetensors",
        "tiny",
        engine(load_format="safetensors"),
        {"load_config.load_format": "safetensors"},
    ),
    Row(
        "safetensors_load_strategy eager",
        "tiny",
        engine(safetensors_load_strategy="eager"),
        {"load_config.safetensors_load_strategy": "eager"},
    ),
    Row(
        "code_revision", "tiny", engine(code_revision="abc"), {"model_config.code_revision": "abc"}
    ),
    Row(
        "revision of a local folder",
        "tiny",
        engine(revision="abc"),
        {"model_config.revision": "abc"},
    ),
    Row(
        "kv_cache_dtype_skip_layers",
        "tiny",
        engine(kv_cache_dtype="fp8_e5m2", kv_cache_dtype_skip_layers=["0"]),
        {"cache_config.kv_cache_dtype_skip_layers": "0"},
    ),
]

# Of vLLM's ways to quantise at the load this one alone starts on a CPU, for experts only.
_INT8 = "int8_per_channel_weight_only"
QUANTIZED = [
    Row(CONTROL, "bf16", lambda spec, _: spec, None, warm=True),
    Row("quantization", "bf16", engine(quantization=_INT8), {"model_config.quantization": _INT8}),
]

ENVIRONMENT = [
    Row(
        "VLLM_FLOAT32_MATMUL_PRECISION medium",
        "tiny",
        environment(VLLM_FLOAT32_MATMUL_PRECISION="medium"),
        {"env.VLLM_FLOAT32_MATMUL_PRECISION": "medium"},
    ),
    Row("VLLM_CPU_SGL_KERNEL", "tiny", environment(VLLM_CPU_SGL_KERNEL="1"), None),
    Row("VLLM_CPU_ATTN_SPLIT_KV off", "tiny", environment(VLLM_CPU_ATTN_SPLIT_KV="0"), None),
    Row(
        "VLLM_CPU_KVCACHE_SPACE",
        "tiny",
        environment(VLLM_CPU_KVCACHE_SPACE="2"),
        {"env.VLLM_CPU_KVCACHE_SPACE": "2"},
        warm=True,
    ),
    Row("OMP_NUM_THREADS 2", "tiny", environment(OMP_NUM_THREADS="2"), None, warm=True),
    Row(
        "another HOME",
        "tiny",
        lambda spec, folder: spec.environment_with(HOME=str(folder)),
        None,
        warm=True,
    ),
    Row(
        "VLLM_LOGGING_LEVEL",
        "tiny",
        environment(VLLM_LOGGING_LEVEL="WARNING"),
        {"env.VLLM_LOGGING_LEVEL": "WARNING"},
        warm=True,
    ),
]


def of_runner(spec: Spec, _: Path) -> Spec:
    return replace(spec, mode=V2_ASYNC)


def of_version(find: Any) -> Any:
    def change(spec: Spec, _: Path) -> Spec:
        return replace(spec, vllm=find())

    return change


VERSIONS = [
    Row("Model Runner V2, async scheduling", "tiny", of_runner, {"runs.runner": "V2"}),
    Row(CONTROL, "v2", lambda spec, folder: spec, None, warm=True),
    *(
        Row(
            f"vLLM {place.name.removeprefix('vllm-')}",
            "tiny",
            of_version(lambda place=place: place),
            None,
        )
        for place in (older(), newer())
        if place
    ),
]

ROWS = [*MODEL, *ENGINE, *QUANTIZED, *ENVIRONMENT, *VERSIONS]
