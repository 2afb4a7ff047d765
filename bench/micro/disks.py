"""Bandwidth of the NVMe tier over several disks, beside the sum of what they give.

    python -m kvtier.bench.micro.disks --path /fast/disk/folder

A machine with one disk has others made of it: each folder is behind a throttle that lets so many
bytes a second through, in the order of its calls, as a device does. All arms take turns. Chunks are
written as saves are, read as one long hit is, and read in random order as many hits are. ``busy``
and ``queue``: part of the long hit's time in which a disk had calls, and how many, at the least.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import kvtier.tiers.nvme.files
from kvtier.bench.flags import described
from kvtier.bench.micro.nvme import (
    disk_folder,
    expect,
    gigabytes_per_second,
    make_buffers,
    make_keys,
)
from kvtier.bench.report import Row, median_row, print_rows, write_results
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.nvme.disks import Disk
from kvtier.tiers.nvme.parts import lane_threads

_MIB = 1 << 20
_ARMS = {
    "1 disk": (1.0,),
    "2 disks": (1.0,) * 2,
    "4 disks": (1.0,) * 4,
    "8 disks": (1.0,) * 8,
    "3 disks, one twice as fast": (2.0, 1.0, 1.0),
}
"""Disks by their pace."""
_LEAST = ("busy", "queue")


class Throttle:
    """Stands in for ``os`` in :mod:`kvtier.tiers.nvme.files`. ``rates``: bytes a second, by
    folder."""

    def __init__(self, rates: dict[Path, float]) -> None:
        self._rates, self._lock = rates, threading.Lock()
        self._free = dict.fromkeys(rates, 0.0)
        self.spent_s = defaultdict[tuple[str, Path], float](float)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _wait(self, fd: int, size: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{fd}")).parent
        with self._lock:
            took, now = size / self._rates[folder], time.perf_counter()
            self._free[folder] = until = max(self._free[folder], now) + took
            self.spent_s["busy", folder] += took
            self.spent_s["queue", folder] += until - now
        time.sleep(max(0.0, until - time.perf_counter()))

    def pwritev(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        self._wait(fd, sum(memoryview(part).nbytes for part in parts))
        return os.pwritev(fd, parts, at)

    def preadv(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        self._wait(fd, sum(memoryview(part).nbytes for part in parts))
        return os.preadv(fd, parts, at)


def measure(
    folder: Path, paces: Sequence[float], rate: float, chunks: int, cpus: int
) -> list[float]:
    """Gigabytes a second of writes, of reads in order and of reads at random, and the least."""
    places = [folder.resolve() / f"disk{at}" for at in range(len(paces))]
    throttle = Throttle({place: pace * rate for place, pace in zip(places, paces, strict=True)})
    threads, most = lane_threads([Disk(str(place)) for place in places], cpus)
    room = chunks * (_MIB + 4096) + _MIB
    keys, buffers = make_keys(chunks), make_buffers(threads, _MIB)
    shuffled = random.Random(0).sample(keys, chunks)
    tier = DiskSet(list(map(DiskPlace, places, [room] * len(places), most)), _MIB)
    files: Any = kvtier.tiers.nvme.files
    files.os = throttle
    found = list[float]()
    try:
        with closing(tier):
            for verb, order in ((tier.write, keys), (tier.read, keys), (tier.read, shuffled)):
                throttle.spent_s.clear()
                found.append(
                    gigabytes_per_second(
                        lambda at, buffer, verb=verb, order=order: expect(  # type: ignore[misc]
                            verb(order[at], buffer)
                        ),
                        chunks,
                        buffers,
                        threads,
                    )
                )
                if order is keys:
                    passed, spent = chunks * _MIB / 1e9 / found[-1], throttle.spent_s.copy()
                    least = [min(spent[what, one] for one in places) / passed for what in _LEAST]
        return [*found, *least]
    finally:
        files.os = os
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--path")
    parser.add_argument("--rate", type=float, default=60e6, help="bytes a second of the slow disks")
    parser.add_argument("--chunks", type=int, default=96, help="of 1 MiB, for each disk's pace")
    parser.add_argument("--cpus", type=int, default=os.cpu_count(), help="that threads are for")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    arguments = parser.parse_args()
    told: dict[str, list[list[float]]] = {name: [] for name in _ARMS}
    with disk_folder(arguments) as folder:
        for _ in range(arguments.rounds):
            for name, paces in _ARMS.items():
                chunks = int(arguments.chunks * sum(paces))
                seen = measure(folder / "set", paces, arguments.rate, chunks, arguments.cpus)
                told[name].append(seen)
    rows = list[Row]()
    for name, paces in _ARMS.items():
        whole = sum(paces) * arguments.rate / 1e9
        for at, verb in enumerate(("write", "read", "read at random")):
            values = [one[at] for one in told[name]]
            ratio = statistics.median(values) / whole
            rows.append(median_row(f"{name}: {verb}", values, "GB/s", whole, ratio))
        for at, what in enumerate(_LEAST, 3):
            rows.append(median_row(f"{name}: {what}", [one[at] for one in told[name]], "ratio"))
    print_rows(rows)
    if arguments.output:
        write_results(arguments.output, "disks", rows)


if __name__ == "__main__":
    main()
