"""Small chunks for tests of tiers: their keys and their bytes."""

from kvtier.core.chunk import ChunkLayout

CHUNK_BYTES = 10_000
NAMESPACE = bytes(range(8))
KEYS = ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,)).keys(range(8))


def chunk(key, size=CHUNK_BYTES):
    return memoryview((key * (size // len(key) + 1))[:size])


def holds(tier, key):
    """Read a chunk. It must be the right one if there is one. None: the tier cannot be asked
    now."""
    into = memoryview(bytearray(CHUNK_BYTES))
    held = tier.read(key, into)
    assert not held or into == chunk(key)
    return held
