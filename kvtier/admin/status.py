"""A server's report of itself: the answer of ``GET /v1/stats``, the OpenAPI document's schemas, and
what :mod:`kvtier.admin.prometheus` shows. All counts are since the start of the server, and
count chunks unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import kvtier
from kvtier.admin.forms import EngineLookup
from kvtier.core.report import LaneStatus, SizeClassStatus, TierStatus, TimingStatus
from kvtier.store.reports import status

if TYPE_CHECKING:
    from kvtier.server.registry import SizeClass
    from kvtier.server.server import Server

EVERY_S = 10.0
"""Time between two moments of a history."""
_KEPT_MOMENTS = 361
"""Moments of an hour, and of its beginning."""
_MOST_MODELS = 4
_LOOKED_AT_OWNERS = 64
__all__ = ["LaneStatus", "SizeClassStatus", "TierStatus", "TimingStatus"]


class ConnectionStatus(msgspec.Struct, frozen=True):
    open: int
    lingering: int
    """Closed connections of engines of which some process still has the pool mapped."""
    leases: int
    accepted: int
    rejected: int
    dropped: int
    ended: int


class MemoryStatus(msgspec.Struct, frozen=True):
    """Bytes resident now, or 0 if the kernel does not tell."""

    process: int
    """Bytes of anonymous memory and files, without the pools."""
    pools: int


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine whose KV events are followed."""

    engine: str
    followed: bool
    """Whether its event stream is connected."""
    blocks: dict[str, int]
    """Blocks of vLLM's that it said it can serve, by tier."""
    ignored_blocks: int
    """Blocks whose place in a prompt is unknown, or for which there was no room."""
    events: dict[str, int]
    """Messages applied (``message``), gaps, pictures dropped, messages refused."""


class Stats(msgspec.Struct, frozen=True):
    version: str
    uptime_s: float
    ready: bool
    """Whether engines are let in."""
    trouble: list[str]
    """Troubles as in ``/healthz``."""
    memory: MemoryStatus
    connections: ConnectionStatus
    size_classes: list[SizeClassStatus]
    engines: list[EngineStatus]


def read(server: Server, engines: Sequence[EngineStatus] = ()) -> Stats:
    """Read the counts. On the server's loop. Walks over no chunks: these counts are always kept."""
    return Stats(
        version=kvtier.__version__,
        uptime_s=time.monotonic() - server.started,
        ready=server.ready,
        trouble=trouble(server),
        memory=_memory(Path("/proc/self/status")),
        connections=_connections(server),
        size_classes=[
            status.read(
                size_class.store,
                len(size_class.owners),
                size_class.zero_hits.verdict,
                _models(size_class),
            )
            for size_class in server.size_classes.open.values()
        ],
        engines=list(engines),
    )


def _models(size_class: SizeClass) -> list[str]:
    """Return the ends of the names that engines give: ``tiny`` of ``/models/tiny, process 7``."""
    came = islice(reversed(size_class.owners.values()), _LOOKED_AT_OWNERS)
    paths = (owner.engine.rpartition(", process")[0].rstrip("/") for owner in came)
    names = dict.fromkeys(path.rpartition("/")[2] for path in paths if path)
    return list(names)[:_MOST_MODELS]


def trouble(server: Server) -> list[str]:
    """List the troubles: of the start, tiers with open breakers, and tiers that have lost their
    place. They cost hits, and are no reason to take the server out of service."""
    tiers = [
        tier for size_class in server.size_classes.open.values() for tier in size_class.store.tiers
    ]
    lost = (tier.trouble for tier in tiers)
    away = (
        f"{tier.name}: {', '.join(sorted(names))} failed and is left alone for a while: misses"
        for tier in tiers
        if (names := tier.nodes_away)
    )
    return [*server.trouble.values(), *away, *(text for text in lost if text)]


def _connections(server: Server) -> ConnectionStatus:
    every = {*server.connections, *server.lingering}
    return ConnectionStatus(
        open=len(server.connections),
        lingering=len(server.lingering),
        leases=sum(peer.leases for peer in every),
        **{event: server.counts[event] for event in ("accepted", "rejected", "dropped", "ended")},
    )


def _memory(path: Path) -> MemoryStatus:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return MemoryStatus(0, 0)
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in lines)
        if "kB" in rest
    }
    process = kib.get("RssAnon", 0) + kib.get("RssFile", 0)
    return MemoryStatus(process * 1024, kib.get("RssShmem", 0) * 1024)


class EngineIndex:
    """Index of engines that the admin interface asks, on the server's loop. This one follows none:
    one that does overrides every method."""

    def status(self) -> list[EngineStatus]:
        """Return a row for each engine, in the order of the configuration."""
        return []

    async def lookup(self, tokens: Sequence[int], salt: str | None) -> list[EngineLookup]:
        """Return each engine's leading tokens of a prompt, in the order of the configuration."""
        return []


class Moment(msgspec.Struct, frozen=True):
    """Counts since the server's start, of all chunk sizes."""

    uptime_s: float
    asked: int
    loads: dict[str, int]
    """Chunks served, by tier."""
    asked_tokens: int
    hit_tokens: int
    asked_compute: int
    saved_compute: int


class Moments(msgspec.Struct, frozen=True):
    """Moments, the oldest first. A rate is the difference of two."""

    every_s: float
    moments: list[Moment]


def moment(stats: Stats) -> Moment:
    sizes = stats.size_classes
    loads = Counter[str]()
    for one in sizes:
        loads.update({tier.tier: tier.loads for tier in one.tiers})
    return Moment(
        uptime_s=stats.uptime_s,
        asked=sum(one.asked for one in sizes),
        loads=dict(loads),
        asked_tokens=sum(one.asked_tokens for one in sizes),
        hit_tokens=sum(tier.hit_tokens for one in sizes for tier in one.tiers),
        asked_compute=sum(one.asked_compute for one in sizes),
        saved_compute=sum(one.saved_compute for one in sizes),
    )


class History:
    """Counts of the last hour, one moment every ten seconds. On the server's loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._kept: deque[Moment] = deque(maxlen=_KEPT_MOMENTS)

    def keep(self) -> None:
        self._kept.append(moment(read(self._server)))

    def told(self) -> Moments:
        return Moments(EVERY_S, list(self._kept))

    async def keeping(self) -> None:
        """Keep a moment every ten seconds, until cancelled."""
        while True:
            self.keep()
            await asyncio.sleep(EVERY_S)
