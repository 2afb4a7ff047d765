"""Adaptive: an eviction order of RAM that changes its setting when another one would hit more
(``policy: auto``).

The live order belongs to the Directory, and the Store's lock guards it. The shadows run on a lane
thread without the lock. They release the interpreter after each shadow, so another thread waits at
most for one prompt in one shadow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.kept import KEEP
from kvtier.eviction.order import LRU, PolicyOf
from kvtier.eviction.segments import Segments
from kvtier.eviction.shadows import Shadows


class Adaptive:
    """As a maker of policies it returns its one live order. Used by one thread at a time, except
    the live order."""

    def __init__(self) -> None:
        self.live = Segments(0)
        self.shadows = Shadows(0)

    def __call__(self, room: int) -> Segments:
        self.live = Segments(room)
        self.shadows = Shadows(room)
        return self.live

    def follow(
        self,
        run: Sequence[ChunkKey],
        session: int,
        lock: AbstractContextManager[object],
        pause: Callable[[], object],
    ) -> None:
        """A prompt of this session asked for ``run``. Called without the lock, and takes it when
        the setting changes."""
        shadows = self.shadows
        if shadows.room != self.live.room:
            shadows.resize(self.live.room)
        before = shadows.now
        for _ in shadows.seeing(run, session):
            pause()
        if shadows.now != before:
            with lock:
                self.live.settle(shadows.settings[shadows.now])

    def counts(self) -> dict[str, int]:
        """The index of the setting in use (``policy_now``), the chunks that the shadows were asked
        for, and how many of them each setting hit."""
        shadows = self.shadows
        hits = {
            f"policy_hits_{each.name}": hits
            for each, hits in zip(shadows.settings, shadows.hits, strict=True)
        }
        return {"policy_asked": shadows.asked, **hits, "policy_now": shadows.now}

    def orders(self) -> Orders:
        """RAM adapts, and the lower tiers have LRU."""
        return Orders(self, adaptive=self)


class Orders(NamedTuple):
    """The orders in which chunks leave the places of one Store."""

    ram: PolicyOf = LRU
    lower: PolicyOf = LRU
    """Of each lower tier."""
    adaptive: Adaptive | None = None
    """RAM's, if it adapts: it is told of each prompt."""
    keep: float = KEEP
    """The part of each place that one owner may keep by hints."""


ALL_LRU = Orders()
