"""The size of a chunk: pure arithmetic, the same in a plan and in every process of an engine."""

from __future__ import annotations

from kvtier.autoconfig.facts import KIB, MIB

TYPICAL_KV_BYTES = 128 * KIB
"""KV bytes a token in models of about 8 billion parameters."""


def stored_kv_bytes(single: int, heads: int, tensor: int, hosts: int = 1) -> int:
    """KV bytes a token on all ranks of one host together. Ranks keep copies of heads that they
    cannot divide, and each host keeps what its own ranks have."""
    return -(-single * max(tensor, heads) // (heads * hosts))


def chunk_tokens(kv_bytes: int, block: int, longest: int) -> int:
    """Tokens a chunk: 256, unless such a chunk has less than 2 or more than 64 MiB. It is whole
    blocks. When it grows, it is at most a sixteenth of the longest context."""
    tokens = 256
    while tokens * kv_bytes < 2 * MIB and tokens < 1024 and tokens * 32 <= longest:
        tokens *= 2
    while tokens * kv_bytes > 64 * MIB and tokens > 64:
        tokens //= 2
    return -(-tokens // block) * block
