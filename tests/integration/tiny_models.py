"""Small models of random weights that only tests need: a draft that guesses right."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def make_draft(directory: Path, target: Path, prompts: Iterable[list[int]], tokens: int) -> Path:
    """An EAGLE draft of one layer for a Llama: fitted to the ``tokens`` that the target answers to each of these
    prompts, so that some of what it drafts for them is accepted."""
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
            f"layers.0.{name}.weight": torch.randn(shape, generator=generator) * (0.05 / shape[1] ** 0.5)
            for name, shape in shapes.items()
        }
    weights |= {"fc.weight": first.contiguous(), "layers.0.post_attention_layernorm.weight": torch.ones(size)}
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    draft = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(draft))
    return directory
