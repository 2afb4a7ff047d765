"""How many reads and writes a disk has in flight. Pure."""

from __future__ import annotations

from kvtier.autoconfig.facts import Disk, Memory

_THREADS = {"nvme": 4, "ssd": 2, "virtual": 2, "ebs": 2, "rotational": 1}
_UNKNOWN = 2
_UNKNOWN_CPUS = 4


def disk_threads(disk: Disk, memory: Memory) -> int:
    """Enough for the kind of the disk. At most two for each CPU."""
    wanted = _THREADS.get(disk.device.value or "", _UNKNOWN)
    return max(1, min(wanted, 2 * (memory.cpus.value or _UNKNOWN_CPUS)))
