"""What the NVMe tier's tests share: small slots, keys, and a read that fails the test when the tier
lies."""

from kvtier.core.chunk import ChunkLayout
from kvtier.testing.check_tier import content
from kvtier.tiers.nvme.index import table_bytes

SLOT = 8192
LAYOUT = ChunkLayout(bytes(32), 1, 1, (SLOT,))


def room(slots, slot_bytes=SLOT):
    """The fewest bytes for so many slots."""
    return table_bytes(slots) + slots * slot_bytes


def fill(tier, keys):
    for key in keys:
        assert tier.write(key, content(key, SLOT))


def holds(tier, key):
    into = memoryview(bytearray(SLOT))
    held = tier.read(key, into)
    assert not held or into == content(key, SLOT), "a lie"
    return held


def held(tier, keys):
    """Which of ``keys`` can be read."""
    return {index for index, key in enumerate(keys) if holds(tier, key)}


def flip(file, at):
    """Damage one bit of the byte at ``at``."""
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 0x10]))
