"""What the NVMe tier's tests share: small slots, keys, and a read that fails the test when the tier
lies."""

import os
from pathlib import Path

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.testing import content
from kvtier.tiers.nvme.chunk_folder import ChunkFolder
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.nvme.index import table_bytes
from tests.child_process import wait_for

SLOT = 8192
LAYOUT = ChunkLayout(bytes(32), 1, 1, (SLOT,))


def room(slots, slot_bytes=SLOT):
    """The fewest bytes for so many slots."""
    return table_bytes(slots) + slots * slot_bytes


ONE, TWO, FIVE = SETS = (20,), (20, 5), (9, 1, 4, 20, 7)
"""Slots of each disk."""
ON_SETS = pytest.mark.parametrize("disks", SETS)


def opened(place, disks, slot_bytes=SLOT, *, below="", of_bytes=0, **more):
    """A tier in a folder for each disk, or one ``below`` it, with room for slots ``of_bytes``."""
    places = [
        DiskPlace(place / f"disk{at}" / below, room(slots, of_bytes or slot_bytes), 2)
        for at, slots in enumerate(disks)
    ]
    return DiskSet(places, slot_bytes, **more)


def chunk_folder(path, bytes_, slot_bytes=SLOT, *huge, lent=False):
    """One disk's folder, open."""
    folder = ChunkFolder(path, bytes_, slot_bytes, *huge)
    folder.open(lent=lent)
    return folder


def delete(folder, key):
    folder.delete(key)
    folder.settle()


def section(place, disks, slot_bytes=SLOT):
    """Configuration keys of the same folders."""
    return {
        "nvme_path": ",".join(f"{place}/disk{at}" for at in range(len(disks))),
        "nvme_bytes": ",".join(f"{room(slots, slot_bytes)}B" for slots in disks),
    }


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


def tried(tier):
    """What a set has lost and found, once every disk that is due was tried."""
    before = tier.lost_and_found()
    wait_for(lambda: all(disk.lane.is_idle for disk in tier.disks), "tried")
    after = tier.lost_and_found()
    return [*before[0], *after[0]], [*before[1], *after[1]]


def is_direct(folder):
    info = Path(f"/proc/self/fdinfo/{folder._files._payload}").read_text(encoding="utf-8")
    return bool(int(info.split()[3], 8) & os.O_DIRECT)
