"""Saved compute: how much prefill a hit spares. A chunk late in a long prompt spares more than an
early one, because each of its tokens looks back at all tokens before it. Pure.

A token at position ``p`` costs ``2 * parameters`` operations for the weights, and for attention
``4 * layers * heads * head_dim * p`` (scores and their sum over ``p`` tokens, a multiplication and
an addition each; Kaplan et al., *Scaling laws for neural language models*, 2020, section 2.1). So
its cost is proportional to ``1 + p / s0``. Here ``s0 = parameters / (2 * layers * heads *
head_dim)`` is the position at which attention costs as much as all the rest.
"""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_S0_TOKENS = 30_500.0
"""``s0`` of Llama-3.1-8B: 8.0 billion parameters, 32 layers and 32 heads of 128."""
_TYPICAL_CHUNK_TOKENS = 256


def balance(active_parameters: int, attention_flops: int) -> float:
    """Return ``s0``, the position in tokens at which attention costs as much as all the rest of the
    model, or infinity without attention. ``attention_flops``: of causal attention over n tokens,
    divided by n * n: ``2 * layers * heads * head_dim`` of the layers that see the whole context."""
    return active_parameters / attention_flops if attention_flops else float("inf")


class SavedCompute(NamedTuple):
    """Compute that hits spare a model. The unit is the prefill of one chunk at a prompt's
    beginning. Times ``chunk_tokens`` and the seconds of a token without attention it is time."""

    chunk_tokens: int = _TYPICAL_CHUNK_TOKENS
    s0: float = DEFAULT_S0_TOKENS
    source: str = "assumed: a model of 8 billion parameters and 32 layers"

    def of(self, chunks: int, first: int = 0) -> float:
        """Return what hits of ``chunks`` consecutive chunks from number ``first`` on save: the sum
        of a token's cost at the middle of each."""
        end = first + chunks
        return chunks + self.chunk_tokens * (end * end - first * first) / (2 * self.s0)
