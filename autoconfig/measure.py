"""Bounded measurements for a plan: memory copy, O_DIRECT on each path, and what each tier on the
network measures of itself. At most :data:`MEASURE_S` in total.

Memory and disks are measured with one thread. A disk with many queues may do better than measured,
so the plan errs on the slow side.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

from kvtier.autoconfig.facts import MIB, Facts
from kvtier.core.fact import Fact, known, rate, unknown
from kvtier.tiers.nvme.disks import NETWORK_FILESYSTEMS, RAM_FILESYSTEMS, Disk, open_direct
from kvtier.tiers.seam import TierFacts

MEASURE_S = 5.0
_BLOCK_BYTES = 4 * MIB
_COPY_BYTES = 64 * MIB
_FILE_BLOCKS = 64
_FREE_PARTS = 8
"""A trial file takes at most this part (1/8) of the free space."""


def measure(facts: Facts, seconds: float = MEASURE_S) -> Facts:
    """``facts`` with measured speeds. A failure is an unknown fact with its reason. A trial stops
    when its share of ``seconds`` is used up, but for the operation (4 MiB) that has begun."""
    copy = _copy_speed(seconds * 0.1)
    worth = [disk for disk in facts.disks if _can_time(disk)]
    share = seconds * 0.5 / max(1, len(worth))
    disks = tuple(_timed_disk(disk, share) if disk in worth else disk for disk in facts.disks)
    timed = sum(type(found).measured is not TierFacts.measured for found in facts.tiers.values())
    each = seconds * 0.4 / max(2, timed)
    tiers = {name: found.measured(each) for name, found in facts.tiers.items()}
    return replace(facts, copy_speed=copy, disks=disks, tiers=tiers)


def _copy_speed(seconds: float) -> Fact[float]:
    with mmap.mmap(-1, _COPY_BYTES) as source, mmap.mmap(-1, _COPY_BYTES) as target:
        source[:] = b"\1" * _COPY_BYTES
        target[:] = b"\2" * _COPY_BYTES  # the pages are present before the clock starts
        with memoryview(source) as src, memoryview(target) as dst:

            def copy(_: int) -> int:
                dst[:] = src
                return _COPY_BYTES

            return known(rate(copy, seconds, 64), "measured, one thread")


def _can_time(disk: Disk) -> bool:
    kind = disk.filesystem.value or ""
    if disk.read_speed.value is not None:  # a what-if option gave it
        return False
    return (
        bool(disk.o_direct.value)
        and kind not in RAM_FILESYSTEMS
        and (disk.free.value or 0) >= _FREE_PARTS * _BLOCK_BYTES
    )


def _timed_disk(disk: Disk, seconds: float) -> Disk:
    place = Path(disk.path)
    while not place.is_dir():
        place = place.parent
    blocks = max(1, min(_FILE_BLOCKS, (disk.free.value or 0) // _FREE_PARTS // _BLOCK_BYTES))
    try:
        with open_direct(place) as fd, mmap.mmap(-1, _BLOCK_BYTES) as buffer:
            buffer[:] = os.urandom(_BLOCK_BYTES)
            rate(lambda i: os.pwrite(fd, buffer, i * _BLOCK_BYTES), seconds / 2, blocks)
            whole = max(1, os.fstat(fd).st_size // _BLOCK_BYTES)
            speed = rate(
                lambda i: os.preadv(fd, [buffer], i * 7 % whole * _BLOCK_BYTES),
                seconds / 2,
                4 * blocks,
            )
    except OSError as error:
        return replace(disk, read_speed=unknown(f"O_DIRECT trial failed: {error}"))
    note = "network file system, " if disk.filesystem.value in NETWORK_FILESYSTEMS else ""
    source = f"measured, {note}O_DIRECT, one thread, 4 MiB"
    return replace(disk, read_speed=known(speed, source))
