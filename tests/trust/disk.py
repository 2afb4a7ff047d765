"""A simulated disk under the real NvmeTier: its files' ``os`` and ``fcntl`` lead here.

Sectors of 512 bytes. A write reaches the page cache and is durable with the next fdatasync of its
file. A process that is killed loses nothing that was written. A power cut leaves of each unsynced
sector any one of the contents it has had since the last sync, independently of all other sectors,
or, rarely, a mix of two - so unsynced writes are lost, torn and reordered in every way a device may
do it.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.trust.scheduler import Process, World

SECTOR = 512
_FIRST_NUMBER = 1 << 20
_NUMBERS = count(_FIRST_NUMBER)


class SimFile:
    """Bytes, and what each sector that is not durable yet has held since it was."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.unsynced: dict[int, list[bytes]] = {}

    def write(self, at: int, data: bytes) -> None:
        for sector in range(at // SECTOR, -(-(at + len(data)) // SECTOR)):
            self.unsynced.setdefault(sector, []).append(
                bytes(self.data[sector * SECTOR : (sector + 1) * SECTOR])
            )
        self.data[at : at + len(data)] = data

    def resize(self, size: int) -> None:
        """At once durable."""
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self.unsynced = {
            sector: held for sector, held in self.unsynced.items() if (sector + 1) * SECTOR <= size
        }

    def power_cut(self, rng: random.Random, keep: float) -> int:
        """Lose unsynced sectors, each kept with probability ``keep``. Returns how many
        are not what was written last."""
        lost = 0
        for sector, before in self.unsynced.items():
            start = sector * SECTOR
            now = bytes(self.data[start : start + SECTOR])
            if rng.random() < keep:
                continue
            left = rng.choice(before)
            if rng.random() < 0.1:
                cut = rng.randrange(SECTOR)
                left = now[:cut] + left[cut:]
            lost += left != now
            self.data[start : start + SECTOR] = left
        self.unsynced.clear()
        return lost


class Handle:
    def __init__(self, file: SimFile | None, process: Process | None) -> None:
        self.file = file
        self.process = process


class SimDisk:
    """Files by name, and the ``os`` and ``fcntl`` that reach them. The medium outlives
    processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files: dict[str, SimFile] = {}
        self.handles: dict[int, Handle] = {}
        self.locked_by: Process | None = None
        self.lost_sectors = 0

    def power_cut(self) -> None:
        rng = self.world.rng
        keep = rng.choice((0.1, 0.5, 0.9))
        self.lost_sectors += sum(file.power_cut(rng, keep) for file in self.files.values())

    def rot(self) -> None:
        """A bit of a stored payload or record turns over."""
        rng = self.world.rng
        for file in self.files.values():
            if len(file.data) > 4096 and self.world.fault("bit rot"):
                file.data[rng.randrange(4096, len(file.data))] ^= 1 << rng.randrange(8)

    # ---- os --------------------------------------------------------------------------------------

    def _handle(self, fd: int, what: str) -> SimFile:
        handle = self.handles[fd]
        self.world.io(handle.process, what)
        if handle.file is None:
            raise OSError(errno.EBADF, "closed")
        if self.world.fault("disk slow"):
            self.world.sleep(self.world.rng.choice((0.05, 1.0, 20.0)), handle.process)
        return handle.file

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = os.fspath(path)
        if name != os.devnull and name not in self.files and not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, "simulated", name)
        if name in self.files and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "simulated", name)
        file = None if name == os.devnull else self.files.setdefault(name, SimFile())
        number = next(_NUMBERS)
        self.handles[number] = Handle(file, self.world.opening)
        return number

    def close(self, fd: int) -> None:
        """The folder is a real one, its files are not."""
        self.handles.pop(fd, None)
        if fd < _FIRST_NUMBER:
            os.close(fd)

    def dup2(self, fd: int, fd2: int, inheritable: bool = True) -> int:
        self.handles[fd2].file = self.handles[fd].file
        self.locked_by = None
        return fd2

    def pwritev(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        """In two halves, with steps between: the memory is read when the bytes go, as a device does
        it."""
        file, world, process = self._handle(fd, "disk write"), self.world, self.handles[fd].process
        if world.fault("disk write fails"):
            world.current.failed = True
            raise OSError(errno.EIO, "simulated")
        size = sum(part.nbytes for part in parts)
        half = size // 2 // SECTOR * SECTOR
        file.write(at, b"".join(parts)[:half])
        world.io(process, "disk write, half")
        if world.fault("disk write short"):
            world.current.failed = True
            return half
        file.write(at + half, b"".join(parts)[half:])
        if world.fault("disk write damaged"):
            file.data[at + world.rng.randrange(size)] ^= 0x20
        world.io(process, "disk written")
        return size

    def preadv(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        file, world, process = self._handle(fd, "disk read"), self.world, self.handles[fd].process
        if world.fault("disk read fails"):
            raise OSError(errno.EIO, "simulated")
        parts = [memoryview(part) for part in parts]
        done = 0
        for part in parts:
            half = part.nbytes // 2
            for start, end in ((0, half), (half, part.nbytes)):
                data = file.data[at + done + start : at + done + end]
                part[start : start + len(data)] = data
                world.io(process, "disk read, half")
            done += part.nbytes
        done = max(0, min(done, len(file.data) - at))
        if world.fault("disk read damaged"):
            parts[0][world.rng.randrange(parts[0].nbytes)] ^= 2
        return done // 2 if world.fault("disk read short") else done

    def pwrite(self, fd: int, data: bytes | memoryview, at: int) -> int:
        file, world = self._handle(fd, "record write"), self.world
        if world.fault("record write fails"):
            world.current.failed = True
            raise OSError(errno.EIO, "simulated")
        if world.fault("record write short"):
            world.current.failed = True
            data = bytes(data)[: len(data) // 2]
        file.write(at, bytes(data))
        return len(data)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return bytes(self._handle(fd, "record read").data[at : at + size])

    def fdatasync(self, fd: int) -> None:
        file = self._handle(fd, "sync")
        if self.world.fault("sync fails"):
            raise OSError(errno.EIO, "simulated")
        file.unsynced.clear()

    def ftruncate(self, fd: int, size: int) -> None:
        self._handle(fd, "truncate").resize(size)

    def posix_fallocate(self, fd: int, at: int, size: int) -> None:
        file = self._handle(fd, "reserve")
        if self.world.fault("disk full", 0.3):
            raise OSError(errno.ENOSPC, "simulated")
        file.resize(max(len(file.data), at + size))

    def fstat(self, fd: int) -> Any:
        if fd < _FIRST_NUMBER:
            return os.fstat(fd)
        return self._state(self.handles[fd].file)

    def stat(self, path: Any, *, follow_symlinks: bool = True) -> SimpleNamespace:
        """Nobody removes the files."""
        return self._state(self.files[Path(path).name])

    def _state(self, file: SimFile | None) -> SimpleNamespace:
        size = len(file.data) if file else 0
        return SimpleNamespace(
            st_size=size,
            st_blocks=-(-size // SECTOR),
            st_nlink=1,
            st_mode=stat.S_IFREG | 0o600,
            st_uid=os.geteuid(),
            st_dev=0,
            st_ino=id(file),
        )

    def fchmod(self, fd: int, mode: int) -> None:
        """They have that mode."""

    def fstatvfs(self, fd: int) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=1 << 30, f_blocks=1 << 31, f_frsize=1)

    def __getattr__(self, name: str) -> Any:
        """Constants and what is no I/O."""
        return getattr(os, name)

    # ---- fcntl -----------------------------------------------------------------------------------

    LOCK_EX, LOCK_NB = 2, 4

    def flock(self, fd: int, flags: int) -> None:
        owner = self.handles[fd].process
        if self.locked_by is not None and self.locked_by is not owner and not self.locked_by.dead:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        self.locked_by = owner
