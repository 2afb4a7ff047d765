"""Versions, memory, and the limits that a container or a service manager sets."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

import kvtier
from kvtier.autoconfig.facts import UNLIMITED, Gpus
from kvtier.autoconfig.memory import in_reserved_pages, ram_room
from kvtier.autoconfig.probe.gpus import probe_gpus
from kvtier.autoconfig.probe.memory import probe_memory
from kvtier.core.region import HUGE_BYTES
from kvtier.core.terminal import size_text
from kvtier.started import Started
from kvtier.tiers.seam import Finding

_SMALL_SHM_BYTES = 256 << 20
_POPULATE_LINUX = (5, 14)


def check_host(started: Started) -> Iterator[Finding]:
    yield Finding("kvtier", "ok", f"{kvtier.__version__}, Python {platform.python_version()}")
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    old = release < _POPULATE_LINUX
    slow = (
        "the first save into each slot is slow before Linux 5.14; newer kernels prepare slots "
        "in the background"
    )
    yield Finding("linux", "warn" if old else "ok", platform.release(), slow if old else "")
    gpus = probe_gpus()
    if gpus.shared.value is not None:
        seen = f"CPU and GPU share one: {gpus.shared.value} ({gpus.shared.source})"
        yield Finding("memory", "ok", f"{seen}; a RAM tier takes what the engine could have")
    yield _memory(started)
    yield _huge_pages(started)
    yield _memlock(started, gpus)
    yield _shm()


def _memory(started: Started) -> Finding:
    limit, free, _ = room = ram_room()
    if limit is None or free is None:
        source = probe_memory().available.source
        return Finding("ram", "warn", f"free memory is unknown ({source})", "set ram_bytes by hand")
    size, source = started.ram_bytes, started.config.ram.source("bytes_")
    given = f"ram_bytes {size_text(size)} ({source}) of"
    if started.config.server.address is None and in_reserved_pages(size):
        return Finding("ram", "ok", f"{given} reserved huge pages")
    if not room.ever(size):
        do = "lower ram_bytes, or raise the limit: no start takes more than there can ever be"
        return Finding(
            "ram", "fail", f"{given} {size_text(limit.value or 0)} in all ({limit.source})", do
        )
    seen = f"{given} {size_text(free.value or 0)} free ({free.source})"
    if not room.now(size):
        more = size_text(size - (free.value or 0))
        do = (
            f"lower ram_bytes, or make room for {more} more: the kernel may kill the process when "
            "the RAM tier fills"
        )
        return Finding("ram", "warn", seen, do)
    return Finding("ram", "ok", seen)


def _huge_pages(started: Started) -> Finding:
    """Everything works without huge pages, with a second copy between a slot and the disk."""
    memory, size = probe_memory(), started.ram_bytes
    free = memory.reserved.value or 0
    aside = f"; {size_text(free)} of reserved ones are free" if free else ""
    if started.config.server.address is None and in_reserved_pages(size):
        return Finding("huge pages", "ok", f"reserved: an engine's own pool takes them{aside}")
    if memory.makes_huge.value:
        return Finding("huge pages", "ok", f"the kernel makes them of ordinary memory{aside}")
    do = (
        f"a newer kernel (Linux 6.1), or sysctl vm.nr_hugepages={-(-size // HUGE_BYTES)} before "
        "the engine starts"
    )
    return Finding("huge pages", "warn", f"none; a disk needs a second copy{aside}", do)


def _memlock(started: Started, gpus: Gpus) -> Finding:
    limit = probe_memory().memlock
    seen = (
        size_text(limit.value)
        if limit.value is not None and limit.value < UNLIMITED
        else "no limit"
    )
    if gpus.count.value == 0:
        return Finding("memlock", "ok", f"{seen}; not needed without a GPU")
    if gpus.pin_charged.value is False:
        return Finding("memlock", "ok", f"{seen}; not charged: {gpus.pin_charged.source}")
    if limit.value is None or limit.value >= started.ram_bytes:
        return Finding("memlock", "ok", seen)
    do = "docker run --ulimit memlock=-1, systemd LimitMEMLOCK=infinity"
    return Finding(
        "memlock", "warn", f"{seen}, less than ram_bytes, to which pinning may be charged", do
    )


def _shm() -> Finding:
    shm = probe_memory().shm
    seen = f"{size_text(shm.value)} in /dev/shm" if shm.value is not None else shm.source
    if (shm.value or 0) >= _SMALL_SHM_BYTES:
        return Finding("shm", "ok", f"{seen}; kvtier needs none of it")
    do = "kvtier needs none, but vLLM with several ranks does: docker run --shm-size=2g"
    return Finding("shm", "warn", seen, do)
