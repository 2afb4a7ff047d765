"""Pool: one shared region cut into equal page-aligned slots. It is memory only. The Directory knows
which slots are free.

The region is a memfd. It needs no room in ``/dev/shm`` (64 MB in a default container). It leaves
nothing behind when its processes die, however they die. Any process of the same user can map it
through ``/proc/<pid>/fd/<n>``.

It is sealed against shrinking and growing. A process that touches a page beyond the end of a file
is killed, and every process that maps the region has a descriptor with which it could shorten it.
So a process that maps the region checks the seals first.

It lies in huge pages where the machine has them: see :mod:`kvtier.core.region`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.region import (
    SEALS,
    HugePages,
    Memory,
    advise,
    expected_bytes,
    in_reserved_pages,
    make_region,
    make_reserved_region,
    map_region,
)

# linux/mman.h. MADV_POPULATE_READ came with Linux 5.14, and Python's mmap module does not name it.
_MADV_REMOVE, _MADV_POPULATE_READ = 9, 22


class Pool:
    """``slots`` equal slots of ``slot_bytes`` bytes (a multiple of 4096) in one region.

    Thread-safe: views are plain memory, and leases decide who may read or write a slot.

    Args:
        slots: the number of slots.
        slot_bytes: the size of one slot.
        fd: map this region of another process, and make none. It is closed with the pool, or when
            the region is refused.
        reserved: the region may lie in huge pages that the host's owner reserved, if there are
            enough of them. Not for a region that strangers map.

    Raises ConfigError for impossible sizes, and for a region that is not sealed or has another
    size. Raises TierError when the memory cannot be had.
    """

    inode = 0
    """Inode of a server's pool, 0 of others."""

    def __init__(
        self, slots: int, slot_bytes: int, *, fd: int | None = None, reserved: bool = False
    ) -> None:
        with contextlib.ExitStack() as undo:
            if fd is not None:
                undo.callback(os.close, fd)
            size = _region_bytes(slots, slot_bytes)
            self.slots = slots
            self.slot_bytes = slot_bytes
            if fd is None:
                taken = make_reserved_region(size) if reserved else None
                fd = make_region(size) if taken is None else taken
                undo.callback(os.close, fd)
            size = _refuse_unsealed(fd, size, reserved)
            self.fd = fd
            try:
                self._map: Memory | None = map_region(fd, size)
            except (OSError, OverflowError) as error:
                raise TierError(
                    f"cannot map {size} bytes of RAM for the pool: {error}; lower ram_bytes"
                ) from error
            undo.pop_all()
        self.reserved = in_reserved_pages(fd)
        """Whether all of it is in reserved huge pages, which are kept until it is closed."""
        self.witness_path: str | None = None
        """Path by which another process of the same user can open the witness of a server's pool
        for writing, while this one holds it. None for a pool without a witness."""
        self._huge = HugePages(self._map, reserved=self.reserved)
        self.buffer = memoryview(self._map).cast("B")[: slots * slot_bytes]
        self._closer = weakref.finalize(self, os.close, self.fd)

    @classmethod
    def attach(cls, path: str, slots: int, slot_bytes: int) -> Pool:
        """Map another process's pool by its :attr:`path`.

        Its owner is trusted not to take its pages away. Raises TierError when the pool is gone or
        this user may not map it. Raises ConfigError when it is not a pool of this size.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TierError(
                f"cannot map the shared pool {path}: {error}; is its owner alive, same user?"
            ) from error
        return cls(slots, slot_bytes, fd=fd, reserved=True)

    @property
    def path(self) -> str:
        """Path by which another process of this user can map the region, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def view(self, slot: int) -> memoryview:
        """Return the slot's bytes, writable and page-aligned."""
        return self.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def populate(self, first: int, count: int) -> None:
        """Map the pages of ``count`` slots, huge ones where possible: a first save into absent
        pages runs at a tenth of the speed. Slots are handed out from 0 on. Releases the GIL. Best
        effort: before Linux 5.14 pages are allocated at the first touch."""
        memory = self._map
        if memory is not None:
            self._huge.fill(memory, first * self.slot_bytes, (first + count) * self.slot_bytes)

    def in_huge_pages(self, part: memoryview) -> bool:
        """Whether ``part`` lies wholly in huge pages that :meth:`populate` made."""
        return self._huge.hold(part)

    def give_back(self, slot: int) -> None:
        """Return a slot's memory to the host. It reads as zeros from then on. A page that a device
        has locked returns when it is unlocked. Best effort. No effect with reserved huge pages:
        touching one again, when none is free any more, would end the process."""
        if not self.reserved:
            begin, end = slot * self.slot_bytes, (slot + 1) * self.slot_bytes
            self._huge.split(begin, end)
            self._advise(begin, end, _MADV_REMOVE)

    def take_renewed(self) -> list[int]:
        """Take the slots that have got other memory since the last call. An own pool has none."""
        return []

    def touch(self, slot: int, begin: int, end: int) -> None:
        """Map bytes ``begin`` to ``end`` of a slot whose pages another process has made present.
        The kernel's fault-around maps 16 pages at a fault, also for writing, while first writes
        fault at every page. Releases the GIL. Best effort."""
        start = slot * self.slot_bytes
        self._advise(start + begin // PAGE_BYTES * PAGE_BYTES, start + end, _MADV_POPULATE_READ)

    def _advise(self, begin: int, end: int, advice: int) -> None:
        memory = self._map  # it stays mapped until this returns
        if memory is not None:
            advise(memory, begin, end, advice)

    def close(self) -> None:
        """Unmap the region with the last view of it. Without effect the second time."""
        self.buffer.release()
        self._map = None
        self._closer()


def _region_bytes(slots: int, slot_bytes: int) -> int:
    if slots < 1 or slot_bytes < 1 or slot_bytes % PAGE_BYTES:
        raise ConfigError(
            f"pool of {slots} slots of {slot_bytes} bytes: expected >= 1 slot of whole 4 KiB pages"
        )
    return slots * slot_bytes


def _refuse_unsealed(fd: int, size: int, reserved: bool) -> int:
    """Return the region's bytes. Raises ConfigError for a region that others could shorten or empty
    while it is mapped, or that has another size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # it is not a memfd
        seals = 0
    if seals & SEALS != SEALS:
        raise ConfigError(
            "the shared region is not sealed against shrinking, expected a memfd that a kvtier "
            "server sealed: a process that can shorten it can kill every process that maps it; run "
            "the same kvtier on both sides"
        )
    if in_reserved_pages(fd) and not reserved:
        raise ConfigError(
            "the shared region lies in reserved huge pages, expected ordinary memory: a process "
            "that can give such pages back can kill every process that maps them; run the same "
            "kvtier on both sides"
        )
    size, found = expected_bytes(fd, size), os.fstat(fd).st_size
    if found != size:
        raise ConfigError(
            f"the shared region has {found} bytes, expected {size}: run the same kvtier on "
            "both sides"
        )
    return size
