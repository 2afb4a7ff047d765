"""Folders of one NVMe tier on several disks: what is refused before any is opened, and what each
one gets of bytes and threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from kvtier.core.errors import ConfigError, TierError
from kvtier.tiers.nvme.disks import Disk, disk_threads, probe_disk
from kvtier.tiers.nvme.folder import TierFolder
from kvtier.tiers.nvme.in_use import holder

_UNCHANGED_PART = 50
"""Part (1/50) of the bytes that may change without another division."""


def require_apart(folders: Sequence[Path]) -> None:
    """Raises ConfigError for a folder that is there twice, or within another one."""
    real = {folder: folder.resolve() for folder in folders}
    for one, other in combinations(folders, 2):
        if real[one].is_relative_to(real[other]) or real[other].is_relative_to(real[one]):
            raise ConfigError(
                f"nvme_path names {one} and {other}, which are one folder, or one is within the "
                "other; expected a folder of its own on each disk"
            )


def require_ours(folders: Sequence[Path]) -> None:
    """Raises TierError for a folder of another user, or in use. One that cannot be read is a disk
    that fails."""
    for folder in folders:
        with suppress(OSError), TierFolder(folder):
            pass
        if who := holder(folder):
            raise TierError(
                f"NVMe tier {folder}: in use by {who}; stop it, or give this one folders of its own"
            )


def device_of(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev


def on_one_device(folders: Sequence[Path]) -> str:
    """Words on folders that share a device. Empty: none do."""
    by_device: dict[int, list[str]] = {}
    for folder in folders:
        by_device.setdefault(device_of(folder), []).append(str(folder))
    shared = [" and ".join(those) for those in by_device.values() if len(those) > 1]
    return "".join(f"{those} lie on one device, which is read no faster so" for those in shared)


def free_rooms(folders: Sequence[Path]) -> tuple[list[int], list[int]]:
    """Bytes that each folder may have, and those of its files from before among them. Folders on
    one device share what is free there."""
    devices = [device_of(folder) for folder in folders]
    those, disks = Counter(devices), [probe_disk(str(folder)) for folder in folders]
    held = [disk.own.value or 0 for disk in disks]
    free = [(disk.free.value or 0) // those[at] for disk, at in zip(disks, devices, strict=True)]
    return [sum(both) for both in zip(free, held, strict=True)], held


def parts_of(given: int, rooms: Sequence[int], held: Sequence[int]) -> list[int]:
    """``given`` bytes divided as the folders have room, or as before where that is nearly all: a
    smaller file drops chunks."""
    if len(rooms) > 1 and all(held) and abs(given - sum(held)) < given // _UNCHANGED_PART:
        return list(held)
    parts = [given * room // (sum(rooms) or 1) for room in rooms]
    return [given - sum(parts[1:]), *parts[1:]]


def lane_threads(disks: Sequence[Disk], cpus: int) -> tuple[int, list[int]]:
    """Threads for all disks: what each kind needs, at most two a CPU, and of several disks at least
    two each, which wait more than they work. With the most that each disk may hold of them."""
    wanted = [disk_threads(disk, cpus) for disk in disks]
    least = 2 * len(disks) if len(disks) > 1 else 1
    threads = max(least, min(sum(wanted), 2 * cpus))
    return threads, [max(1, round(threads * own / sum(wanted))) for own in wanted]
