"""SlotFiles: an NVMe tier's two files, locked, reserved in full, read and written by slot.

Nothing here knows keys or checksums. Positioned I/O only, so any number of threads may use it.

Payloads go through O_DIRECT: the page cache would push out the host's own pages. A disk moves huge
pages up to twice as fast as small ones that lie anywhere. So memory in huge pages goes to the disk
as it is. Other memory passes through a thread's own huge-page buffer: the copy takes a tenth of the
time that it saves (``bench/NOTES.md``). Records go through the page cache: a 128-byte buffered
write takes 3 us where a direct one takes 100 us, and outlives the process all the same. For a power
cut see :mod:`kvtier.tiers.nvme.index`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import TierError
from kvtier.tiers.nvme.folder import (
    INDEX_NAME,
    SLOTS_NAME,
    TierFolder,
    holders_of_removed,
    leads_to,
    lock,
)
from kvtier.tiers.nvme.index import FORMAT_VERSION, RECORD_BYTES, Superblock, table_bytes

_LOG = logging.getLogger(__name__)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_GIB = 1 << 30
_LIBC = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h
_STEP_BYTES = 8 << 20
_STAGING_BYTES, _HUGE_BYTES = 4 << 20, 2 << 20


class SlotFiles:
    """Opened, exclusively locked and wholly reserved files for ``slots`` payloads of at most
    ``slot_bytes`` bytes. ``lent``: payloads get no new blocks before :meth:`reserve`.

    ``in_huge_pages``: whether the disk may have a payload's memory as it is.

    Attributes:
        index: descriptor of the index file.
        kept: number of leading slots from before. The others are empty.
        clean: the last owner closed them, or they are new.

    Raises TierError, with nothing left behind, when another process holds the folder, there is no
    room, or the folder cannot be written or is not this user's alone.
    """

    def __init__(
        self,
        path: Path,
        slots: int,
        slot_bytes: int,
        *,
        in_huge_pages: Callable[[memoryview], bool],
        lent: bool,
    ) -> None:
        self._in_huge_pages = in_huge_pages
        self.path, self.slots, self.slot_bytes = path, slots, slot_bytes
        self._lent = lent
        self.kept, self.clean = 0, True
        self.index = self._payload = self._null = -1
        self._locked = False
        try:
            self._null = os.open(
                os.devnull, os.O_RDONLY
            )  # now: letting go must not need one more descriptor
            with TierFolder(path, make=True) as folder:
                self._open(folder)
        except OSError as error:
            raise TierError(
                f"NVMe tier {path}: cannot be opened and reserved ({error}); give a local folder "
                f"that this user may write, with room for {self._wanted() / _GIB:.2f} GiB"
            ) from error

    def _open(self, folder: TierFolder) -> None:
        try:
            self.index = folder.open(INDEX_NAME, os.O_RDWR, make=True)
            self._lock()
            if INDEX_NAME in folder.made_files:
                self._tell_of_removed()
            self._payload = folder.open(SLOTS_NAME, os.O_RDWR, make=True)
            self._check_room()
            self._adopt()
            self._reserve()
            self._go_direct(folder)
            self._write_superblock(clean=False)
        except (OSError, TierError):
            if self._locked:  # another process that holds the lock relies on it
                folder.undo()
            self.release()
            raise

    def write_payload(self, slot: int, data: memoryview) -> None:
        """Write ``data`` to a slot, with zeros up to the next page. Raises OSError."""
        for at, part, room in self._pieces(slot, data):
            if room is not part:
                room[: part.nbytes] = part
                room[part.nbytes :] = 0
            if os.pwritev(self._payload, [room.data], at) != room.nbytes:
                raise OSError(errno.ENOSPC, "short write")

    def read_payload(self, slot: int, into: memoryview) -> None:
        for at, part, room in self._pieces(slot, into):
            if os.preadv(self._payload, [room.data], at) != room.nbytes:
                raise OSError(errno.EIO, "short read")
            if room is not part:
                part[:] = room[: part.nbytes]

    def _pieces(self, slot: int, view: memoryview) -> Iterator[tuple[int, Bytes, Bytes]]:
        """Yield ``(file offset, piece, memory for the disk)``: the view as it is, or cut to fit the
        thread's buffer, of which whole pages go to the disk."""
        at, whole = slot * self.slot_bytes, np.frombuffer(view, np.uint8)
        if not whole.nbytes % PAGE_BYTES and self._in_huge_pages(view):
            yield at, whole, whole
            return
        for start in range(0, whole.nbytes, _STAGING_BYTES):
            part = whole[start : start + _STAGING_BYTES]
            yield at + start, part, _staging.room[: -(-part.nbytes // PAGE_BYTES) * PAGE_BYTES]

    def write_record(self, slot: int, record: bytes) -> None:
        if os.pwrite(self.index, record, PAGE_BYTES + slot * RECORD_BYTES) != RECORD_BYTES:
            raise OSError(errno.ENOSPC, "short write")

    def give_back(self, slot: int, count: int) -> None:
        """Return the blocks of ``count`` free slots to the file system. Raises OSError."""
        start, size = (
            ctypes.c_int64(slot * self.slot_bytes),
            ctypes.c_int64(count * self.slot_bytes),
        )
        if _LIBC.fallocate(self._payload, _PUNCH_HOLE, start, size):
            raise OSError(ctypes.get_errno(), "cannot give blocks back")

    def reserve(self, slot: int, count: int) -> None:
        """Allocate blocks for ``count`` slots, all or none. Raises OSError."""
        try:
            os.posix_fallocate(self._payload, slot * self.slot_bytes, count * self.slot_bytes)
        except OSError:
            self.give_back(slot, count)
            raise

    def in_place(self) -> bool:
        """Return whether the folder's path still leads to both files. Takes microseconds."""
        names = ((INDEX_NAME, self.index), (SLOTS_NAME, self._payload))
        return not self._locked or all(leads_to(self.path / name, fd) for name, fd in names)

    def close(self, table: memoryview) -> None:
        """Replace all records by ``table``, and close durably. Raises OSError."""
        try:
            for start in range(0, len(table), _STEP_BYTES):
                os.pwrite(self.index, table[start : start + _STEP_BYTES], PAGE_BYTES + start)
            os.fdatasync(self._payload)
            os.fdatasync(self.index)
            self._write_superblock(clean=True)
            os.fdatasync(self.index)
        finally:
            self.release()

    def _lock(self) -> None:
        if who := lock(self.index):
            raise TierError(
                f"NVMe tier {self.path}: in use by {who}; stop it, or give this one a folder "
                "of its own"
            )
        if not os.fstat(self.index).st_nlink:
            raise FileNotFoundError(
                errno.ENOENT, "another process has just removed it; start again"
            )
        self._locked = True

    def _tell_of_removed(self) -> None:
        for pid in holders_of_removed(self.path / INDEX_NAME):
            _LOG.warning(
                "NVMe tier %s: process %d still uses the files that were removed from here; their "
                "room is not free before it ends",
                self.path,
                pid,
            )

    def _wanted(self) -> int:
        return table_bytes(self.slots) + (0 if self._lent else self.slots * self.slot_bytes)

    def _check_room(self) -> None:
        """Raise TierError unless 5 % of the file system, at most 1 GiB, stay free."""
        system = os.fstatvfs(self.index)
        free = system.f_bavail * system.f_frsize
        margin = min(_GIB, system.f_blocks * system.f_frsize // 20)
        held = sum(os.fstat(fd).st_blocks * 512 for fd in (self.index, self._payload))
        needed = self._wanted() - held
        # A file system that tells no size (ramfs, some FUSE) is asked by reserving alone.
        if system.f_blocks and needed > 0 and needed + margin > free:
            raise TierError(
                f"NVMe tier {self.path}: needs {needed / _GIB:.2f} GiB more, but of "
                f"{free / _GIB:.2f} GiB free {margin / _GIB:.2f} GiB must stay free; free some, or "
                f"reserve at most {max(0, held + free - margin) / _GIB:.2f} GiB"
            )

    def _adopt(self) -> None:
        old = Superblock.unpack(os.pread(self.index, PAGE_BYTES, 0))
        if old and old.version == FORMAT_VERSION and old.slot_bytes == self.slot_bytes:
            self.kept = min(self.slots, os.fstat(self._payload).st_size // self.slot_bytes)
            self.clean = old.clean
            if old.slots > self.slots:
                _LOG.warning(
                    "NVMe tier %s: shrinks from %d to %d slots; chunks in the slots beyond "
                    "are dropped",
                    self.path,
                    old.slots,
                    self.slots,
                )
            return
        if os.fstat(self.index).st_size:
            was = (
                f"version {old.version}, {old.slots} {old.slot_bytes}-byte slots"
                if old
                else "not readable"
            )
            if old and old.version == FORMAT_VERSION:
                was += " (another chunk_tokens, or another model)"
            _LOG.warning(
                "NVMe tier %s: all chunks kept here are dropped: the format is %s, needed is "
                "version %d, %d-byte slots",
                self.path,
                was,
                FORMAT_VERSION,
                self.slot_bytes,
            )

    def _reserve(self) -> None:
        """Cut both files to what is kept, so that the rest reads as zeros. Then allocate their full
        size, so that no later write runs out of room. Lent payloads get the size without blocks."""
        for fd, kept, size, give in (
            (
                self.index,
                PAGE_BYTES + self.kept * RECORD_BYTES,
                table_bytes(self.slots),
                _allocate,
            ),
            (
                self._payload,
                self.kept * self.slot_bytes,
                self.slots * self.slot_bytes,
                os.ftruncate if self._lent else _allocate,
            ),
        ):
            os.ftruncate(fd, kept)
            try:
                give(fd, size)
            except OSError:
                os.ftruncate(fd, kept)
                raise

    def _go_direct(self, folder: TierFolder) -> None:
        fd = -1
        try:
            fd = folder.open(SLOTS_NAME, os.O_RDWR | os.O_DIRECT)
            # Some file systems accept the flag and refuse the first I/O, or want larger blocks than
            # a page.
            os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            if fd >= 0:
                os.close(fd)
            _LOG.warning(
                "NVMe tier %s: this file system refuses O_DIRECT; chunks pass through the page "
                "cache, which costs a "
                "copy and host memory. Give a folder on ext4 or XFS on a local disk",
                self.path,
            )
            return
        os.close(self._payload)
        self._payload = fd

    def _write_superblock(self, *, clean: bool) -> None:
        os.pwrite(self.index, Superblock(self.slot_bytes, self.slots, os.getpid(), clean).pack(), 0)

    def release(self) -> None:
        """Let go of files and lock but keep the descriptors' numbers: a late call, of a thread that
        hung in an I/O, gets an error instead of whichever file has the number next."""
        self._locked = False
        for fd in (self.index, self._payload):
            if fd >= 0:
                os.dup2(self._null, fd, inheritable=False)

    def __del__(self) -> None:
        for fd in (self.index, self._payload, self._null):
            if fd >= 0:
                os.close(fd)


def read_table(index: int, slots: int) -> memoryview:
    """Return the leading records of an index file. Raises OSError."""
    table = memoryview(bytearray(slots * RECORD_BYTES))
    for start in range(0, len(table), _STEP_BYTES):
        part = table[start : start + _STEP_BYTES]
        if os.preadv(index, [part], PAGE_BYTES + start) != len(part):
            raise OSError(errno.EIO, "short read")
    return table


def _allocate(fd: int, size: int) -> None:
    os.posix_fallocate(fd, 0, size)


class _Staging(threading.local):
    """Buffer of a thread for the disk, in huge pages where the kernel has any."""

    def __init__(self) -> None:
        region = mmap.mmap(-1, _STAGING_BYTES + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):
            region.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(region, np.uint8)
        begin = -whole.ctypes.data % _HUGE_BYTES
        self.room = whole[begin : begin + _STAGING_BYTES]


_staging = _Staging()
