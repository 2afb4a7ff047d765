"""Every configured place for chunks, with a trial between two processes.

Nothing here makes a lasting change, and every check has a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvtier import selftest
from kvtier.cli.checks.configuration import no_key
from kvtier.config.keys import Config
from kvtier.started import Started
from kvtier.tiers.finding import Finding
from kvtier.tiers.nvme.disks import left_behind, probe_disks
from kvtier.tiers.registry import RegisteredTier
from kvtier.tiers.seam import TierSection


def check_ram() -> Finding:
    """Reach the slots as a worker does."""
    return Finding.of(
        "self-test ram",
        selftest.try_ram(),
        "slots filled here, mapped and compared by a second process",
        (
            "workers map the pool through /proc/PID/fd: same user, /proc mounted without hidepid, "
            "memfd_create allowed"
        ),
    )


def check_left_behind(config: Config, *, server: bool) -> Finding:
    """Disk space that nobody uses: of engines where this is a ``server``, or an engine of one, and
    of servers where it is an engine by itself. Of both without a disk tier."""
    kinds = {False} if server or config.server.here else {True}
    if config.nvme.path is None and not config.server.here:
        kinds = {False, True}
    places = probe_disks([config.nvme.path] if config.nvme.path else [])
    left = [
        each for disk in places for kind in kinds for each in left_behind(disk.path, servers=kind)
    ]
    if not left:
        return Finding("left behind", "ok", "no folder of an engine or server that is gone")
    return Finding("left behind", "warn", "; ".join(left), "clear what is needed no more")


def check_tier(started: Started, tier: RegisteredTier, own: TierSection) -> Iterator[Finding]:
    """What a tier finds. It is not tried where what must be encrypted cannot be."""
    tried = None if no_key(started) else partial(selftest.try_tier, started.config, tier)
    yield from tier.findings(own, tried)
