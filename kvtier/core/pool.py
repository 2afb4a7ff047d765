"""Pool: one shared region cut into equal page-aligned slots. It is memory only. The Directory knows
which slots are free.

The region is a memfd. It needs no room in ``/dev/shm`` (64 MB in a default container). It leaves
nothing behind when its processes die, however they die. Any process of the same user can map it
through ``/proc/<pid>/fd/<n>``.

It is sealed against shrinking and growing. A process that touches a page beyond the end of a file
is killed, and every process that maps the region has a descriptor with which it could shorten it.
So a process that maps the region checks the seals first.

Huge pages (2 MiB) save page faults and page walks. A disk reads and writes them in few long pieces,
so a tier needs no buffer of its own between a slot and the disk. There are two kinds:

- *Collapsed*: ordinary shared memory of which the kernel is asked to merge 2 MiB pieces into huge
  pages (``MADV_COLLAPSE``, Linux 6.1, which ignores ``shmem_enabled`` unless that is ``deny``).
  Pieces that the kernel refuses stay in small pages. Holes, seals, sizes and limits are as for any
  memfd.
- *Reserved*: pages that the host's owner set apart (``sysctl vm.nr_hugepages``). A process that
  touches a missing one is ended (SIGBUS). So either all of them are allocated before a process maps
  the region, or none. A process that has such a region can give its pages back, and so end the
  others. It is therefore only for one engine's own processes, and no code here gives its pages
  back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import ConfigError, TierError

HUGE_BYTES = 2 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Memory = Any
"""Array of ctypes over a mapping, which ends with the last reference to it or to a view of it."""

_NAME, _RESERVED_NAME = "kvtier-pool", "kvtier-huge"
"""Names of the memfds. Reserved pages are not part of the memory for which others compete, and have
a name of their own for those who count memory."""
# linux/mman.h, Linux 5.14 (populate) and 6.1. Python's mmap module does not name them.
_MADV_REMOVE, _MADV_POPULATE_READ, _POPULATE_WRITE, _COLLAPSE = 9, 22, 23, 25
_MOST_REFUSALS = 8
"""Refusals in a row after which the kernel is not asked any more: each attempt searches memory."""
_FIXED, _NO_RESERVE = 0x10, 0x4000  # linux/mman.h
_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def make_region(size: int) -> int:
    """Make a memfd of a fixed size. Raises TierError when the memory cannot be had."""
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TierError(f"cannot have {size} bytes of RAM for the pool: {error}") from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise TierError(
            f"cannot have {size} bytes of RAM for the pool: {error}; lower ram_bytes"
        ) from error
    return fd


def make_reserved_region(size: int) -> int | None:
    """Make a sealed memfd of reserved huge pages, all allocated. None if too few are free or their
    use is not permitted. The kernel clears some 10 GiB a second."""
    try:
        fd = os.memfd_create(
            _RESERVED_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB
        )
    except (OSError, AttributeError):
        return None
    try:
        os.ftruncate(fd, _whole(size))
        # This claims all pages or none. Of two processes that come at once, one gets them.
        with mmap.mmap(fd, _whole(size)):
            os.posix_fallocate(fd, 0, _whole(size))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except (OSError, ValueError):
        os.close(fd)
        return None
    return fd


def in_reserved_pages(fd: int) -> bool:
    return os.fstatvfs(fd).f_bsize >= HUGE_BYTES


def expected_bytes(fd: int, size: int) -> int:
    return _whole(size) if in_reserved_pages(fd) else size


def map_region(fd: int, size: int) -> Memory:
    """Map ``size`` bytes, readable and writable, from the boundary of a huge page on. Elsewhere the
    kernel neither merges pieces nor maps them as huge pages. Raises OSError."""
    room = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    found = _LIBC.mmap(None, size + HUGE_BYTES, 0, room, -1, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    base, end = _whole(found), found + size + HUGE_BYTES
    if (
        _LIBC.mmap(base, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd, 0)
        == _FAILED
    ):
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _LIBC.munmap(found, end - found)
        raise error
    after = base + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    for begin, length in ((found, base - found), (after, end - after)):
        if length > 0:
            _LIBC.munmap(begin, length)
    memory = (ctypes.c_char * size).from_address(base)
    # No unmapping at the end of the process: a thread may still copy then, and the kernel
    # unmaps the memory after that.
    weakref.finalize(memory, _LIBC.munmap, base, size).atexit = False
    return memory


def advise(memory: Memory, begin: int, end: int, advice: int) -> bool:
    """Advise the kernel about these bytes. Returns whether it accepted. Releases the GIL."""
    return end > begin and not _LIBC.madvise(ctypes.addressof(memory) + begin, end - begin, advice)


class HugePages:
    """Record of a mapping's 2 MiB pieces in huge pages. Any thread may ask, one thread fills."""

    def __init__(self, memory: Memory, *, reserved: bool) -> None:
        self._base, self._size = ctypes.addressof(memory), ctypes.sizeof(memory)
        self._whole = bytearray([reserved]) * -(-self._size // HUGE_BYTES)
        self._refused = 0
        with contextlib.suppress(AttributeError):
            advise(memory, 0, self._size, mmap.MADV_HUGEPAGE)

    def fill(self, memory: Memory, begin: int, end: int) -> None:
        """Make the pages of these bytes present, as huge pages where the kernel permits. A huge
        page is made whole even if it begins or ends outside of these bytes. Best effort."""
        for piece in range(begin // HUGE_BYTES, -(-end // HUGE_BYTES)):
            if self._whole[piece]:
                continue
            start, stop = piece * HUGE_BYTES, (piece + 1) * HUGE_BYTES
            if (
                stop <= self._size
                and self._refused < _MOST_REFUSALS
                and _collapse(memory, start, stop)
            ):
                self._whole[piece], self._refused = 1, 0
                continue
            self._refused += stop <= self._size
            advise(memory, max(begin, start), min(end, stop), _POPULATE_WRITE)

    def split(self, begin: int, end: int) -> None:
        """Note that the pages of these bytes go back to the host."""
        first, after = begin // HUGE_BYTES, -(-end // HUGE_BYTES)
        self._whole[first:after] = bytes(after - first)

    def hold(self, part: memoryview) -> bool:
        """Whether ``part`` consists of whole pages of this mapping, all of them in huge pages."""
        if part.readonly or not part.nbytes:
            return False
        begin = ctypes.addressof(ctypes.c_char.from_buffer(part)) - self._base
        end = begin + part.nbytes
        if begin < 0 or end > self._size or begin % mmap.PAGESIZE:
            return False
        return self._whole.find(0, begin // HUGE_BYTES, -(-end // HUGE_BYTES)) < 0


def _collapse(memory: Memory, start: int, stop: int) -> bool:
    """Merge one piece. One of its pages must be present: without any the kernel refuses."""
    return advise(memory, start, start + mmap.PAGESIZE, _POPULATE_WRITE) and advise(
        memory, start, stop, _COLLAPSE
    )


def _whole(size: int) -> int:
    return -(-size // HUGE_BYTES) * HUGE_BYTES


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
