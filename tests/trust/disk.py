"""A simulated disk under the real ChunkFolder: its files' ``os`` and ``fcntl`` lead here.

Sectors of 512 bytes. A write reaches the page cache and is durable with the next fdatasync of its
file. A process that is killed loses nothing that was written. A power cut leaves of each unsynced
sector any one of the contents it has had since the last sync, independently of all other sectors,
or, rarely, a mix of two - so unsynced writes are lost, torn and reordered in every way a device may
do it.
"""

import errno
import os
import stat
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from tests.trust.scheduler import Process

SECTOR = 512
_FIRST_NUMBER = 1 << 20
_NUMBERS = count(_FIRST_NUMBER)


class SimFile:
    """Bytes, and what each sector that is not durable yet has held since it was."""

    def __init__(self):
        self.data = bytearray()
        self.unsynced: dict[int, list[bytes]] = {}
        self.locked_by: Process | None = None

    def write(self, at, data):
        for sector in range(at // SECTOR, -(-(at + len(data)) // SECTOR)):
            self.unsynced.setdefault(sector, []).append(
                bytes(self.data[sector * SECTOR : (sector + 1) * SECTOR])
            )
        self.data[at : at + len(data)] = data

    def resize(self, size):
        """At once durable."""
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self.unsynced = {
            sector: held for sector, held in self.unsynced.items() if (sector + 1) * SECTOR <= size
        }

    def power_cut(self, rng, keep):
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
    def __init__(self, folder, file, process):
        self.folder, self.file, self.process = folder, file, process


class SimDisk:
    """Files by folder and name, and the ``os`` and ``fcntl`` that reach them. The medium outlives
    processes. Each folder is a disk: ``fates`` has those that fail, hang or vanish as a whole."""

    def __init__(self, world):
        self.world = world
        self.files: dict[tuple[str, str], SimFile] = {}
        self.handles: dict[int, Handle] = {}
        self.fates: dict[str, str] = {}
        self.lost_sectors = 0

    def power_cut(self):
        rng = self.world.rng
        keep = rng.choice((0.1, 0.5, 0.9))
        self.lost_sectors += sum(file.power_cut(rng, keep) for file in self.files.values())

    def rot(self):
        """A bit of a stored payload or record turns over."""
        rng = self.world.rng
        for file in self.files.values():
            if len(file.data) > 4096 and self.world.fault("bit rot"):
                file.data[rng.randrange(4096, len(file.data))] ^= 1 << rng.randrange(8)

    def strike(self, folder):
        fate = self.world.rng.choice(("fails", "hangs", "vanishes"))
        self.world.say(f"{folder} {fate}")
        self.world.injected[f"a disk {fate}"] += 1
        self.fates[folder] = fate

    def mend(self, folder):
        self.world.say(f"{folder} is well")
        if self.fates.pop(folder) == "vanishes" and self.world.rng.random() < 0.5:
            self.world.injected["a disk comes back empty"] += 1
            self.files = {place: file for place, file in self.files.items() if place[0] != folder}

    # ---- os --------------------------------------------------------------------------------------

    def _handle(self, fd, what):
        handle = self.handles[fd]
        self.world.io(handle.process, what)
        if handle.file is None:
            raise OSError(errno.EBADF, "closed")
        if self.world.fault("disk slow"):
            self.world.sleep(self.world.rng.choice((0.05, 1.0, 20.0)), handle.process)
        while self.fates.get(handle.folder) == "hangs":
            self.world.sleep(0.5, handle.process)
        if self.fates.get(handle.folder) == "fails":
            self.world.current.failed = True
            raise OSError(errno.EIO, "simulated")
        return handle.file

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        number, process = next(_NUMBERS), self.world.making
        if dir_fd is None:
            self.handles[number] = Handle("", None, process)  # the null device
            return number
        folder, name = Path(os.readlink(f"/proc/self/fd/{dir_fd}")).name, os.fspath(path)
        if self.fates.get(folder) == "fails":
            raise OSError(errno.EIO, "simulated", name)
        there = (folder, name) in self.files
        if self.fates.get(folder) == "vanishes" or not (there or flags & os.O_CREAT):
            raise FileNotFoundError(errno.ENOENT, "simulated", name)
        if there and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "simulated", name)
        file = self.files.setdefault((folder, name), SimFile())
        self.handles[number] = Handle(folder, file, process)
        return number

    def close(self, fd):
        """The folder is a real one, its files are not."""
        self.handles.pop(fd, None)
        if fd < _FIRST_NUMBER:
            os.close(fd)

    def dup2(self, fd, fd2, inheritable=True):
        if (closed := self.handles[fd2].file) is not None:
            closed.locked_by = None
        self.handles[fd2].file = self.handles[fd].file
        return fd2

    def pwritev(self, fd, parts, at):
        """In two halves, with steps between: the memory is read when the bytes go, as a device does
        it."""
        self.world.current.failed = False  # of several disks another one may have failed before
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

    def preadv(self, fd, parts, at):
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

    def pwrite(self, fd, data, at):
        file, world = self._handle(fd, "record write"), self.world
        if world.fault("record write fails"):
            world.current.failed = True
            raise OSError(errno.EIO, "simulated")
        if world.fault("record write short"):
            world.current.failed = True
            data = bytes(data)[: len(data) // 2]
        file.write(at, bytes(data))
        return len(data)

    def pread(self, fd, size, at):
        return bytes(self._handle(fd, "record read").data[at : at + size])

    def fdatasync(self, fd):
        file = self._handle(fd, "sync")
        if self.world.fault("sync fails"):
            raise OSError(errno.EIO, "simulated")
        file.unsynced.clear()

    def ftruncate(self, fd, size):
        self._handle(fd, "truncate").resize(size)

    def posix_fallocate(self, fd, at, size):
        file = self._handle(fd, "reserve")
        if self.world.fault("disk full", 0.3):
            raise OSError(errno.ENOSPC, "simulated")
        file.resize(max(len(file.data), at + size))

    def fstat(self, fd):
        if fd < _FIRST_NUMBER:
            return os.fstat(fd)
        return self._state(self.handles[fd].file)

    def stat(self, path, *, follow_symlinks=True):
        """Of a folder, or of a file in it."""
        place = Path(path)
        folder = place.parent if place.suffix else place
        file = self.files.get((folder.name, place.name))
        if self.fates.get(folder.name) == "vanishes" or (place.suffix and file is None):
            raise FileNotFoundError(errno.ENOENT, "simulated", str(path))
        return self._state(file)

    def _state(self, file):
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

    def fchmod(self, fd, mode):
        """They have that mode."""

    def fstatvfs(self, fd):
        return SimpleNamespace(f_bavail=1 << 30, f_blocks=1 << 31, f_frsize=1)

    def __getattr__(self, name):
        """Constants and what is no I/O."""
        return getattr(os, name)

    # ---- fcntl -----------------------------------------------------------------------------------

    LOCK_EX, LOCK_NB = 2, 4

    def flock(self, fd, flags):
        owner, file = self.handles[fd].process, self.handles[fd].file
        assert file is not None
        if file.locked_by is not None and file.locked_by is not owner and not file.locked_by.dead:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        file.locked_by = owner
