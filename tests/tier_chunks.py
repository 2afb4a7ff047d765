"""Small chunks for tests of tiers: their keys and their bytes."""

from __future__ import annotations

from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.tiers.base import Tier

CHUNK_BYTES = 10_000
NAMESPACE = bytes(range(8))
KEYS = ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)).keys(range(8))


def chunk(key: ChunkKey, size: int = CHUNK_BYTES) -> memoryview:
    return memoryview((key * (size // len(key) + 1))[:size])


def holds(tier: Tier, key: ChunkKey) -> bool | None:
    """Read a chunk. It must be the right one if there is one. None: the tier cannot be asked
    now."""
    into = memoryview(bytearray(CHUNK_BYTES))
    held = tier.read(key, into)
    assert not held or into == chunk(key)
    return held
