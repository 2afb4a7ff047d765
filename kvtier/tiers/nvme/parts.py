"""The NVMe tier's names for :mod:`kvtier.tiers.registry`."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text
from kvtier.tiers.finding import Finding
from kvtier.tiers.nvme.disks import (
    NETWORK_FILESYSTEMS,
    RAM_FILESYSTEMS,
    Disk,
    disk_threads,
    probe_disk,
)
from kvtier.tiers.seam import Draft, Opened, Opening, TierFacts, TierSection, Trial, key, then_tried


@dataclass(frozen=True, kw_only=True)
class NvmeSection(TierSection):
    name = "nvme"
    title = "NVMe"
    latency_s = 0.001
    shared = False
    medium = "DISK"
    removed: ClassVar[Mapping[str, str]] = {
        "threads": "the kind of the disk and the CPUs decide it",
        "write": "with nvme_write_limit chunks are written when RAM drops them, else when saved",
    }

    path: str | None = key(
        "folder", "place of the NVMe tier; none: no such tier", planned="measured"
    )
    bytes_: int | None = key(
        "bytes",
        "reserved at the start; none: half of what is free, at most 256 GiB",
        needs="path",
        planned="measured",
    )
    write_limit: int | None = key(
        "bytes",
        "most that is written a day; chunks are written when RAM drops them then; none: no limit",
    )

    @property
    def room(self) -> int:
        if self.bytes_ is not None:
            return self.bytes_
        disk = probe_disk(str(self.path))
        return default_bytes((disk.free.value or 0) + (disk.own.value or 0))

    def folder(self, replica: int = 0) -> Path:
        place = Path(str(self.path))
        return place / f"replica{replica}" if replica else place

    @property
    def sized(self) -> bool:
        return self.bytes_ is not None

    def decided(self) -> dict[str, int]:
        return {"bytes_": self.room}

    def daily_writes(self) -> int | None:
        return self.write_limit

    def for_slots(self, slot_bytes: int) -> NvmeSection:
        return replace(self, path=f"{self.path}/slots-{slot_bytes}")


def default_bytes(free: int) -> int:
    return min(free // 2, (256 << 30))


_LEAST_BYTES = 10 << 20
"""Least useful room. A self-test takes half of it."""


def disk_findings(own: NvmeSection, disk: Disk) -> Iterator[Finding]:
    """Findings of ``disk``'s facts, and of the folder's kind and mode, which are looked at."""
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


SECTION = NvmeSection
_TRIAL_BYTES = 5 << 20

logger = logging.getLogger("kvtier")


def open(own: NvmeSection, around: Opening) -> Opened:
    from kvtier.tiers.nvme.tier import NvmeTier

    folder = own.folder(around.replica)
    own = replace(own, path=str(folder))
    tier = NvmeTier(
        folder,
        own.room,
        around.chunk_bytes,
        lent=around.lent,
        in_huge_pages=around.in_huge_pages,
    )
    disk = probe_disk(str(folder))
    said = (
        f"NVMe: {size_text(disk.own.value or 0)} reserved in {folder}, and kept after the end for "
        f"a warm start; 'kvtier clear --folder {folder}' gives it back"
    )
    return Opened(tier, disk_threads(disk, len(os.sched_getaffinity(0))), said)


def away(own: NvmeSection) -> str:
    """A disk is never away. Raises ConfigError for a fail, logs warnings."""

    for finding in disk_findings(own, probe_disk(str(own.path))):
        if finding.state == "fail":
            raise ConfigError(f"nvme_path={own.path}: {finding.seen}; {finding.do}")
        if finding.state == "warn":
            logger.warning("nvme_path=%s: %s; %s", own.path, finding.seen, finding.do)
    return ""


def probe(_own: NvmeSection) -> TierFacts:
    return TierFacts()


def findings(own: NvmeSection, tried: Trial | None) -> Iterator[Finding]:

    seen = disk_findings(own, probe_disk(str(own.path)))
    do = f"look at the file system of {own.path} and the kernel's log (dmesg)"
    yield from then_tried(seen, tried and partial(in_a_folder_of_its_own, tried), own, do)


def in_a_folder_of_its_own(tried: Trial, own: NvmeSection) -> str:
    """The self-test below the folder, so that no engine's files are touched."""
    place, folder = Path(str(own.path)), Path(str(own.path)) / f"selftest-{os.getpid()}"
    made = [one for one in (place, *place.parents) if not one.exists()]
    try:
        return tried(NvmeSection(path=str(folder), bytes_=_TRIAL_BYTES))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for one in made:
                one.rmdir()


def plan(_found: TierFacts | None, _draft: Draft) -> None:
    """The plan of the disk follows from RAM's, so :mod:`kvtier.autoconfig.plan` makes it."""
