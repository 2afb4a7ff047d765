"""Full, failing, limited and unsuitable disks under NvmeTier: real file systems, mounted where the
machine allows."""

import logging
import os
import resource
import subprocess
from pathlib import Path

import pytest

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import TierError
from kvtier.testing.check_tier import content
from kvtier.tiers.nvme.tier import NvmeTier
from tests.nvme_place import LAYOUT, SLOT, fill, held, holds, room

SLOTS = 8
ROOM = room(SLOTS)
KEYS = LAYOUT.keys(range(SLOTS))


@pytest.fixture
def mount(tmp_path):
    """``mount(*arguments)``: a file system mounted on a new folder, unmounted afterwards. Skips
    where not allowed."""
    mounted: list[Path] = []

    def mount_one(*arguments):
        target = tmp_path / f"mount{len(mounted)}"
        target.mkdir()
        done = subprocess.run(
            ["mount", *arguments, str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
        mounted.append(target)
        return target

    if os.geteuid():
        pytest.skip("mounting a file system needs root")
    yield mount_one
    for target in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def fill_up(folder):
    """Take the file system's last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(PAGE_BYTES)):
                pass
        except OSError:
            return filler
    raise AssertionError("a disk without end")


def test_a_disk_without_room_is_refused_and_left_as_it_was(mount):
    disk = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    with pytest.raises(TierError, match="must stay free"):
        NvmeTier(disk / "tier", 1 << 20, SLOT)
    assert not list(disk.iterdir())
    NvmeTier(disk / "tier", 900_000, SLOT).close()


def test_a_full_disk_refuses_writes_and_recovers(mount, caplog):
    """Preallocation makes this impossible, until somebody truncates the file."""
    disk = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    tier = NvmeTier(disk / "tier", ROOM, SLOT)
    os.truncate(disk / "tier" / "slots.kvtier", 0)
    filler = fill_up(disk)
    for key in KEYS:
        assert not tier.write(key, content(key, SLOT))
    assert tier.counts["failed_writes"] == SLOTS
    assert caplog.text.count("first fault of kind write") == 1
    assert held(tier, KEYS) == set()
    filler.unlink()
    fill(tier, KEYS)
    assert held(tier, KEYS) == set(range(SLOTS))
    tier.close()


def test_a_device_that_fails_and_tears_writes_costs_only_those(mount):
    """A loop device over a sparse image on a tmpfs without room for more of the image: it fails
    most writes, and acknowledges some of which only a part has arrived."""
    outer = mount("-t", "tmpfs", "-o", "size=8m", "tmpfs")
    image = outer / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    disk = mount("-o", "loop,errors=continue", str(image))
    keys = LAYOUT.keys(range(100))
    tier = NvmeTier(disk / "tier", room(100), SLOT)
    fill(tier, keys[:8])
    fill_up(outer)
    stored = [key for key in keys[8:] if tier.write(key, content(key, SLOT))]
    assert tier.counts["failed_writes"] == 92 - len(stored)
    assert tier.counts["failed_writes"] > 50
    assert all(holds(tier, key) for key in keys[:8])
    assert {key for key in keys[8:] if holds(tier, key)} <= set(stored)
    tier.close()


def test_a_file_size_limit_refuses_writes(tmp_path):
    tier = NvmeTier(tmp_path / "tier", ROOM, SLOT)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * SLOT + PAGE_BYTES, before[1]))
    try:
        stored = [tier.write(key, content(key, SLOT)) for key in KEYS]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stored == [True] * 4 + [False] * 4
    assert tier.counts["failed_writes"] == 4
    assert held(tier, KEYS) == set(range(4))
    fill(tier, KEYS[4:])
    assert held(tier, KEYS) == set(range(SLOTS))
    tier.close()


def test_without_o_direct_it_works_and_warns_once(mount, caplog):
    tier = NvmeTier(mount("-t", "ramfs", "ramfs") / "tier", ROOM, SLOT)
    assert not tier.direct
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "refuses O_DIRECT" in warned[0]
    fill(tier, KEYS)
    assert held(tier, KEYS) == set(range(SLOTS))
    tier.close()
