"""What a server reports of itself, as one document: read from the objects' own counts, kept
nowhere.

The Structs are the answer of ``GET /v1/stats``, the schemas of the OpenAPI document, and what
:mod:`kvtier.admin.prometheus` turns into Prometheus' text: one source, three forms. All counts are
since the start of the server, and count chunks unless they say otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import kvtier
from kvtier.core.report import LaneStatus, SizeClassStatus, TierStatus, TimingStatus
from kvtier.store.reports import status

if TYPE_CHECKING:
    from kvtier.server.registry import SizeClass
    from kvtier.server.server import Server

_MOST_MODELS = 4
_OWNERS_LOOKED_AT = 64
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
    """Bytes resident now, from /proc/self/status. 0 where the kernel does not tell."""

    process: int
    """Anonymous memory and files: what the server needs apart from the pools."""
    pools: int


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine whose KV events are followed."""

    engine: str
    followed: bool
    """Its event stream is connected."""
    blocks: dict[str, int]
    """Blocks of vLLM's that it said it can serve, by tier."""
    ignored_blocks: int
    """Blocks that do not count, because their place in a prompt is not known, or for want of
    room."""
    events: dict[str, int]
    """Messages applied (``message``), gaps, pictures dropped, messages refused."""


class Stats(msgspec.Struct, frozen=True):
    """The whole report of one moment."""

    version: str
    uptime_s: float
    ready: bool
    """Whether engines are let in."""
    trouble: list[str]
    """What is wrong now, in words, as in ``/healthz``."""
    memory: MemoryStatus
    connections: ConnectionStatus
    size_classes: list[SizeClassStatus]
    engines: list[EngineStatus]
    """Those in ``admin.engines``."""


def read(server: Server, engines: Sequence[EngineStatus] = ()) -> Stats:
    """On the server's loop. It walks over no chunks: these counts are always kept."""
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
    """Names as engines give them, ``/models/tiny, process 7``: ``tiny``."""
    came = islice(reversed(size_class.owners.values()), _OWNERS_LOOKED_AT)
    paths = (owner.engine.rpartition(", process")[0].rstrip("/") for owner in came)
    names = dict.fromkeys(path.rpartition("/")[2] for path in paths if path)
    return list(names)[:_MOST_MODELS]


def trouble(server: Server) -> list[str]:
    """What is wrong now, in words: what was found at the start, tiers with open breakers, and tiers
    that have lost their place. It costs hits, and is no reason to take the server out of
    service."""
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
