"""Folders of one NVMe tier on several disks: what is refused before any is opened, and the bytes
and threads of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path

from kvtier.core.errors import ConfigError, TierError
from kvtier.tiers.nvme.disks import SILENT, Disk, disk_threads, probe_disk
from kvtier.tiers.nvme.folder import TierFolder, asked
from kvtier.tiers.nvme.in_use import holder

_UNCHANGED_PART = 50
"""Divisor of the bytes: a smaller change of them keeps the old division."""


def require_apart(folders: Sequence[Path]) -> None:
    """Raise ConfigError for a folder that is there twice, or within another one."""
    real = {folder: asked(folder, folder.resolve, folder) for folder in folders}
    for one, other in combinations(folders, 2):
        if real[one].is_relative_to(real[other]) or real[other].is_relative_to(real[one]):
            raise ConfigError(
                f"nvme_path names {one} and {other}, which are one folder, or one is within the "
                "other; expected a folder of its own on each disk"
            )


def require_ours(folders: Sequence[Path]) -> None:
    """Raise TierError for a folder of another user, or in use. One that cannot be read is a disk
    that fails."""
    for folder in folders:
        with suppress(OSError):
            asked(folder, partial(_require_own, folder), None)
        if who := holder(folder):
            raise TierError(
                f"NVMe tier {folder}: in use by {who}; stop it, or give this one folders of its own"
            )


def _require_own(folder: Path) -> None:
    with TierFolder(folder):
        pass


def _device_of(folder: Path) -> int | Path:
    """Return the folder's device. A silent file system counts as a device of its own."""
    there = (one.stat().st_dev for one in (folder, *folder.parents) if one.exists())
    return asked(folder, lambda: next(there), folder)


def on_one_device(folders: Sequence[Path]) -> str:
    """Return words on folders that share a device, "" if none do."""
    by_device: dict[int | Path, list[str]] = {}
    for folder in folders:
        by_device.setdefault(_device_of(folder), []).append(str(folder))
    shared = [" and ".join(those) for those in by_device.values() if len(those) > 1]
    return "".join(f"{those} lie on one device, which is read no faster so" for those in shared)


def free_rooms(folders: Sequence[Path]) -> tuple[list[int | None], list[int]]:
    """Return the bytes that each folder may have, and those of its files from before among them.
    Folders on one device share what is free there. None if the file system is silent."""
    devices = [_device_of(folder) for folder in folders]
    those, disks = Counter(devices), [probe_disk(str(folder)) for folder in folders]
    held = [disk.own.value or 0 for disk in disks]
    rooms = [
        None if disk.free is SILENT else (disk.free.value or 0) // those[at] + own
        for disk, at, own in zip(disks, devices, held, strict=True)
    ]
    return rooms, held


def parts_of(given: int, rooms: Sequence[int | None], held: Sequence[int]) -> list[int]:
    """Divide ``given`` bytes by the folders' room, or as before where that is nearly all: a smaller
    file drops chunks. Silent folders share what the others leave, which keep what they have."""
    if silent := rooms.count(None):
        least = given // len(rooms)
        parts = [
            0 if room is None else min(own or least, room)
            for room, own in zip(rooms, held, strict=True)
        ]
        rest = max(0, given - sum(parts)) // silent
        return [rest if room is None else part for room, part in zip(rooms, parts, strict=True)]
    known = [room or 0 for room in rooms]
    if len(rooms) > 1 and all(held) and abs(given - sum(held)) < given // _UNCHANGED_PART:
        return list(held)
    parts = [given * room // (sum(known) or 1) for room in known]
    return [given - sum(parts[1:]), *parts[1:]]


def lane_threads(disks: Sequence[Disk], cpus: int) -> tuple[int, list[int]]:
    """Return the threads for all disks: what each kind needs, at most two a CPU, and at least two
    for each of several disks, because they mostly wait. Also returns the most for each disk."""
    wanted = [disk_threads(disk, cpus) for disk in disks]
    least = 2 * len(disks) if len(disks) > 1 else 1
    threads = max(least, min(sum(wanted), 2 * cpus))
    return threads, [max(1, round(threads * own / sum(wanted))) for own in wanted]
