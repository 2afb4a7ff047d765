"""A datum of :mod:`kvtier.connectors.vllm.metadata` that is made without vLLM."""

from __future__ import annotations

from typing import NamedTuple


class SpanMove(NamedTuple):
    """Tokens of one slot, and where in the prompt they belong."""

    slot: int
    first: int
    """In the slot."""
    tokens: int
    begin: int
    """In the prompt."""
    distance: int
