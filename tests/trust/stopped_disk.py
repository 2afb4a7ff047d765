"""A disk that can be stopped under real processes: ext4 on a loop device, throttled for one control
group.

While it is stopped the kernel lets a byte a second through, for reads and writes of whoever is in
the group: calls with O_DIRECT then stay in the kernel, as on a hung device or a lost network
volume, and not even SIGKILL ends them. Needs root and version 1 of the kernel's blkio controller,
which tells readers and writers apart by their group.
"""

import os
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup/blkio")
_LIMITS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


def obstacle():
    """Why there can be none here. Empty when there can."""
    if os.geteuid():
        return "it needs root"
    return "" if (_GROUPS / _LIMITS[0]).exists() else f"there is no {_GROUPS / _LIMITS[0]}"


class Disk:
    """``folder`` lies on it. Processes are stopped with it, and their children, once they are in
    :meth:`take`."""

    def __init__(self, folder, group):
        self.folder, self._group = folder, group
        device = folder.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"

    def take(self, pid):
        (self._group / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def stopped(self):
        """What it was asked before or meanwhile ends when the block does."""
        self._limit(1)
        try:
            yield
        finally:
            self._limit(0)

    def _limit(self, bytes_a_second):
        """0: none."""
        for limit in _LIMITS:
            (self._group / limit).write_text(f"{self._device} {bytes_a_second}")


@contextmanager
def disk(place, size):
    """One of ``size`` bytes, in an image in the folder ``place``. Whoever was taken must have ended
    before the block does. Raises CalledProcessError or OSError where it cannot be made (see
    :func:`obstacle`)."""
    image, folder, group = place / "image", place / "disk", _GROUPS / f"kvtier-{os.getpid()}"
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    folder.mkdir()
    with ExitStack() as ends:
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
        ends.callback(subprocess.run, ["umount", str(folder)], check=True)
        group.mkdir()
        ends.callback(group.rmdir)
        yield Disk(folder, group)
