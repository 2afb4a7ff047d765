"""What processes take of the machine: their CPU time, and their RAM. RAM is own and shared pages
from ``/proc``, and what Redis says of its data.

Pages of the page cache do not count. A shared page is divided among the processes that map it
(proportional set size), so that a sum counts it once.
"""

from __future__ import annotations

import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LARGE = 32 << 20
"""Bytes of a mapping that may be a pool, because it is larger than a thread's stack."""
_OWN = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ (\S+) (\d+) *(.*)$")
_RSS = re.compile(r"^Rss:\s+(\d+) kB")
_USED = re.compile(rb"^used_memory:(\d+)\r$", re.MULTILINE)
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")  # noqa: S108 what mappings are called, no file is opened
_REPLY_S = 5.0
_ALL_THREADS = 2
"""With a process's number: Linux's clock of its CPU time (``clock_getcpuclockid``,
CPUCLOCK_SCHED)."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A writable piece of memory that is on no disk. ``name``: of shared memory. Empty for private
    memory."""

    name: str
    size: int
    resident: int


def family(roots: Iterable[int]) -> set[int]:
    """The processes and all their descendants."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked
        children[parent].append(int(stat.parent.name))
    found, todo = set(), list(roots)
    while todo:
        one = todo.pop()
        found.add(one)
        todo += children[one]
    return found


def in_use(processes: Iterable[int]) -> tuple[int, int]:
    """``(touched, untouched)`` bytes of these processes together. One that has ended has none.

    Untouched are the pages of large writable mappings (:data:`LARGE`) that are not present yet.
    Raises PermissionError for the processes of another user.
    """
    touched, pieces = 0, list[Mapping]()
    for one in processes:
        place = Path(f"/proc/{one}")
        try:
            touched += own_bytes((place / "smaps_rollup").read_text())
            pieces += mappings((place / "smaps").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return touched, untouched(pieces)


def own_bytes(rollup: str) -> int:
    """Bytes of anonymous and shared memory, from a ``smaps_rollup``."""
    return sum(map(int, _OWN.findall(rollup))) << 10


def mappings(smaps: str) -> Iterator[Mapping]:
    """The writable mappings without a file on a disk, from a ``smaps``."""
    name, size = None, 0
    for line in smaps.splitlines():
        if head := _MAPPING.match(line):
            begin, end, access, device, inode, path = head.groups()
            size, shared = int(end, 16) - int(begin, 16), path.startswith(_SHARED)
            writable = access.startswith("rw") and (inode == "0" or shared)
            name = (f"{device}:{inode}" if shared else "") if writable else None
        elif name is not None and (resident := _RSS.match(line)):
            yield Mapping(name, size, int(resident[1]) << 10)


def untouched(pieces: Iterable[Mapping]) -> int:
    """Bytes of large mappings that are not present yet. What several processes share is one
    mapping, and a page is touched when any of them touched it."""
    spared, shared = 0, dict[str, int]()
    for one in pieces:
        if one.size >= LARGE:
            left = one.size - one.resident
            if one.name:
                shared[one.name] = min(left, shared.get(one.name, left))
            else:
                spared += left
    return spared + sum(shared.values())


def redis_data(path: Path) -> int:
    """Bytes that the Redis server at this Unix socket says it uses. Raises OSError, ValueError."""
    said = b""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(_REPLY_S)
        link.connect(str(path))
        link.sendall(b"INFO memory\r\n")
        while not (used := _USED.search(said)):
            piece = link.recv(1 << 16)
            if not piece:
                raise ValueError(
                    f"the Redis server at {path} does not tell used_memory: {said[:100]!r}"
                )
            said += piece
    return int(used[1])


def cpu_seconds(processes: Iterable[int]) -> float:
    """CPU seconds of these processes since their starts, to the nanosecond. Threads that have ended
    are included. Other processes and the kernel's own threads are not. Raises OSError when one has
    ended."""
    return sum(time.clock_gettime(~one << 3 | _ALL_THREADS) for one in processes)
