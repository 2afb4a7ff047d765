"""The table of usual pairs of GPU and model: ``kvtier plan``, asked what each would set.

The machines are of a cloud's list, with the read speed of their local disks. Of the models there is
what their published config.json says of the KV and of the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.autoconfig import command
from kvtier.core.terminal import size_text


def _config(
    layers: int, hidden: int, heads: tuple[int, int, int], inner: int, words: int, **more: Any
) -> dict[str, Any]:
    """``heads``: of attention, of KV, and the dimension of each."""
    own = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": inner,
        "vocab_size": words,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131_072,
    }
    return own | more


_GEMMA = {"model_type": "gemma3_text", "sliding_window": 1024}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32_768}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163_840,
    "quantization_config": {"quant_method": "fp8"},
}
_MODELS = {
    "Qwen2.5 7B": _config(28, 3584, (28, 4, 128), 18_944, 152_064),
    "Qwen3 8B": _config(36, 4096, (32, 8, 128), 12_288, 151_936, max_position_embeddings=40_960),
    "Llama 3.1 8B": _config(32, 4096, (32, 8, 128), 14_336, 128_256),
    "Gemma 3 27B": _config(62, 5376, (32, 16, 128), 21_504, 262_208, **_GEMMA),
    "Mixtral 8x7B": _config(32, 4096, (32, 8, 128), 14_336, 32_000, **_EXPERTS),
    "Llama 3.1 70B": _config(80, 8192, (64, 8, 128), 28_672, 128_256),
    "Qwen2.5 72B": _config(80, 8192, (64, 8, 128), 29_568, 152_064),
    "Llama 3.1 405B": _config(126, 16_384, (128, 8, 128), 53_248, 128_256),
    "DeepSeek V3": _config(61, 7168, (128, 128, 128), 18_432, 129_280, **_DEEPSEEK),
}


class _Pair(NamedTuple):
    machine: str
    gpus: str
    model: str
    tensor: int
    ram: str
    """Free before the engine loads its weights."""
    disk: str
    speed: str


_PAIRS = (
    _Pair("g6.4xlarge", "L4:1", "Llama 3.1 8B", 1, "60GiB", "600GB", "1GB/s"),
    _Pair("g5.8xlarge", "A10G:1", "Qwen2.5 7B", 1, "120GiB", "900GB", "1GB/s"),
    _Pair("g6e.4xlarge", "L40S:1", "Qwen3 8B", 1, "120GiB", "600GB", "1GB/s"),
    _Pair("p5.4xlarge", "H100:1", "Llama 3.1 8B", 1, "240GiB", "3800GB", "2GB/s"),
    _Pair("p5.4xlarge", "H100:1", "Gemma 3 27B", 1, "240GiB", "3800GB", "2GB/s"),
    _Pair("p4d.24xlarge", "A100-40GB:8", "Mixtral 8x7B", 8, "1100GiB", "8TB", "16GB/s"),
    _Pair("p4de.24xlarge", "A100-80GB:8", "Qwen2.5 72B", 8, "1100GiB", "8TB", "16GB/s"),
    _Pair("p5.48xlarge", "H100:8", "Llama 3.1 70B", 8, "1950GiB", "30TB", "16GB/s"),
    _Pair("p5en.48xlarge", "H200:8", "DeepSeek V3", 8, "1950GiB", "30TB", "16GB/s"),
    _Pair("p6-b200.48xlarge", "B200:8", "Llama 3.1 405B", 8, "1950GiB", "30TB", "16GB/s"),
)


def usual_pairs() -> list[list[str]]:
    head = ["machine", "GPUs", "model", "KV a token", "a chunk"]
    head += [word for tier in ("RAM", "NVMe") for word in (tier, "tokens there", "pays from")]
    return [head, *(_row(pair) for pair in _PAIRS)]


def _row(pair: _Pair) -> list[str]:
    found = _planned(pair)
    shown = {row["key"]: row["value"] for row in found["derived"]}
    kv, values = shown["kv_bytes_per_token"], found["values"]
    cells = [pair.machine, pair.gpus.replace(":", " x "), pair.model]
    cells += [size_text(kv), size_text(shown["chunk_bytes"])]
    for key, tier in (("ram_bytes", "ram"), ("nvme_bytes", "nvme")):
        if size := values.get(key):
            pays = shown[f"{tier}_break_even_tokens"]
            cells += [size_text(size), f"{size // kv:,}", f"{pays:,}"]
        else:
            cells += ["left out", "-", "-"]
    return cells


def _planned(pair: _Pair) -> Any:
    parser, printed = argparse.ArgumentParser(), io.StringIO()
    command.add_arguments(parser)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        (Path(folder) / "config.json").write_text(json.dumps(_MODELS[pair.model]))
        words = f"--gpu {pair.gpus} --tp {pair.tensor} --ram {pair.ram} --disk {pair.disk} "
        words += f"--disk-speed {pair.speed} --no-measure --json --model"
        command.run(parser.parse_args([*words.split(), folder]))
    return json.loads(printed.getvalue())
