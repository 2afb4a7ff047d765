"""Small models of random weights that only tests need: one that sees, a draft that guesses
right, and LoRA adapters."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtier.bench.model import PRESETS, _draw, _write_tokenizer, _write_weights, read_config

IMAGE_SIDE, PATCH, SHUFFLE = 112, 14, 2
IMAGE_TOKENS = (IMAGE_SIDE // PATCH // SHUFFLE) ** 2 + 3
"""Of one image in a prompt, with the three that stand around it."""
_AROUND_IMAGES = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def make_seeing(directory: Path) -> Path:
    """An Idefics3 over the tiny preset. Of vLLM's models that see it is one of the few that do
    without torchvision."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    directory.mkdir(parents=True)
    vocabulary = _write_tokenizer(directory, seed=0)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_AROUND_IMAGES)})
    text = {name: value for name, value in PRESETS["tiny"].items() if name != "model_type"}
    text |= {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**text),
        scale_factor=SHUFFLE,
        image_token_id=vocabulary,
        pad_token_id=2,
        vision_config=vision | {"image_size": IMAGE_SIDE, "patch_size": PATCH},
    )
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config)
    _draw(model, 0)
    model.to(torch.bfloat16).save_pretrained(directory)
    edge = {"longest_edge": IMAGE_SIDE}
    images = transformers.Idefics3ImageProcessorPil(
        size=edge, max_image_size=edge, do_image_splitting=False
    )
    tokens = (IMAGE_SIDE // PATCH // SHUFFLE) ** 2
    transformers.Idefics3Processor(images, tokenizer, image_seq_len=tokens).save_pretrained(
        directory
    )
    return directory


def image_token(model: str | Path) -> int:
    """Where this stands in a prompt, an image is put."""
    return int(json.loads((Path(model) / "config.json").read_text())["image_token_id"])


def picture(number: int) -> Any:
    """Always the same picture for the same number."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(
        0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)


def make_experts(directory: Path) -> Path:
    """A mixture of experts, which makes vLLM's data-parallel ranks take their steps together."""
    directory.mkdir(parents=True)
    config = PRESETS["tiny"] | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    _write_weights(directory, config | {"vocab_size": _write_tokenizer(directory, seed=0)}, seed=0)
    return directory


def make_family(directory: Path, model_type: str, **more: Any) -> Path:
    """The tiny preset as a model of another family. ``more``: what it has with another value."""
    directory.mkdir(parents=True)
    config = PRESETS["tiny"] | {"model_type": model_type} | more
    _write_weights(directory, config | {"vocab_size": _write_tokenizer(directory, seed=0)}, seed=0)
    return directory


def make_draft(directory: Path, target: Path, prompts: Iterable[list[int]], tokens: int) -> Path:
    """An EAGLE draft of one layer for a Llama: fitted to the ``tokens`` that the target answers to
    each of these prompts, so that some of what it drafts for them is accepted."""
    import torch
    from safetensors.torch import save_file

    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    seen, wanted = [], []
    with torch.no_grad():
        for prompt in prompts:
            settings = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}
            whole = model.generate(torch.tensor([prompt]), **settings)[0]
            hidden = model.model(whole[None]).last_hidden_state[0]
            begin = len(prompt) - 1
            seen.append(torch.cat([embeddings[whole[begin + 1 : -1]], hidden[begin:-2]], dim=1))
            wanted.append(head[whole[begin + 2 :]])
        first = torch.linalg.lstsq(torch.cat(seen), torch.cat(wanted), driver="gelsd").solution.T
        config = model.config
        size, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "self_attn.q_proj": (config.num_attention_heads * head_dim, size),
            "self_attn.k_proj": (config.num_key_value_heads * head_dim, size),
            "self_attn.v_proj": (config.num_key_value_heads * head_dim, size),
            "self_attn.o_proj": (size, config.num_attention_heads * head_dim),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        weights = {
            f"layers.0.{name}.weight": torch.randn(shape, generator=generator)
            * (0.05 / shape[1] ** 0.5)
            for name, shape in shapes.items()
        }
    weights |= {
        "fc.weight": first.contiguous(),
        "layers.0.post_attention_layernorm.weight": torch.ones(size),
    }
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    draft = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(draft))
    return directory


def make_lora(directory: Path, model_dir: Path, seed: int) -> Path:
    """Make a LoRA adapter (PEFT's file format) for the query and value projections of a Llama or
    Qwen2 preset.

    Its effect is about as large as the projections themselves, so that two adapters never answer
    alike.
    """
    import torch
    from safetensors.torch import save_file

    rank = 8
    config = read_config(model_dir)
    generator = torch.Generator().manual_seed(seed)
    widths = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    hidden, weights = config["hidden_size"], {}
    for layer in range(config["num_hidden_layers"]):
        for module, heads in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            out = heads * config["head_dim"]
            for matrix, shape in (("A", (rank, hidden)), ("B", (out, rank))):
                drawn = torch.randn(*shape, generator=generator) / math.sqrt(shape[1])
                weights[f"{name}.lora_{matrix}.weight"] = drawn
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_dir.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps(adapter, indent=2) + "\n", encoding="utf-8"
    )
    return directory
