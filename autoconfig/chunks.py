"""How large a chunk is: pure arithmetic that a plan and every process of an engine do alike."""

from __future__ import annotations

from kvtier.autoconfig.facts import KIB, MIB

TYPICAL_KV_BYTES = 128 * KIB
"""A token's KV in models of about 8 billion parameters."""


def stored_kv_bytes(single: int, heads: int, tensor: int) -> int:
    """Bytes of KV a token on all tensor ranks together, which keep copies of heads they cannot
    divide."""
    return -(-single * max(tensor, heads) // heads)


def chunk_tokens(kv_bytes: int, block: int, longest: int) -> int:
    """Tokens a chunk: 256, unless that is less than 2 or more than 64 MiB; whole blocks; no more
    than a sixteenth of the longest context when it grows."""
    tokens = 256
    while tokens * kv_bytes < 2 * MIB and tokens < 1024 and tokens * 32 <= longest:
        tokens *= 2
    while tokens * kv_bytes > 64 * MIB and tokens > 64:
        tokens //= 2
    return -(-tokens // block) * block
