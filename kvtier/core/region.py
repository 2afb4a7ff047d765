"""One region of memory that processes share: a sealed memfd, how it is mapped, and which parts of
it lie in huge pages.

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

from kvtier.core.errors import TierError

HUGE_BYTES = 2 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Memory = Any
"""Array of ctypes over a mapping, which ends with the last reference to it or to a view of it."""

_NAME, _RESERVED_NAME = "kvtier-pool", "kvtier-huge"
"""Names of the memfds. Reserved pages are not part of the memory for which others compete, and have
a name of their own for those who count memory."""
# linux/mman.h, Linux 5.14 and 6.1. Python's mmap module does not name them.
_POPULATE_WRITE, _COLLAPSE = 23, 25
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
