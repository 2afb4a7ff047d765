"""Makes small models with random weights, so that benchmarks and tests need no download.

``kvtier bench model DIR --preset demo`` writes a model that vLLM serves: its weights, a
tokenizer trained on generated text, and a chat template. The same preset and seed give the same
bytes. A directory that was made with the same parameters is left alone.

Random weights of the usual size do not show wrong KV: attention spreads evenly over thousands of
tokens, so that the answer hardly depends on the KV cache. :func:`_draw` therefore draws weights so
that the scores have a standard deviation of 2 to 3 (attention rests on a few tens of tokens), and
so that the residual stream does not drown attention's output. An answer then depends on the whole
document, which a check of correctness needs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.autoconfig.model import model_folder
from kvtier.core.errors import ConfigError
from kvtier.core.processes import environment

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
# In models that normalise queries and keys, the gain goes into those norms.
_SCORE_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def _preset(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """A model's configuration. ``sizes`` go by the names in ``_SIZES``. ``more`` is what only this
    type of model has, or has with another value."""
    shared = {"max_position_embeddings": 32768, "tie_word_embeddings": False}
    return {"model_type": model_type, **shared, **dict(zip(_SIZES, sizes, strict=False)), **more}


_SILU = {"hidden_act": "silu"}
PRESETS: dict[str, dict[str, Any]] = {
    # For tests: it starts and answers fast. A token takes 1 KiB of bf16 KV.
    "tiny": _preset("llama", 128, 256, 4, 4, 2, 32, **_SILU),
    # For the demo. A token takes 16 KiB of float32 KV. Two cores compute 4,096 tokens in about 3 s.
    "demo": _preset("llama", 512, 1024, 16, 8, 1, 128, **_SILU),
    # For retrieved documents: 25 M parameters in its layers. A token takes 16 KiB of float32 KV.
    "retrieval": _preset("llama", 512, 1536, 8, 8, 4, 64, **_SILU),
    # For 46 documents of 10,000 tokens on two cores. A token takes 6 KiB of float32 KV; all
    # documents take 2.6 GiB.
    "lmi": _preset("llama", 256, 512, 3, 4, 4, 64, **_SILU),
    # Qwen2 (its projections have biases) with the KV geometry of Qwen2.5-1.5B. A token takes 28 KiB
    # of bf16 KV, a chunk 7 MiB. vLLM ignores the head_dim of a Qwen2, so that it must be
    # hidden_size / num_attention_heads.
    "qwen": _preset("qwen2", 512, 512, 28, 4, 2, 128, **_SILU),
    # For loads of 32,768 tokens: a token's KV is large beside what computing it takes. It takes
    # 8 KiB of bf16 KV, a chunk 2 MiB, a prompt of 32,768 tokens 256 MiB.
    "wide": _preset("llama", *(512, 512, 16, 1, 1, 128), **_SILU, max_position_embeddings=65536),
    # For loads that are large beside all else: a token takes 224 KiB of bf16 KV, 1,024 tokens as
    # much as 8,192 of "qwen", and little computing.
    "heavy": _preset("llama", *(128, 128, 28, 16, 16, 128), **_SILU),
    # Rotary tables as in Phi-3's long-context models. vLLM takes other factors where the engine's
    # longest prompt is longer than what the model was trained on.
    "longrope": _preset(
        "llama",
        *(128, 256, 4, 4, 2, 32),
        **_SILU,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 0.5 * index for index in range(16)],
        },
    ),
    # Multi-head latent attention, with positions scaled by YaRN, as in DeepSeek-V3. Every layer is
    # dense.
    "mla": _preset(
        "deepseek_v3",
        *(128, 256, 3, 4, 4),
        **_SILU,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=3,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    # Sliding windows and full attention as in Gemma 3: several KV cache groups.
    "swa": _preset(
        "gemma3_text",
        *(128, 256, 4, 4, 2, 32),
        query_pre_attn_scalar=32,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    # Sliding windows in every layer as in Mistral 7B v0.1.
    "window": _preset("mistral", 128, 256, 4, 4, 2, 32, **_SILU, sliding_window=128),
    # Sliding windows and full attention, with sinks and experts, as in gpt-oss.
    "gptoss": _preset(
        "gpt_oss",
        *(128, 128, 4, 4, 2, 32),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    # Attention in chunks and full attention, as in Llama 4.
    "llama4": _preset(
        "llama4_text",
        *(128, 128, 4, 4, 2, 32),
        intermediate_size_mlp=256,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=256,
        no_rope_layers=[1, 1, 1, 0],
    ),
    # Linear attention (gated delta net) and full attention, as in Qwen3-Next: a recurrent state.
    # vLLM's CPU kernel takes only heads of 128.
    "qwen3next": _preset(
        "qwen3_next",
        *(128, 256, 4, 4, 2, 64),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
    ),
    # Short convolutions and attention as in LFM2: a recurrent state, which vLLM keeps as a cache
    # group of the mamba type.
    "mamba": _preset(
        "lfm2",
        *(128, 256, 4, 4, 2),
        **_SILU,
        block_auto_adjust_ff_dim=False,
        block_dim=128,
        conv_dim=128,
        conv_dim_out=128,
        layer_types=["conv", "full_attention"] * 2,
    ),
}


def make_model(directory: str | Path, preset: str = "demo", seed: int = 0) -> Path:
    """Make the preset's model in ``directory`` unless it is there already. Return the directory.

    A directory with files that this function did not make is never overwritten: ValueError.
    """
    stamp = {"version": _STAMP_VERSION, "preset": preset, "seed": seed, "config": PRESETS[preset]}

    def make(folder: Path) -> None:
        vocabulary = _write_tokenizer(folder, seed)
        _write_weights(folder, PRESETS[preset] | {"vocab_size": vocabulary}, seed)

    return made(directory, stamp, make)


def made(directory: str | Path, stamp: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """Have ``make`` fill ``directory``, unless it is there already with this stamp. Return the
    directory.

    A directory with files that this function did not make is never overwritten: ValueError.
    """
    target = Path(directory)
    if _stamp_of(target) == stamp:
        return target
    if target.exists() and any(target.iterdir()) and _stamp_of(target) is None:
        raise ValueError(
            f"{target} is not empty and was not made by this command; give a new directory"
        )
    aside = target.with_name(target.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    make(aside)
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
    """Short sentences of two thousand made-up words, which are as frequent as Zipf's law says."""
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
    """Train a byte-pair tokenizer over printable ASCII, so that every output decodes to text.
    Return its size."""
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
    """Draw every matrix from N(0, (gain / sqrt(fan_in))^2), and embeddings so that they enter the
    first layer as N(0, 1). Biases stay, and so do norms except those of queries and keys."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.split(".")[-2]
            if module in _SCORE_NORMS:
                weight.add_(_GAIN["q_proj"] - 1)
            elif module == "embed_tokens":
                embeddings = model.get_submodule(name.rpartition(".")[0])
                scale = getattr(embeddings, "scalar_embed_scale", 1.0)
                weight.normal_(0.0, 1 / scale, generator=generator)
            elif weight.dim() > 1:
                deviation = _GAIN.get(module, 1.0) / math.sqrt(weight.shape[-1])
                weight.normal_(0.0, deviation, generator=generator)


def read_config(model: str | Path) -> dict[str, Any]:
    """A model's (text) configuration: from its directory, or by its name from this machine's cache
    of the hub. Raises ConfigError when it is in neither."""
    folder = (
        Path(model)
        if (Path(model) / "config.json").is_file()
        else model_folder(str(model), environment())
    )
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.update(config.get("text_config") or {})
    return config


def kv_token_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Bytes of KV that one token takes in all layers. This is an upper bound where a layer does not
    attend in full."""
    if config.get("kv_lora_rank"):
        elements = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = config["hidden_size"] // config["num_attention_heads"]
        elements = 2 * heads * (config.get("head_dim") or width)
    return int(config["num_hidden_layers"]) * int(elements) * element_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        help="where the model goes; it is made again only if its parameters differ",
    )
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="demo", help="the model (default: demo)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="for weights and tokenizer (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        print(make_model(arguments.directory, arguments.preset, arguments.seed))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return 0


if __name__ == "__main__":
    from kvtier.cli.main import main

    sys.exit(main(["bench", "model", *sys.argv[1:]]))
