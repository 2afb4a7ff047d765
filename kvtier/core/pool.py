"""Pool: one shared region cut into equal page-aligned slots. Memory only; which slot is free the
Directory knows.

The region is a memfd: it needs no room in ``/dev/shm`` (64 MB in a default container), leaves
    nothing behind when its
processes die however they die, and any process of the same user can map it through
``/proc/<pid>/fd/<n>``.

It is sealed against shrinking and growing: to touch a page beyond the end of a file kills a
process, and every process that maps the region has a descriptor that it could shorten. So whoever
maps it looks for the seals first.

It lies in huge pages where the machine gives them: see :mod:`kvtier.core.region`.
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

_MADV_REMOVE, _MADV_POPULATE_READ = (
    9,
    22,
)  # linux/mman.h; the second since Linux 5.14, and not in Python's mmap module


class Pool:
    """``slots`` equal slots of ``slot_bytes`` bytes (a multiple of 4096) in one region.

    Thread-safe: views are plain memory; who may read or write a slot is decided by leases. ``fd``:
    map this region of another process instead of making one; it is closed with the pool, or when it
    is refused. ``reserved``: it may lie in huge pages that the host's owner reserved, if there are
    enough; not for a region that strangers map.

    Raises ConfigError for impossible sizes and for a region that is not sealed or has another size,
    and TierError when the memory cannot be had.
    """

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
        """It lies in pages that the host's owner reserved: all there, and not given back before it
        is closed."""
        self.witness_path: str | None = None
        """Where another process of the same user can open the witness of a server's pool for
        writing, while this one holds it. None for a pool without a witness."""
        self._huge = HugePages(self._map, reserved=self.reserved)
        self._view = memoryview(self._map).cast("B")[: slots * slot_bytes]
        self._closer = weakref.finalize(self, os.close, self.fd)

    @classmethod
    def attach(cls, path: str, slots: int, slot_bytes: int) -> Pool:
        """Map another process's pool by its :attr:`path`. Raises TierError when it is gone or not
        ours to map, and ConfigError when it is no pool of this size. Its owner is trusted not to
        take its pages away."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TierError(
                f"cannot map the shared pool {path}: {error}; is its owner alive, same user?"
            ) from error
        return cls(slots, slot_bytes, fd=fd, reserved=True)

    @property
    def path(self) -> str:
        """Where another process of the same user can map the region while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def buffer(self) -> memoryview:
        """All slots, writable."""
        return self._view

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, writable, page-aligned."""
        return self._view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def populate(self, first: int, count: int) -> None:
        """Allocate and map the pages of ``count`` slots from ``first`` on, huge ones where
        possible: a first save into absent pages runs at a tenth of its speed. Slots are handed out
        from 0 on. Releases the GIL. Best effort: before Linux 5.14 pages arrive at first touch."""
        memory = self._map
        if memory is not None:
            self._huge.fill(memory, first * self.slot_bytes, (first + count) * self.slot_bytes)

    def in_huge_pages(self, part: memoryview) -> bool:
        """Whether ``part`` is memory of this pool that lies wholly in huge pages, which
        :meth:`populate` made."""
        return self._huge.hold(part)

    @property
    def huge_bytes(self) -> int:
        """How much of the region lies in huge pages now."""
        return self._huge.held_bytes

    def give_back(self, slot: int) -> None:
        """Return a slot's memory to the host; it reads as zeros from now on. A page that a device
        has locked comes back when that lets go of it. Best effort. No effect on reserved huge
        pages: one that is touched again and cannot be had again would end the process."""
        if not self.reserved:
            begin, end = slot * self.slot_bytes, (slot + 1) * self.slot_bytes
            self._huge.split(begin, end)
            self._advise(begin, end, _MADV_REMOVE)

    def touch(self, slot: int, begin: int, end: int) -> None:
        """Map bytes ``begin`` to ``end`` of a slot whose pages another process has made present: 16
        of them at a fault (the kernel's fault-around, writable as well), where a first write would
        fault at every one. Releases the GIL; best effort."""
        start = slot * self.slot_bytes
        self._advise(start + begin // PAGE_BYTES * PAGE_BYTES, start + end, _MADV_POPULATE_READ)

    def _advise(self, begin: int, end: int, advice: int) -> None:
        memory = self._map  # stays mapped until this returns
        if memory is not None:
            advise(memory, begin, end, advice)

    def close(self) -> None:
        """Unmap. While views are still held the memory stays mapped: the last of them unmaps it. No
        effect the second time."""
        self._view.release()
        self._map = None
        self._closer()


def _region_bytes(slots: int, slot_bytes: int) -> int:
    """Raises ConfigError for impossible sizes."""
    if slots < 1 or slot_bytes < 1 or slot_bytes % PAGE_BYTES:
        raise ConfigError(
            f"pool of {slots} slots of {slot_bytes} bytes: expected >= 1 slot of whole 4 KiB pages"
        )
    return slots * slot_bytes


def _refuse_unsealed(fd: int, size: int, reserved: bool) -> int:
    """The region's bytes. Raises ConfigError for one that may be shortened or emptied under us, or
    of another size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    if seals & SEALS != SEALS:
        raise ConfigError(
            "the shared region is not sealed against shrinking, expected a memfd that a kvtier "
            "server sealed: who can "
            "shorten it can kill every process that maps it; run the same kvtier on both sides"
        )
    if in_reserved_pages(fd) and not reserved:
        raise ConfigError(
            "the shared region lies in reserved huge pages, expected ordinary memory: who can give "
            "such pages back can "
            "kill every process that maps them; run the same kvtier on both sides"
        )
    size, found = expected_bytes(fd, size), os.fstat(fd).st_size
    if found != size:
        raise ConfigError(
            f"the shared region has {found} bytes, expected {size}: run the same kvtier on "
            "both sides"
        )
    return size
