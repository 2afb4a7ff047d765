"""The keys of the NVMe tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from kvtier.tiers.nvme.disks import probe_disk
from kvtier.tiers.seam import TierSection, key


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
        """Bytes: the key, else its default for what is free now."""
        if self.bytes_ is not None:
            return self.bytes_
        disk = probe_disk(str(self.path))
        return default_bytes((disk.free.value or 0) + (disk.own.value or 0))

    def folder(self, replica: int = 0) -> Path:
        """Of one engine."""
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
    """NVMe tier when a folder but no size was given. ``free``: bytes free on that file system."""
    return min(free // 2, (256 << 30))
