"""How much memory this process's cgroups leave it, in either version of cgroups, under any root."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvtier.autoconfig.facts import UNLIMITED
from kvtier.core.fact import Fact, known, least, unknown
from kvtier.tiers.nvme.proc import mounts, text_of


def memory_limits(root: Path) -> tuple[Fact[int], Fact[int]]:
    """Two facts over this process's cgroup and all above it up to the mount's top, in either
    version of cgroups: the tightest ``limit - use``, and the tightest limit that kills."""
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
    """A cgroup's path relative to what is mounted. In a container the mount often starts at the
    container's own group."""
    inside = path.removeprefix(top) if top != "/" else path
    return "" if ".." in inside.split("/") else inside.strip("/")


def _limits(mount: Path, inside: str, version2: bool) -> Iterable[tuple[int, int, bool, str]]:
    """Each limit, what is left up to it, whether the kernel kills beyond it (beyond ``memory.high``
    it only slows down), and where it stands."""
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
                # of groups above the mount, which only version 1 tells
                limit = min(limit, inherited[1], key=int)
            if limit.isdigit() and int(limit) < 1 << 60:
                where = f"/{level.relative_to(mount)}" if level != mount else "/"
                room = max(0, int(limit) - used)
                yield int(limit), room, name != "memory.high", f"{name} of cgroup {where}"
        if level == mount:
            return
