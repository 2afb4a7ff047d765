"""Parts: the NVMe tier's names for :mod:`kvtier.tiers.registry`; and of folders on several disks
what is refused before any is opened, and the bytes and threads of each."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import ClassVar

from kvtier.core.errors import ConfigError, TierError
from kvtier.core.terminal import size_text
from kvtier.tiers.nvme.disks import (
    NETWORK_FILESYSTEMS,
    RAM_FILESYSTEMS,
    SILENT,
    Disk,
    disk_threads,
    probe_disk,
)
from kvtier.tiers.nvme.folder import TierFolder, asked, holder
from kvtier.tiers.seam import (
    Draft,
    Finding,
    Opened,
    Opening,
    TierFacts,
    TierSection,
    Trial,
    key,
    refused,
    then_tried,
)


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
        "folders",
        "place of the NVMe tier, on several disks a folder each; none: no such tier",
        planned="measured",
    )
    bytes_: int | str | None = key(
        "sizes",
        "reserved at the start, in all or in each folder; none: half of what is free, at most 256 "
        "GiB on each disk",
        needs="path",
        planned="measured",
    )
    write_limit: int | None = key(
        "bytes",
        "most that is written a day; chunks are written when RAM drops them then; none: no limit",
    )

    def folders(self, replica: int = 0) -> list[Path]:
        places = [Path(place) for place in (self.path or "").split(",") if place]
        return [place / f"replica{replica}" if replica else place for place in places]

    def disks(self, replica: int = 0) -> list[NvmeSection]:
        """Return a section for each folder, with a part of the bytes by what is free there."""
        folders, given = self.folders(replica), self.bytes_
        if isinstance(given, str):
            sizes = [int(size.removesuffix("B")) for size in given.split(",")]
            if len(sizes) != len(folders):
                raise ConfigError(
                    f"nvme_bytes={given} has {len(sizes)} sizes for {len(folders)} folders in "
                    "nvme_path; give one for each folder, or one for all together"
                )
        else:
            rooms, held = free_rooms(folders)
            usual = [default_bytes(room) for room in rooms if room is not None]
            assumed = min(usual, default=0)
            sizes = (
                parts_of(given, rooms, held)
                if given
                else [assumed if room is None else default_bytes(room) for room in rooms]
            )
        pairs = zip(folders, sizes, strict=True)
        return [replace(self, path=str(folder), bytes_=size) for folder, size in pairs]

    @property
    def sized(self) -> bool:
        return self.bytes_ is not None

    def decided(self) -> dict[str, int]:
        return {"bytes_": sum(int(each.bytes_ or 0) for each in self.disks())}

    def daily_writes(self) -> int | None:
        return self.write_limit

    def for_slots(self, slot_bytes: int) -> NvmeSection:
        disks = self.disks()
        return replace(
            self,
            path=",".join(f"{each.path}/slots-{slot_bytes}" for each in disks),
            bytes_=self.bytes_
            if len(disks) == 1
            else ",".join(f"{each.bytes_}B" for each in disks),
        )


def default_bytes(free: int) -> int:
    return min(free // 2, (256 << 30))


_LEAST_BYTES = 10 << 20
"""Least useful room. A self-test takes half of it."""


def disk_findings(own: NvmeSection, disk: Disk) -> Iterator[Finding]:
    """Yield findings on ``disk``'s facts, and on the folder's kind and mode, looked at here."""
    if disk.free is SILENT:
        yield Finding("nvme", "fail", f"{disk.path}: {SILENT.source}", "look at its mount")
        return
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
    size = int(own.bytes_ or 0)
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
    with suppress(OSError):
        if os.stat(disk.path).st_mode & stat.S_IWOTH:
            said = f"every user may write in {disk.path}"
            yield Finding("nvme", "warn", said, f"chmod 700 {disk.path}")


SECTION = NvmeSection
_TRIAL_BYTES = 5 << 20

logger = logging.getLogger("kvtier")


def open(own: NvmeSection, around: Opening) -> Opened:
    from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet

    require_apart(own.folders())
    folders = own.folders(around.replica)
    sizes = [int(each.bytes_ or 0) for each in own.disks(around.replica)]
    cpus = len(os.sched_getaffinity(0))
    threads, calls = lane_threads([probe_disk(str(folder)) for folder in folders], cpus)
    require_ours(folders)
    places = list(map(DiskPlace, folders, sizes, calls))
    tier = DiskSet(places, around.chunk_bytes, around.lent, around.in_huge_pages)
    reserved = sum(probe_disk(str(folder)).own.value or 0 for folder in folders)
    where = ",".join(map(str, folders))
    said = (
        f"NVMe: {size_text(reserved)} reserved in {where}, and kept after the end for a warm "
        f"start; 'kvtier clear --folder {where}' gives it back"
    )
    return Opened(tier, threads, "; ".join(filter(None, [said, on_one_device(folders)])))


def away(own: NvmeSection) -> str:
    """Return words on disks whose file system does not answer. Raises ConfigError where no other
    one can be used. Logs warnings."""
    require_apart(own.folders())
    disks, failed, silent = own.disks(), list[str](), list[str]()
    for each in disks:
        disk = probe_disk(str(each.path))
        for finding in disk_findings(each, disk):
            words = f"nvme_path={each.path}: {finding.seen}; {finding.do}"
            if finding.state == "fail":
                (silent if disk.free is SILENT else failed).append(words)
                break
            if finding.state == "warn":
                logger.warning("%s", words)
    if len(failed) == len(disks):
        raise ConfigError("; ".join(failed))
    for words in failed:
        logger.warning("%s: the other disks serve without it", words)
    return "; ".join(silent)


def probe(_own: NvmeSection) -> TierFacts:
    return TierFacts()


def findings(own: NvmeSection, tried: Trial | None) -> Iterator[Finding]:
    if wrong := refused(lambda: require_apart(own.folders())):
        yield Finding("nvme", "fail", wrong, "correct nvme_path")
        return
    for each in own.disks():
        seen = disk_findings(each, probe_disk(str(each.path)))
        do = f"look at the file system of {each.path} and the kernel's log (dmesg)"
        yield from then_tried(seen, tried and partial(in_a_folder_of_its_own, tried), each, do)
    if said := on_one_device(own.folders()):
        yield Finding("nvme", "warn", said, "name one folder on each disk")


def in_a_folder_of_its_own(tried: Trial, own: NvmeSection) -> str:
    """Run the self-test below the folder, so that no engine's files are touched."""
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
    """Set nothing: the plan of the disk follows from RAM's (:mod:`kvtier.autoconfig.plan`)."""


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
