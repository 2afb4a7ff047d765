"""May this process take so much RAM? It is asked before any of it is taken, because the kernel
refuses by killing.

More RAM than a limit ever allows is an error. More than is free now is a warning, because others
may give RAM back.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from kvtier.autoconfig.probe.memory import probe_memory
from kvtier.core.errors import ConfigError
from kvtier.core.fact import ROOT, Fact, least, number, text_of
from kvtier.core.terminal import size_text

logger = logging.getLogger("kvtier")

INDEX_BYTES = 400
"""Memory for one chunk besides its slot (``python -m kvtier.bench.micro.index``)."""


class RamBudget(NamedTuple):
    """The RAM of this process. A fact is None where neither the machine nor the cgroup tells it."""

    limit: Fact[int] | None
    free: Fact[int] | None
    own: int
    """Bytes that the process has, and keeps to its end."""

    def ever(self, size: int) -> bool:
        return self.limit is None or size + self.own <= number(self.limit)

    def now(self, size: int) -> bool:
        return self.free is None or size <= number(self.free)


def ram_room(root: Path = ROOT) -> RamBudget:
    memory = probe_memory(root)
    limit = least(memory.cgroup_limit, memory.total)
    free = least(memory.available, memory.cgroup_headroom)
    return RamBudget(limit, free, _own_bytes(root))


def in_reserved_pages(ram_bytes: int, root: Path = ROOT) -> bool:
    """Whether free reserved huge pages, which only an engine's own pool takes, hold all of it."""
    return ram_bytes <= (probe_memory(root).reserved.value or 0)


def require_ram(
    ram_bytes: int,
    slot_bytes: int | None = None,
    source: str = "default",
    *,
    lent: bool = False,
    root: Path = ROOT,
) -> None:
    """Raise ConfigError when this process can never have ``ram_bytes``, and log a warning when it
    cannot now. Nothing is checked when reserved huge pages can hold all of it.

    Args:
        slot_bytes: the size of a slot, for the index. None: not known yet.
        source: who decided ``ram_bytes``.
        lent: a server's RAM never lies in reserved huge pages.
        root: where /proc and /sys are.
    """
    if not lent and in_reserved_pages(ram_bytes, root):
        return
    limit, free, own = room = ram_room(root)
    needed = ram_bytes + (ram_bytes // slot_bytes * INDEX_BYTES if slot_bytes else 0)
    given = f"ram_bytes={size_text(ram_bytes)} ({source})"
    if limit is not None and not room.ever(needed):
        most = max(0, number(limit) - own - (needed - ram_bytes))
        raise ConfigError(
            f"{given} is more RAM than this process can ever have: {size_text(number(limit))} "
            f"({limit.source}), of which it needs {size_text(own + needed - ram_bytes)} itself. "
            f"The kernel would kill it. Lower ram_bytes below {size_text(most)}, or raise the limit"
        )
    if free is not None and not room.now(needed):
        logger.warning(
            "%s is more than the %s that are free now (%s): the kernel may kill this process when "
            "the RAM tier fills. Lower ram_bytes, or make room",
            given,
            size_text(number(free)),
            free.source,
        )


def _own_bytes(root: Path) -> int:
    """Memory of this process that only its end gives back. 0 where the kernel does not tell."""
    lines = text_of(root / "proc/self/status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
