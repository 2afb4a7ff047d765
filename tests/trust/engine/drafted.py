"""Families whose tokens are drafted, by layers of their own or by another model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.trust.engine.asked import Drafter

_MTP = {"num_nextn_predict_layers": 1}
DENSE = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


class Drafted(NamedTuple):
    """A family with a drafter. ``fields``: of its configuration that say so."""

    family: str
    fields: Mapping[str, Any]
    drafter: Drafter


DRAFTED = {
    "Qwen3-Next with MTP": Drafted("Qwen3-Next", {}, Drafter("mtp")),
    "Qwen3.5 with MTP": Drafted("Qwen3.5", {"mtp_num_hidden_layers": 1}, Drafter("mtp")),
    "Qwen3.8 with MTP": Drafted("Qwen3.8", {}, Drafter("mtp")),
    "Nemotron 3 with MTP": Drafted("Nemotron 3", _MTP, Drafter("mtp")),
    "Kimi K3 with MTP": Drafted("Kimi K3", _MTP, Drafter("mtp")),
    "DeepSeek V3 with MTP": Drafted("DeepSeek V3", _MTP, Drafter("mtp")),
    "DeepSeek V4 with MTP": Drafted("DeepSeek V4", _MTP, Drafter("mtp")),
    "GLM-5 with MTP": Drafted("GLM-5", _MTP, Drafter("mtp")),
    "Llama with EAGLE 3": Drafted(
        "Llama",
        {},
        Drafter(
            "eagle3",
            "Eagle3LlamaForCausalLM",
            DENSE | {"num_hidden_layers": 1, "draft_vocab_size": 1024},
        ),
    ),
    "Qwen3 with DFlash": Drafted(
        "Qwen3", {}, Drafter("dflash", "DFlashDraftModel", DENSE | {"num_hidden_layers": 2})
    ),
    "Qwen3 with a draft model": Drafted(
        "Qwen3", {}, Drafter("draft_model", "Qwen3ForCausalLM", DENSE | {"num_hidden_layers": 1})
    ),
}
