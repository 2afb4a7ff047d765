"""History: what a server's counts were in the last hour, one moment every ten seconds."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import msgspec

from kvtier.admin.status import Stats, read
from kvtier.server.server import Server

EVERY_S = 10.0
_KEPT = 361
"""Moments: an hour, and its beginning."""


class Moment(msgspec.Struct, frozen=True):
    """Counts since the server's start, of all chunk sizes."""

    uptime_s: float
    asked: int
    """Chunks that loads named."""
    loads: dict[str, int]
    """Chunks served, by tier."""
    asked_tokens: int
    hit_tokens: int
    asked_compute: int
    saved_compute: int


class Moments(msgspec.Struct, frozen=True):
    """The oldest first. A rate is the difference of two."""

    every_s: float
    moments: list[Moment]


def moment(stats: Stats) -> Moment:
    """The counts of one report that a history keeps."""
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
    """All of it runs on the server's loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._kept: deque[Moment] = deque(maxlen=_KEPT)

    def keep(self) -> None:
        """Add the moment that is now."""
        self._kept.append(moment(read(self._server)))

    def told(self) -> Moments:
        return Moments(EVERY_S, list(self._kept))

    async def keeping(self) -> None:
        """Keep a moment every ten seconds until cancelled."""
        while True:
            self.keep()
            await asyncio.sleep(EVERY_S)
