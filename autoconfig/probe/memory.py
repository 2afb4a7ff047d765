"""Memory and CPUs of this machine, as ``/proc``, ``/sys`` and the kernel tell them."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from contextlib import closing
from pathlib import Path

from kvtier.autoconfig.facts import UNLIMITED, Memory
from kvtier.autoconfig.probe.cgroup import memory_limits
from kvtier.autoconfig.probe.unified import gpu_nodes
from kvtier.core.pool import Pool
from kvtier.core.region import HUGE_BYTES
from kvtier.tiers.nvme.proc import ROOT, fact_of, text_of


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
        shm=fact_of(lambda: _shm_bytes(root), "size of /dev/shm"),
        reserved=fact_of(
            lambda: _reserved(root), "free pages in /sys/kernel/mm/hugepages/hugepages-2048kB"
        ),
        makes_huge=fact_of(_makes_huge, "one tried (MADV_COLLAPSE)"),
        memlock=fact_of(_memlock, "RLIMIT_MEMLOCK"),
        numa_nodes=fact_of(lambda: _numa_nodes(root), "/sys/devices/system/node"),
        cpus=fact_of(lambda: len(os.sched_getaffinity(0)), "CPUs of this process"),
        pools=fact_of(lambda: _pool_bytes(root), "kvtier pools in /proc"),
    )


def _shm_bytes(root: Path) -> int:
    stat = os.statvfs(root / "dev/shm")
    return stat.f_blocks * stat.f_frsize


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
        return pool.huge_bytes > 0


def _numa_nodes(root: Path) -> int:
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    with_memory = [
        node for node in nodes if not re.search(r"MemTotal:\s+0 kB", text_of(node / "meminfo"))
    ]
    if not with_memory:
        raise ValueError("no node has memory")
    return len(with_memory)


def _pool_bytes(root: Path) -> int:
    """Pages of every pool that any process this user may inspect has open, each pool once."""
    found = {}
    for link in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.readlink(link).startswith("/memfd:kvtier-pool"):
                status = link.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())
