"""Makes small random-weight models on the spot, so that benchmarks and tests need no download.

``python -m kvtier.bench.model DIR --preset demo`` writes a model that vLLM serves: weights, a
tokenizer trained on generated text, a chat template. The same preset and seed give the same bytes;
a directory already made with the same parameters is left alone.

Random weights of the usual size make a useless witness: attention spreads evenly over thousands of
tokens, so the answer hardly depends on the KV cache and wrong KV goes unseen. :func:`_draw`
therefore draws weights so that scores have a standard deviation of 2 to 3 (attention rests on a few
tens of tokens) and attention's output is not drowned by the residual stream: an answer then depends
on the whole document, which is what a correctness check needs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.autoconfig.probe import hub
from kvtier.config.load import environment

if TYPE_CHECKING:
    import torch

_STAMP = "made_by_kvtier.json"
_STAMP_VERSION = 1
_SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
_VOCABULARY = 2048
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] "
    "}} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_GAIN = {"q_proj": 1.75, "k_proj": 1.75, "o_proj": 3.0, "out_proj": 3.0, "lm_head": 2.0}
# Models that normalise queries and keys: their gain goes into those norms instead.
_SCORE_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")

_GQA_BASE = {"max_position_embeddings": 32768, "tie_word_embeddings": False, "hidden_act": "silu"}
PRESETS: dict[str, dict[str, Any]] = {
    # Tests: starts and answers fast; 1 KiB of bf16 KV a token.
    "tiny": _GQA_BASE
    | {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    # The demo: 16 KiB of float32 KV a token; on two cores 4,096 tokens take about 3 s to compute.
    "demo": _GQA_BASE
    | {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
    },
    # 46 documents of 10,000 tokens on two cores: 6 KiB of float32 KV a token, 2.6 GiB in all.
    "lmi": _GQA_BASE
    | {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # Qwen2 (biased projections) with the KV geometry of Qwen2.5-1.5B: 28 KiB of bf16 KV a token, 7
    # MiB a chunk. vLLM takes no head_dim of a Qwen2: hidden_size / num_attention_heads must be it.
    "qwen": _GQA_BASE
    | {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 28,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    # Rotary tables as in Phi-3's long-context models: vLLM takes other factors where the engine's
    # longest prompt is beyond what the model was trained on.
    "longrope": _GQA_BASE
    | {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 0.5 * index for index in range(16)],
        },
    },
    # Multi-head latent attention as in DeepSeek-V2; every layer dense.
    "mla": _GQA_BASE
    | {
        "model_type": "deepseek_v2",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
    },
    # Sliding window + full attention as in Gemma 3: several KV cache groups.
    "swa": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 256,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
    # Sliding windows in every layer as in Mistral 7B v0.1.
    "window": _GQA_BASE
    | {
        "model_type": "mistral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 128,
    },
    # Sliding windows beside full attention, with sinks and experts, as in gpt-oss.
    "gptoss": {
        "model_type": "gpt_oss",
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    # Attention in chunks beside full attention, as in Llama 4.
    "llama4": {
        "model_type": "llama4_text",
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "hidden_size": 128,
        "intermediate_size": 128,
        "intermediate_size_mlp": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 256,
        "no_rope_layers": [1, 1, 1, 0],
    },
    # Linear attention (gated delta net) beside full attention, as in Qwen3-Next: a recurrent state.
    # vLLM's CPU kernel takes heads of 128.
    "qwen3next": {
        "model_type": "qwen3_next",
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
    },
    # Short convolutions beside attention as in LFM2: a recurrent state, which vLLM keeps as a
    # mamba-type cache group.
    "mamba": _GQA_BASE
    | {
        "model_type": "lfm2",
        "hidden_size": 128,
        "intermediate_size": 256,
        "block_auto_adjust_ff_dim": False,
        "block_dim": 128,
        "conv_dim": 128,
        "conv_dim_out": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
}


def make_model(directory: str | Path, preset: str = "demo", seed: int = 0) -> Path:
    """Make the preset's model in ``directory`` unless it is there already; returns the directory.

    A directory that holds anything this function did not make is refused (ValueError), never
    overwritten.
    """
    target = Path(directory)
    stamp = {"version": _STAMP_VERSION, "preset": preset, "seed": seed, "config": PRESETS[preset]}
    if _stamp_of(target) == stamp:
        return target
    if target.exists() and any(target.iterdir()) and _stamp_of(target) is None:
        raise ValueError(
            f"{target} is not empty and was not made by this command; give a new directory"
        )
    aside = target.with_name(target.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    vocabulary = _write_tokenizer(aside, seed)
    _write_weights(aside, PRESETS[preset] | {"vocab_size": vocabulary}, seed)
    (aside / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    return target


def _stamp_of(directory: Path) -> Any:
    try:
        return json.loads((directory / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def generated_text(words: int, seed: int) -> str:
    """Pseudo-English of two thousand made-up words, the frequent ones frequent (Zipf), in short
    sentences."""
    draw = random.Random(seed)
    syllables = [
        first + vowel + last
        for first in "bdfgklmnprst"
        for vowel in "aeiou"
        for last in ("", "n", "r", "s")
    ]
    lexicon = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, len(lexicon) + 1)]
    picked = draw.choices(lexicon, weights, k=words)
    return "".join(word + (". " if draw.random() < 1 / 12 else " ") for word in picked)


def _write_tokenizer(directory: Path, seed: int) -> int:
    """Train a byte-pair tokenizer over printable ASCII (every output decodes to text); returns its
    size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers: Any = importlib.import_module("transformers")
    tokenizer = Tokenizer(models.BPE(unk_token=_SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    printable = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIALS),
        initial_alphabet=printable,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(generated_text(40_000, seed)), trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return int(tokenizer.get_vocab_size())


def _lines(text: str) -> Iterator[str]:
    yield from (sentence + "." for sentence in text.split(". "))


def _write_weights(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    values = {name: value for name, value in config.items() if name != "model_type"}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    made = transformers.AutoConfig.for_model(config["model_type"], **values)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(made)
    _draw(model, seed)
    model.to(torch.bfloat16).save_pretrained(directory)


def _draw(model: torch.nn.Module, seed: int) -> None:
    """Draw every matrix from N(0, (gain / sqrt(fan_in))^2); embeddings so that they enter the first
    layer as N(0, 1). Norms (but those of queries and keys) and biases stay."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.split(".")[-2]
            if module in _SCORE_NORMS:
                weight.add_(_GAIN["q_proj"] - 1)
            elif module == "embed_tokens":
                scale = getattr(
                    model.get_submodule(name.rpartition(".")[0]), "scalar_embed_scale", 1.0
                )
                weight.normal_(0.0, 1 / scale, generator=generator)
            elif weight.dim() > 1:
                weight.normal_(
                    0.0, _GAIN.get(module, 1.0) / math.sqrt(weight.shape[-1]), generator=generator
                )


def make_lora(directory: str | Path, model_dir: str | Path, seed: int = 0, rank: int = 8) -> Path:
    """Make a LoRA adapter (PEFT's file format) for the query and value projections of a Llama or
    Qwen2 preset.

    Its effect is about as large as the projections themselves, so that two adapters never answer
    alike.
    """
    import torch
    from safetensors.torch import save_file

    target, config = Path(directory), read_config(model_dir)
    generator = torch.Generator().manual_seed(seed)
    widths = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    hidden, weights = config["hidden_size"], {}
    for layer in range(config["num_hidden_layers"]):
        for module, heads in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            out = heads * config["head_dim"]
            weights[f"{name}.lora_A.weight"] = torch.randn(
                rank, hidden, generator=generator
            ) / math.sqrt(hidden)
            weights[f"{name}.lora_B.weight"] = torch.randn(
                out, rank, generator=generator
            ) / math.sqrt(rank)
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": Path(model_dir).name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(
        json.dumps(adapter, indent=2) + "\n", encoding="utf-8"
    )
    return target


def read_config(model: str | Path) -> dict[str, Any]:
    """A model's (text) configuration: from its directory, else by name from the hub's cache here.
    Raises ConfigError when it is in neither."""
    folder = (
        Path(model)
        if (Path(model) / "config.json").is_file()
        else hub.model_folder(str(model), environment())
    )
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.update(config.get("text_config") or {})
    return config


def kv_token_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Bytes of KV one token takes in all layers, every layer attending in full (an upper bound
    otherwise)."""
    if config.get("kv_lora_rank"):
        elements = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        elements = (
            2
            * heads
            * (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        )
    return int(config["num_hidden_layers"]) * int(elements) * element_bytes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvtier.bench.model", description="Make a small random-weight model."
    )
    parser.add_argument(
        "directory",
        type=Path,
        help="where the model goes; made again only if its parameters differ",
    )
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="demo", help="what to make (default: demo)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokenizer (default: 0)")
    args = parser.parse_args(argv)
    try:
        made = make_model(args.directory, args.preset, args.seed)
    except ValueError as error:
        print(f"kvtier.bench.model: {error}", file=sys.stderr)
        return 2
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
