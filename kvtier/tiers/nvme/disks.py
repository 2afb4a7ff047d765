"""Folders for the NVMe tier: their room, file system and device. ``statvfs`` and the O_DIRECT trial
always look at the real path, also where tests give another root."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.core.fact import ROOT, UNSEEN, Fact, Mount, fact_of, known, mounts, text_of, unknown
from kvtier.core.terminal import size_text
from kvtier.tiers.nvme.folder import asked, holder, may_take

CANDIDATES = (
    "/var/lib/kvtier",
    "/opt/dlami/nvme",
    "/mnt/disks/ssd0",
    "/mnt/nvme",
    "/mnt/nvme0",
    "/local_disk0",
    "/scratch",
    "/mnt",
    "/data",
)
"""Folders where images and clouds mount local disks. They count only as real mounts."""
RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK_FILESYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "ceph",
        "lustre",
        "9p",
        "virtiofs",
        "glusterfs",
        "gpfs",
        "wekafs",
        "beegfs",
        "afs",
    }
)
SIZE_FOLDERS = "slots-*/"
"""Pattern of a server's folders below ``nvme_path``, one for each chunk size."""
_ALWAYS = ("/var/tmp", "/tmp")
LOCAL_DISKS = ("nvme", "ssd")
"""Kinds of disks that are found wherever they are mounted, and used side by side."""
_SYSTEMS = re.compile(r"/$|/(boot|dev|efi|etc|home|nix|proc|root|run|snap|sys|usr|var/lib)(/|$)")
"""Pattern of mounts of a system's own and its users' files."""
_PAGE_BYTES = 4096
_LEAST_LEFT_BYTES = 64 << 20
_SLOWEST = ["rotational", "ebs", "virtual", "ssd", "nvme"]
_THREADS = {"nvme": 4, "ssd": 2, "virtual": 4, "ebs": 2, "rotational": 1}
"""Calls at once, by kind of disk: some verify what they read while others keep it busy."""
_UNKNOWN_THREADS = 4


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    free: Fact[int] = UNSEEN
    """Free bytes without root's reserve."""
    total: Fact[int] = UNSEEN
    own: Fact[int] = UNSEEN
    """Bytes in an earlier kvtier's files, which are reused and so count as free."""
    filesystem: Fact[str] = UNSEEN
    writable: Fact[bool] = UNSEEN
    o_direct: Fact[bool] = UNSEEN
    device: Fact[str] = UNSEEN
    """Kind of the device: nvme | ssd | ebs | virtual | rotational."""
    read_speed: Fact[float] = UNSEEN
    block: str = ""
    """Name of the device, for a partition of the whole one. Empty if it is not visible."""
    system: bool = False
    """Whether the system's own files lie there."""
    left: tuple[str, ...] = ()


def probe_disks(paths: Sequence[str] = (), root: Path = ROOT) -> tuple[Disk, ...]:
    """Return facts of the given paths. Without any: of a folder ``kvtier`` in :data:`CANDIDATES`,
    on other local disks that are mounted, and in the temporary folders, at most one a device."""
    if paths:
        return tuple(probe_disk(path, root) for path in paths)
    seen = set[int | str]()
    found = []
    usual = [path for path in CANDIDATES if _answers(path, os.path.ismount)]
    local = [path for path in (*local_mounts(root), *_ALWAYS) if _answers(path, os.path.isdir)]
    for path in (*usual, *local):
        device = os.stat(path).st_dev
        if os.access(path, os.W_OK) and device not in seen and may_take(Path(path, "kvtier")):
            disk = probe_disk(f"{path}/kvtier", root)
            if disk.block not in seen:
                found.append(disk)
            seen.add(device)
            seen.add(disk.block or device)
    return tuple(found)


def _answers(path: str, look: Callable[[str], bool]) -> bool:
    return asked(Path(path), lambda: look(path), False)


def local_mounts(root: Path = ROOT) -> list[str]:
    """Return mount points of local disks, without those of a system's own files."""
    return [
        mount.point
        for mount in mounts(root)
        if not _SYSTEMS.match(mount.point) and _device(mount, root).value in LOCAL_DISKS
    ]


SILENT = unknown("its file system does not answer")


def probe_disk(path: str, root: Path = ROOT) -> Disk:
    """Return facts of the folder ``path``, or of the nearest one above it that exists."""
    place = Path(path).absolute()
    return asked(place, lambda: _probe_disk(path, root), Disk(str(place), free=SILENT))


def _probe_disk(path: str, root: Path) -> Disk:
    place = Path(path).resolve()
    while not place.is_dir():
        place = place.parent
    stat = f"statvfs {place}"
    mount = _mount_of(place, root)
    source = (
        f"mountinfo: {mount.source} on {mount.point}"
        if mount
        else "no line of mountinfo has this path"
    )
    writable, direct = _try_direct(place)
    return Disk(
        path=str(Path(path).absolute()),
        free=fact_of(lambda: shutil.disk_usage(place).free, stat),
        total=fact_of(lambda: shutil.disk_usage(place).total, stat),
        own=fact_of(lambda: _own_bytes(Path(path)), "files of an earlier run"),
        filesystem=known(mount.kind, source) if mount else unknown(source),
        writable=writable,
        o_direct=direct,
        device=_device(mount, root) if mount else unknown(source),
        read_speed=unknown("not measured"),
        block=_block(mount, root) if mount else "",
        system=mount is not None and mount.point == "/",
    )


def reusable(disk: Disk, *, server: bool) -> Disk:
    """Return ``disk`` with files that a server or engine can reuse in ``own``, else ``left``."""
    disk = replace(disk, left=left_behind(disk.path, servers=not server))
    servers = servers_bytes(Path(disk.path))
    if server:
        return replace(disk, own=servers)
    if disk.own.value is None:
        return disk
    return replace(disk, own=known(disk.own.value - (servers.value or 0), disk.own.source))


def left_behind(path: str, *, servers: bool) -> tuple[str, ...]:
    """Return words on unused folders of servers, or engines: size, and how to free them."""
    return asked(Path(path), lambda: _left_behind(Path(path), servers), ())


def _left_behind(place: Path, servers: bool) -> tuple[str, ...]:
    found, of_servers = [], set(place.glob(SIZE_FOLDERS))
    for folder in sorted((place, *place.glob("*/"))):
        is_servers = folder in of_servers
        size = sum(file.stat().st_blocks * 512 for file in folder.glob("*.kvtier"))
        if is_servers == servers and size >= _LEAST_LEFT_BYTES and not holder(folder):
            whose = "a server's" if is_servers else "an engine's"
            also = " (a server's below it go too)" if folder == place and of_servers else ""
            what = f"{whose} folder holds {size_text(size)}"
            found.append(f"{what}: kvtier clear --folder {folder}{also}")
    return tuple(found)


def servers_bytes(place: Path, but: Path | None = None) -> Fact[int]:
    """Return the bytes of a server's folders for each chunk size in ``place``, without ``but``."""
    return fact_of(
        lambda: sum(_own_bytes(size) for size in place.glob(SIZE_FOLDERS) if size != but),
        "files of an earlier server",
    )


def disk_threads(disk: Disk, cpus: int) -> int:
    """Return the calls at once: enough for the kind of disk, at most two a CPU."""
    wanted = _THREADS.get(disk.device.value or "", _UNKNOWN_THREADS)
    return max(1, min(wanted, 2 * cpus))


def _mount_of(path: Path, root: Path) -> Mount | None:
    holding = [mount for mount in mounts(root) if path.is_relative_to(mount.point)]
    # the last of several at one point
    return max(reversed(holding), key=lambda mount: len(mount.point), default=None)


def _own_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*.kvtier") if file.is_file())


def _try_direct(place: Path) -> tuple[Fact[bool], Fact[bool]]:
    """Return whether ``place`` can be written, and whether O_DIRECT works, by a nameless file."""
    if not os.access(place, os.W_OK | os.X_OK):
        refused = f"no right to write in {place}"
        return known(False, refused), unknown(refused)
    try:
        with open_direct(place) as fd, mmap.mmap(-1, _PAGE_BYTES) as page:
            os.pwrite(fd, page, 0)
        return known(True, "a page was written"), known(True, "a page was written")
    except OSError as error:
        read_only = isinstance(error, PermissionError) or "Read-only" in str(error)
        return known(not read_only, str(error)), known(False, str(error))


@contextlib.contextmanager
def open_direct(place: Path) -> Any:
    """Open a file with O_DIRECT that vanishes with its descriptor. Raises OSError."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        fd = os.open(place, flags | os.O_TMPFILE, 0o600)
    except OSError:  # the file system has no O_TMPFILE
        name = place / f"kvtier-probe-{os.getpid()}"
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
        name.unlink()
    try:
        yield fd
    finally:
        os.close(fd)


def _device(mount: Mount, root: Path) -> Fact[str]:
    if mount.kind == "overlay":
        return unknown("overlay: the disk under it is not visible from in here")
    link = _link(mount, root)
    if not link.exists():
        return unknown(f"{mount.kind} {mount.source} is not a block device here")
    kinds = sorted(_device_kinds(link.resolve()), key=_SLOWEST.index)
    source = f"/sys/dev/block/{mount.device}"
    if not kinds:
        return unknown(f"{source}: it is not NVMe, and does not say whether it is rotational")
    return known(kinds[0], source)


def _link(mount: Mount, root: Path) -> Path:
    link = root / "sys/dev/block" / mount.device
    # btrfs and others show a made-up device number
    if not link.exists() and mount.source.startswith("/dev/"):
        link = root / "sys/class/block" / Path(mount.source).name
    return link


def _block(mount: Mount, root: Path) -> str:
    link = _link(mount, root)
    if mount.kind == "overlay" or not link.exists():
        return ""
    device = link.resolve()
    return (device.parent if (device / "partition").exists() else device).name


def _device_kinds(device: Path) -> set[str]:
    if (device / "partition").exists():
        device = device.parent
    slaves = list((device / "slaves").glob("*"))
    if slaves:
        return set().union(*(_device_kinds(slave.resolve()) for slave in slaves))
    model, name = text_of(device / "device/model"), device.name
    if "Elastic Block Store" in model:
        return {"ebs"}
    if name.startswith(("vd", "xvd", "loop")) or model in (
        "PersistentDisk",
        "nvme_card-pd",
        "Virtual Disk",
    ):
        # a hypervisor's disk: what it says of itself, "rotational" included, means nothing
        return {"virtual"}
    if name.startswith("nvme"):
        return {"nvme"}
    rotational = text_of(device / "queue/rotational")
    return {"rotational" if rotational == "1" else "ssd"} if rotational else set()
