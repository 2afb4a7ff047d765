"""Findings about the folder of an NVMe tier before one is opened there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvtier.core.terminal import size_text
from kvtier.tiers.finding import Finding
from kvtier.tiers.nvme.disks import NETWORK_FILESYSTEMS, RAM_FILESYSTEMS, Disk
from kvtier.tiers.nvme.section import NvmeSection, default_bytes

_LEAST_BYTES = 10 << 20
"""Room with which a folder is of use. A self-test takes half of it."""


def disk_findings(own: NvmeSection, disk: Disk) -> Iterator[Finding]:
    """Rights, room, file system and O_DIRECT. Pure, except that it looks at the folder's own kind
    and mode."""
    if os.path.lexists(disk.path) and not os.path.isdir(disk.path):
        yield Finding(
            "nvme", "fail", f"{disk.path} is not a folder", "name a folder of its own in nvme_path"
        )
        return
    kind = disk.filesystem.value or "unknown file system"
    if disk.writable.value is False:
        yield Finding(
            "nvme",
            "fail",
            disk.writable.source,
            f"give this user a folder of its own at {disk.path}",
        )
        return
    room = (disk.free.value or 0) + (disk.own.value or 0)
    size = own.bytes_ or default_bytes(room)
    source = own.sources.get("bytes_", "default")
    held = f"{size_text(size)} ({source}) of {size_text(room)} on {kind}"
    if size > room:
        yield Finding(
            "nvme",
            "fail",
            held,
            f"lower nvme_bytes below {size_text(room)}, or make room at {disk.path}",
        )
    elif room < _LEAST_BYTES:
        yield Finding("nvme", "fail", held, f"make room at {disk.path}, or remove nvme_path")
    else:
        direct = ", O_DIRECT" if disk.o_direct.value else ""
        yield Finding(
            "nvme",
            "ok",
            f"{disk.path}: {held}, {disk.device.value or 'device not visible'}{direct}",
        )
    if kind in RAM_FILESYSTEMS:
        yield Finding(
            "nvme", "warn", f"{kind} is RAM: its bytes are counted twice", "name a folder on a disk"
        )
    elif kind in NETWORK_FILESYSTEMS or kind == "overlay":
        yield Finding(
            "nvme",
            "warn",
            f"{kind}: slow, or gone with the container",
            "name a folder on a local disk's volume",
        )
    if disk.o_direct.value is False:
        do = "the page cache takes RAM a second time there; name a folder on ext4 or xfs"
        yield Finding("nvme", "warn", f"no O_DIRECT at {disk.path}: {disk.o_direct.source}", do)
    if _others_write(Path(disk.path)):
        yield Finding(
            "nvme", "warn", f"every user may write in {disk.path}", f"chmod 700 {disk.path}"
        )


def _others_write(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False
