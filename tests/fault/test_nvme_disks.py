"""Full, failing, limited and unsuitable disks under ChunkFolder: real file systems, mounted where
the machine allows."""

import logging
import os
import resource
import subprocess
from pathlib import Path

import pytest

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import TierError
from kvtier.testing import content
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from tests.clock import Clock
from tests.nvme_place import LAYOUT, SLOT, chunk_folder, fill, held, holds, is_direct, room, tried

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
        chunk_folder(disk / "tier", 1 << 20)
    assert not list(disk.iterdir())
    chunk_folder(disk / "tier", 900_000).close()


def test_a_full_disk_refuses_writes_and_recovers(mount, caplog):
    """Preallocation makes this impossible, until somebody truncates the file."""
    disk = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    tier = chunk_folder(disk / "tier", ROOM)
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
    tier = chunk_folder(disk / "tier", room(100))
    fill(tier, keys[:8])
    fill_up(outer)
    stored = [key for key in keys[8:] if tier.write(key, content(key, SLOT))]
    assert tier.counts["failed_writes"] == 92 - len(stored)
    assert tier.counts["failed_writes"] > 50
    assert all(holds(tier, key) for key in keys[:8])
    assert {key for key in keys[8:] if holds(tier, key)} <= set(stored)
    tier.close()


def test_a_file_size_limit_refuses_writes(tmp_path):
    tier = chunk_folder(tmp_path / "tier", ROOM)
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
    tier = chunk_folder(mount("-t", "ramfs", "ramfs") / "tier", ROOM)
    assert not is_direct(tier)
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "refuses O_DIRECT" in warned[0]
    fill(tier, KEYS)
    assert held(tier, KEYS) == set(range(SLOTS))
    tier.close()


class Disks:
    """A set on file systems of their own, of unequal sizes, on loop devices."""

    def __init__(self, mount, tmp_path):
        self.images, self.points, self.clock = list[Path](), list[Path](), Clock()
        for at, mib in enumerate((16, 24, 48)):
            image = tmp_path / f"image{at}"
            with image.open("wb") as file:
                file.truncate(mib << 20)
            subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
            self.images.append(image)
            self.points.append(mount("-o", "loop", str(image)))
        self.keys = LAYOUT.keys(range(60))

    def opened(self):
        places = [DiskPlace(each / "tier", room(40), 2) for each in self.points]
        return DiskSet(places, SLOT, clock=self.clock)

    def filled(self):
        tier = self.opened()
        assert not tier.recovered()
        fill(tier, self.keys)
        return tier

    def exchange(self, *images):
        """Mount ``images`` in the places of the first ones. None: nothing."""
        for point in self.points[: len(images)]:
            subprocess.run(["umount", "--lazy", str(point)], check=True)
        for point, image in zip(self.points, images, strict=False):
            if image is not None:
                subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)


@pytest.fixture
def disks(mount, tmp_path):
    return Disks(mount, tmp_path)


def of(tier, at):
    return set(tier.disks[at].chunks.held())


@pytest.mark.extended
def test_a_file_system_that_is_full_costs_nothing_in_use_and_itself_at_a_start(disks):
    tier = disks.opened()
    filler = fill_up(disks.points[0])
    fill(tier, disks.keys)
    assert held(tier, disks.keys) == set(range(60)) and of(tier, 0)
    tier.close(disks.keys)
    (disks.points[1] / "tier/slots.kvtier").unlink()
    other = fill_up(disks.points[1])
    tier = disks.opened()
    assert [bool(disk.away) for disk in tier.disks] == [False, True, False]
    assert "must stay free" in tier.nodes_away[0] and tier.capacity == 80
    assert set(tier.recovered()) == of(tier, 0) | of(tier, 2)
    assert held(tier, disks.keys) == {at for at, key in enumerate(disks.keys) if tier.find([key])}
    filler.unlink()
    other.unlink()
    disks.clock.now += 60
    assert tried(tier) == ([], []) and tier.capacity == 120
    tier.close()


@pytest.mark.extended
def test_a_file_system_that_is_unmounted_costs_its_own_and_is_back_when_mounted(disks):
    tier = disks.filled()
    first = of(tier, 0)
    disks.exchange(None)
    assert held(tier, list(first)[:1]), "open files are read to the end"
    assert set(tried(tier)[0]) == first and tier.capacity == 80
    disks.clock.now += 60
    assert tried(tier) == ([], []) and not list(disks.points[0].iterdir()), "nothing made"
    assert len(held(tier, disks.keys)) == 60 - len(first)
    subprocess.run(["mount", "-o", "loop", str(disks.images[0]), str(disks.points[0])], check=True)
    disks.clock.now += 60
    assert set(tried(tier)[1]) == first and held(tier, disks.keys) == set(range(60))
    tier.close()


@pytest.mark.extended
def test_file_systems_that_change_places_are_left_alone_and_warm_after_a_restart(disks):
    tier = disks.filled()
    last = of(tier, 2)
    disks.exchange(disks.images[1], disks.images[0])
    held(tier, disks.keys)
    disks.clock.now += 60
    tried(tier)
    assert len(tier.nodes_away) == 2 and "another device" in tier.nodes_away[0]
    assert held(tier, disks.keys) == {at for at, key in enumerate(disks.keys) if key in last}
    tier.close(disks.keys)
    tier = disks.opened()
    assert set(tier.recovered()) == set(disks.keys) and held(tier, disks.keys) == set(range(60))
    tier.close()
