"""Memory and CPUs of this machine, as ``/proc``, ``/sys`` and the kernel tell them."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from kvtier.autoconfig.facts import UNLIMITED, Memory
from kvtier.autoconfig.gpus import gpu_nodes
from kvtier.core.fact import ROOT, Fact, fact_of, known, least, mounts, text_of, unknown
from kvtier.core.pool import HUGE_BYTES, Pool


def probe_memory(root: Path = ROOT) -> Memory:
    headroom, limit = memory_limits(root)
    theirs, free = gpu_nodes(root)
    less = ", less the GPUs' own" if theirs else ""
    return Memory(
        total=fact_of(
            lambda: max(0, _meminfo(root)["MemTotal"] - theirs), f"MemTotal in /proc/meminfo{less}"
        ),
        available=fact_of(
            lambda: max(0, _meminfo(root)["MemAvailable"] - free),
            f"MemAvailable in /proc/meminfo{less}",
        ),
        cgroup_headroom=headroom,
        cgroup_limit=limit,
        shm=fact_of(lambda: shutil.disk_usage(root / "dev/shm").total, "size of /dev/shm"),
        reserved=fact_of(
            lambda: _reserved(root), "free pages in /sys/kernel/mm/hugepages/hugepages-2048kB"
        ),
        makes_huge=fact_of(_makes_huge, "one tried (MADV_COLLAPSE)"),
        memlock=fact_of(_memlock, "RLIMIT_MEMLOCK"),
        cpus=fact_of(lambda: len(os.sched_getaffinity(0)), "CPUs of this process"),
        pools=fact_of(lambda: _pool_bytes(root), "kvtier pools in /proc"),
    )


def _meminfo(root: Path) -> dict[str, int]:
    pairs = re.findall(r"^(\w+):\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in pairs}


def _memlock() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _reserved(root: Path) -> int:
    pages = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free, promised = (
        int((pages / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
    )
    return max(0, free - promised) * HUGE_BYTES


def _makes_huge() -> bool:
    with closing(Pool(1, HUGE_BYTES)) as pool:
        pool.populate(0, 1)
        return pool.in_huge_pages(pool.view(0))


def _pool_bytes(root: Path) -> int:
    """Sum the memory of pools that processes this user may inspect have open, each pool once."""
    found = {}
    for link in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.readlink(link).startswith("/memfd:kvtier-pool"):
                status = link.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def memory_limits(root: Path) -> tuple[Fact[int], Fact[int]]:
    """Find the tightest ``limit - use``, and the tightest limit that kills, over this process's
    cgroup and all above it up to the mount's top, in either version of cgroups."""
    membership = text_of(root / "proc/self/cgroup")
    if not membership:
        unread: Fact[int] = unknown("/proc/self/cgroup cannot be read")
        return unread, unread
    limits: list[tuple[int, int, bool, str]] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for mount in mounts(root):
            if mount.kind == kind and (kind == "cgroup2" or "memory" in mount.options.split(",")):
                limits += _limits(
                    root / mount.point.lstrip("/"), _below(path, mount.top), kind == "cgroup2"
                )
    none = known(UNLIMITED, "no cgroup memory limit")
    rooms = [known(room, f"{where} less use") for _, room, _, where in limits]
    killing = [known(limit, where) for limit, _, kills, where in limits if kills]
    return least(*rooms) or none, least(*killing) or none


def _below(path: str, top: str) -> str:
    """Return a cgroup's path below the mount, which in a container often is at its own group."""
    inside = path.removeprefix(top) if top != "/" else path
    return "" if ".." in inside.split("/") else inside.strip("/")


def _limits(mount: Path, inside: str, version2: bool) -> Iterable[tuple[int, int, bool, str]]:
    """Yield each limit, the room left, whether the kernel kills beyond it (beyond ``memory.high``
    it only slows down), and its file and group."""
    group = mount / inside if (mount / inside).is_dir() else mount
    names = ("memory.max", "memory.high") if version2 else ("memory.limit_in_bytes",)
    usage = "memory.current" if version2 else "memory.usage_in_bytes"
    cache = "inactive_file" if version2 else "total_inactive_file"
    for level in (group, *group.parents):
        stat = text_of(level / "memory.stat")
        reclaimable = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
        used = int(text_of(level / usage) or 0) - (int(reclaimable[1]) if reclaimable else 0)
        for name in names:
            limit = text_of(level / name)
            if inherited := re.search(r"^hierarchical_memory_limit (\d+)$", stat, re.MULTILINE):
                # the limit of groups above the mount, which only version 1 tells
                limit = min(limit, inherited[1], key=int)
            if limit.isdigit() and int(limit) < 1 << 60:
                where = f"/{level.relative_to(mount)}" if level != mount else "/"
                room = max(0, int(limit) - used)
                yield int(limit), room, name != "memory.high", f"{name} of cgroup {where}"
        if level == mount:
            return
