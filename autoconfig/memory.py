"""May this process take so much RAM? Asked before a byte of it is taken, because the kernel refuses
by killing.

More than a limit ever allows is an error. More than is free now is a warning: others may give back
    what they hold.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from kvtier.autoconfig.facts import Fact
from kvtier.autoconfig.probe.probe import ROOT, probe_memory
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text

logger = logging.getLogger("kvtier")

INDEX_BYTES = 400
"""What the process needs for one chunk beside its slot (``python -m kvtier.bench.micro.index``)."""


class Room(NamedTuple):
    """The RAM of this process. A fact is None where neither the machine nor the cgroup says."""

    limit: Fact[int] | None
    """What it can ever have."""
    free: Fact[int] | None
    """What it could take now."""
    own: int
    """Bytes that it has, and keeps to its end."""

    def ever(self, size: int) -> bool:
        """Can it come to hold ``size`` bytes more?"""
        return self.limit is None or size + self.own <= _value(self.limit)

    def now(self, size: int) -> bool:
        """Is there room for them now?"""
        return self.free is None or size <= _value(self.free)


def ram_room(root: Path = ROOT) -> Room:
    """As it is now. ``root``: where /proc and /sys are."""
    memory = probe_memory(root)
    limit = _least(memory.cgroup_limit, memory.total)
    free = _least(memory.available, memory.cgroup_headroom)
    return Room(limit, free, _own_bytes(root))


def in_reserved_pages(ram_bytes: int, root: Path = ROOT) -> bool:
    """Whether free reserved huge pages hold it all: an engine's own pool takes those, which nobody
    else can have."""
    return ram_bytes <= (probe_memory(root).reserved.value or 0)


def require_ram(
    ram_bytes: int,
    slot_bytes: int | None = None,
    source: str = "default",
    *,
    lent: bool = False,
    root: Path = ROOT,
) -> None:
    """Raise ConfigError when this process can never hold ``ram_bytes``; log a warning when it
    cannot now.

    What reserved huge pages hold is not asked about. ``lent``: a server's RAM, which never lies in
    them.

    ``slot_bytes``: the size of a slot, for the index; None: not known yet. ``source``: whose word
      ``ram_bytes`` is.
    ``root``: where /proc and /sys are.
    """
    if not lent and in_reserved_pages(ram_bytes, root):
        return
    limit, free, own = room = ram_room(root)
    needed = ram_bytes + (ram_bytes // slot_bytes * INDEX_BYTES if slot_bytes else 0)
    given = f"ram_bytes={size_text(ram_bytes)} ({source})"
    if limit is not None and not room.ever(needed):
        most = max(0, _value(limit) - own - (needed - ram_bytes))
        raise ConfigError(
            f"{given} is more RAM than this process can ever have: {size_text(_value(limit))} "
            f"({limit.source}), of which it needs {size_text(own + needed - ram_bytes)} itself. "
            "The kernel would kill "
            f"it. Lower ram_bytes below {size_text(most)}, or raise the limit"
        )
    if free is not None and not room.now(needed):
        logger.warning(
            "%s is more than the %s that are free now (%s): the kernel may kill this process when "
            "the RAM tier fills. "
            "Lower ram_bytes, or make room",
            given,
            size_text(_value(free)),
            free.source,
        )


def _least(*facts: Fact[int]) -> Fact[int] | None:
    """The smallest that is known."""
    return min((fact for fact in facts if fact.value is not None), key=_value, default=None)


def _value(fact: Fact[int]) -> int:
    return fact.value or 0


def _own_bytes(root: Path) -> int:
    """Memory of this process that nothing but its end gives back; 0 where the kernel does not
    say."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
