"""A request as vLLM's scheduler shows it to a connector."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


def vllm_request(tokens: Sequence[int], request_id: str = "one", salt: str | None = None) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        num_output_tokens=0,
        num_computed_tokens=0,
        num_preemptions=0,
        max_tokens=16,
        get_finished_reason=lambda: None,
        all_token_ids=tokens,
        skip_reading_prefix_cache=False,
        prompt_embeds=None,
        lora_request=None,
        cache_salt=salt,
        mm_features=None,
        kv_transfer_params=None,
    )
