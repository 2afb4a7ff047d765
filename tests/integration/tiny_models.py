"""Small models of random weights that only tests need: one that sees, a draft that guesses
right, and LoRA adapters."""

import importlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

from kvtier.bench.model import PRESETS, _draw, _write_tokenizer, _write_weights, read_config

IMAGE_SIDE, PATCH, SHUFFLE = 112, 14, 2
IMAGE_TOKENS = (IMAGE_SIDE // PATCH // SHUFFLE) ** 2 + 3
"""Of one image in a prompt, with the three that stand around it."""
_AROUND_IMAGES = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def make_seeing(directory):
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


def image_token(model):
    return int(json.loads((Path(model) / "config.json").read_text())["image_token_id"])


def picture(number):
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(
        0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)


def make_experts(directory):
    """A mixture of experts, which makes vLLM's data-parallel ranks take their steps together."""
    directory.mkdir(parents=True)
    config = PRESETS["tiny"] | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    _write_weights(directory, config | {"vocab_size": _write_tokenizer(directory, seed=0)}, seed=0)
    return directory


def make_family(directory, model_type, **more):
    """The tiny preset as a model of another family. ``more``: what it has with another value."""
    directory.mkdir(parents=True)
    config = PRESETS["tiny"] | {"model_type": model_type} | more
    _write_weights(directory, config | {"vocab_size": _write_tokenizer(directory, seed=0)}, seed=0)
    return directory


def make_draft(directory, target, prompts, tokens):
    """An EAGLE draft of one layer for a Llama: fitted to the ``tokens`` that the target answers to
    each of these prompts, so that some of what it drafts for them is accepted."""
    import torch
    from safetensors.torch import save_file

    config, first = _fitted(target, prompts, tokens, lambda states: states)
    size, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    weights = _faint(
        "layers.0.",
        _attention(config)
        | {
            "self_attn.q_proj": (config.num_attention_heads * head_dim, size),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        },
    )
    weights |= {"fc.weight": first, "layers.0.post_attention_layernorm.weight": torch.ones(size)}
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    draft = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(draft))
    return directory


def make_mtp(directory, target, prompts, tokens):
    """A Qwen3-Next with the layer by which it drafts itself, fitted as :func:`make_draft` does
    it."""
    import torch
    from safetensors.torch import save_file

    def normed(states):
        return torch.nn.functional.rms_norm(states, states.shape[-1:])

    config, first = _fitted(target, prompts, tokens, normed)
    size, inner, head_dim = config.hidden_size, config.moe_intermediate_size, config.head_dim
    experts = [f"mlp.experts.{number}" for number in range(config.num_experts)]
    shapes = _attention(config) | {
        "self_attn.q_proj": (2 * config.num_attention_heads * head_dim, size),
        "mlp.gate": (config.num_experts, size),
        "mlp.shared_expert_gate": (1, size),
    }
    for one in (*experts, "mlp.shared_expert"):
        shapes |= dict.fromkeys((f"{one}.gate_proj", f"{one}.up_proj"), (inner, size))
        shapes[f"{one}.down_proj"] = (size, inner)
    weights = _faint("mtp.layers.0.", shapes)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    layers = ("input_layernorm", "post_attention_layernorm")
    for norm in (*norms, *(f"layers.0.{one}" for one in layers)):
        weights[f"mtp.{norm}.weight"] = torch.zeros(size)
    for norm in ("q_norm", "k_norm"):
        weights[f"mtp.layers.0.self_attn.{norm}.weight"] = torch.zeros(head_dim)
    weights["mtp.fc.weight"] = first
    shutil.copytree(target, directory)
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        directory / "mtp.safetensors",
    )
    return directory


def _fitted(target, prompts, tokens, normed):
    """The target's configuration, and the matrix by which its state at a token and the embedding of
    the next one give the row of the head that names the one after that."""
    import torch

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
            drawn = embeddings[whole[begin + 1 : -1]], hidden[begin:-2]
            seen.append(torch.cat([normed(one) for one in drawn], dim=1))
            wanted.append(head[whole[begin + 2 :]])
        first = torch.linalg.lstsq(torch.cat(seen), torch.cat(wanted), driver="gelsd").solution.T
    return model.config, first.contiguous()


def _attention(config):
    size, head_dim = config.hidden_size, config.head_dim
    return {
        "self_attn.k_proj": (config.num_key_value_heads * head_dim, size),
        "self_attn.v_proj": (config.num_key_value_heads * head_dim, size),
        "self_attn.o_proj": (size, config.num_attention_heads * head_dim),
    }


def _faint(prefix, shapes):
    """Random matrices that hardly change what goes through a layer."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {
        f"{prefix}{name}.weight": torch.randn(shape, generator=generator) * (0.05 / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }


def make_lora(directory, model_dir, seed):
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
