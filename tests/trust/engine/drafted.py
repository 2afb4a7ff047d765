"""Families whose tokens are drafted, by layers of their own or by another model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.trust.engine.asked import Drafter

_MTP = {"num_nextn_predict_layers": 1}
_DSPARK = {"n_mtp_layers": 2, "dspark_target_layer_ids": [1, 3], "dspark_markov_rank": 16}
"""DeepSeek's checkpoints have the layers of this drafter."""
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
    "Qwen3 with DSpark": Drafted(
        "Qwen3",
        {},
        Drafter(
            "dspark",
            "Qwen3DSparkModel",
            DENSE | {"num_hidden_layers": 2, "target_layer_ids": [1, 3], "markov_rank": 16},
        ),
    ),
    "Kimi K3 with DSpark": Drafted(
        "Kimi K3",
        {},
        Drafter(
            "dspark",
            "K3DSparkModel",
            {
                "vocab_size": 1024,
                "hidden_size": 128,
                "target_hidden_size": 128,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "q_lora_rank": 64,
                "target_layer_ids": [1, 3],
                "num_target_layers": 2,
                "markov_rank": 16,
            },
        ),
    ),
    "DeepSeek V4 with DSpark": Drafted("DeepSeek V4", _DSPARK, Drafter("dspark")),
    "DeepSeek V4.1 with DSpark": Drafted("DeepSeek V4.1", _DSPARK, Drafter("dspark")),
    "Qwen3 with a draft model": Drafted(
        "Qwen3", {}, Drafter("draft_model", "Qwen3ForCausalLM", DENSE | {"num_hidden_layers": 1})
    ),
}
