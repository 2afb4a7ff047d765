"""Pool: one shared region cut into equal page-aligned slots. Memory only; which slot is free the Directory knows.

The region is a memfd: it needs no room in ``/dev/shm`` (64 MB in a default container), leaves nothing behind when its
processes die however they die, and any process of the same user can map it through ``/proc/<pid>/fd/<n>``.

It is sealed against shrinking and growing: to touch a page beyond the end of a file kills a process, and every process
that maps the region has a descriptor that it could shorten. So whoever maps it looks for the seals first.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import ConfigError, TierError

_LIBC = ctypes.CDLL(None, use_errno=True)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_REMOVE = 9  # linux/mman.h
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, Linux 5.14; not named by Python's mmap module


class Pool:
    """``slots`` equal slots of ``slot_bytes`` bytes (a multiple of 4096) in one region.

    Thread-safe: views are plain memory; who may read or write a slot is decided by leases. ``fd``: map this region of
    another process instead of making one; it is closed with the pool, or when it is refused.

    Raises ConfigError for impossible sizes and for a region that is not sealed or has another size, and TierError when
    the memory cannot be had.
    """

    def __init__(self, slots: int, slot_bytes: int, *, fd: int | None = None) -> None:
        with contextlib.ExitStack() as undo:
            if fd is not None:
                undo.callback(os.close, fd)
            size = _region_bytes(slots, slot_bytes)
            self.slots = slots
            self.slot_bytes = slot_bytes
            if fd is None:
                fd = _sealed_region(size)
                undo.callback(os.close, fd)
            _refuse_unsealed(fd, size)
            self.fd = fd
            try:
                self._map: mmap.mmap | None = mmap.mmap(fd, size)
            except (OSError, ValueError) as error:
                raise TierError(f"cannot map {size} bytes of RAM for the pool: {error}; lower ram_bytes") from error
            undo.pop_all()
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._closer = weakref.finalize(self, os.close, self.fd)

    @classmethod
    def attach(cls, path: str, slots: int, slot_bytes: int) -> Pool:
        """Map another process's pool by its :attr:`path`. Raises TierError when it is gone or not ours to map, and
        ConfigError when it is no pool of this size."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TierError(f"cannot map the shared pool {path}: {error}; is its owner alive, same user?") from error
        return cls(slots, slot_bytes, fd=fd)

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
        """Allocate and map the pages of ``count`` slots from ``first`` on: a first save into absent pages runs at a
        tenth of its speed. Slots are handed out from 0 on. Releases the GIL. Best effort: before Linux 5.14 pages
        arrive at first touch."""
        self._advise(first * self.slot_bytes, (first + count) * self.slot_bytes, _MADV_POPULATE_WRITE)

    def give_back(self, slot: int) -> None:
        """Return a slot's memory to the host; it reads as zeros from now on. A page that a device has locked comes back
        when that lets go of it. Best effort."""
        self._advise(slot * self.slot_bytes, (slot + 1) * self.slot_bytes, _MADV_REMOVE)

    def touch(self, slot: int, begin: int, end: int) -> None:
        """Map bytes ``begin`` to ``end`` of a slot whose pages another process has made present: 16 of them at a fault
        (the kernel's fault-around, writable as well), where a first write would fault at every one. Releases the GIL;
        best effort."""
        start = slot * self.slot_bytes
        self._advise(start + begin // PAGE_BYTES * PAGE_BYTES, start + end, _MADV_POPULATE_READ)

    def _advise(self, begin: int, end: int, advice: int) -> None:
        if self._map is not None:
            base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            _LIBC.madvise(ctypes.c_void_p(base + begin), ctypes.c_size_t(end - begin), advice)

    def close(self) -> None:
        """Unmap. While views are still held the memory stays mapped: the last of them unmaps it. No effect the second
        time."""
        self._view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        self._closer()


def _region_bytes(slots: int, slot_bytes: int) -> int:
    """Raises ConfigError for impossible sizes."""
    if slots < 1 or slot_bytes < 1 or slot_bytes % PAGE_BYTES:
        raise ConfigError(f"pool of {slots} slots of {slot_bytes} bytes: expected >= 1 slot of whole 4 KiB pages")
    return slots * slot_bytes


def _sealed_region(size: int) -> int:
    """A memfd of ``size`` bytes that stays so, whoever has it. Raises TierError when the memory cannot be had."""
    try:
        fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TierError(f"cannot have {size} bytes of RAM for the pool: {error}") from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise TierError(f"cannot have {size} bytes of RAM for the pool: {error}; lower ram_bytes") from error
    return fd


def _refuse_unsealed(fd: int, size: int) -> None:
    """Raises ConfigError for a region that may be shortened under us, or that has another size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    if seals & _SEALS != _SEALS:
        raise ConfigError(
            "the shared region is not sealed against shrinking, expected a memfd that a kvtier server sealed: who can "
            "shorten it can kill every process that maps it; run the same kvtier on both sides"
        )
    found = os.fstat(fd).st_size
    if found != size:
        raise ConfigError(f"the shared region has {found} bytes, expected {size}: run the same kvtier on both sides")
