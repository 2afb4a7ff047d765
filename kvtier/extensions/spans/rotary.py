"""How the loaded model rotates its keys, from its own rotary module.

Only what is known to rotate every layer's keys alike is taken: some models by name, some classes of
rotary modules. Whatever else a model has is refused in words, and then nothing of it is ever moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.connectors.vllm.worker_side.loaded import models_with
from kvtier.core.errors import LayoutError
from kvtier.extensions.spans.rotation import KeyRotation, rotation_of

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Every layer of these has rotated keys."""
LATENT_MODELS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Every layer of these keeps a latent, in which no position is, and a rotated key."""
_CLASSES = (
    "RotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "DeepseekScalingRotaryEmbedding",
)
"""Angles that grow evenly with the position, whatever the length of the prompt."""


def is_latent(layer: Any) -> bool:
    """Whether it is a layer of multi-head latent attention (MLA)."""
    return hasattr(layer, "kv_lora_rank")


def rotation_of_model(layers: Sequence[Any], longest: int) -> KeyRotation:
    """``layers``: the attention layers whose KV is kept. ``longest``: tokens of the longest prompt.

    Raises LayoutError for a model whose rotation is not known.
    """
    roots = models_with(layers)
    kinds = [type(root).__name__ for root in roots]
    known = LATENT_MODELS if all(is_latent(layer) for layer in layers) else MODELS
    if len(roots) != 1 or kinds[0] not in known:
        raise LayoutError(f"models {kinds}; expected one of {', '.join(known)}")
    found: list[Any] = [
        module
        for module in roots[0].modules()
        if "rotary" in type(module).__name__.lower() and hasattr(module, "rotary_dim")
    ]
    kinds = sorted(type(module).__name__ for module in found)
    if len(found) != 1 or kinds[0] not in _CLASSES:
        raise LayoutError(f"rotary modules {kinds}; expected one of {', '.join(_CLASSES)}")
    (module,) = found
    table = module._compute_cos_sin_cache()
    if len(table) < longest:
        raise LayoutError(f"a rotary table of {len(table)} positions for prompts of {longest}")
    return rotation_of(table.cpu(), module.rotary_dim, module.is_neox_style)
