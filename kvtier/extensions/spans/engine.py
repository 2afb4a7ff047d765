"""What an engine has of spans. It is in every engine, to say why a request is computed exactly."""

from __future__ import annotations

import logging

from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.extensions.spans.scheduler_half import Able, Spans

logger = logging.getLogger("kvtier.connectors.vllm")


def extensions(tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    return (Spans(tools, _able(facts)),)


def _able(facts: EngineFacts) -> Able:
    """What becomes of requests that ask for documents from other prompts."""
    why = next(filter(None, (rank.why_no_spans for rank in facts.ranks)), "")
    if facts.spans and not facts.vllm_config.kv_transfer_config.is_kv_consumer:
        why = "this engine loads nothing"
    if facts.spans and why:
        logger.warning("spans: every request is computed exactly: %s", why)
    in_place = next(filter(None, (rank.why_not_in_place for rank in facts.ranks)), "")
    most = facts.vllm_config.scheduler_config.max_num_batched_tokens
    return Able(why, in_place, most)
