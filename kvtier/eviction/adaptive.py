"""Adaptive: an eviction order of RAM that changes its setting when another one would hit more
(``policy: auto``).

The live order belongs to the Directory, and the Store's lock guards it. The shadows run on a lane
thread without the lock, in pieces of 128 chunks, between which the interpreter is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import Steps
from kvtier.eviction.below import Below, follow
from kvtier.eviction.exclusive import Exclusive
from kvtier.eviction.kept import KEEP
from kvtier.eviction.order import LRU, PolicyOf
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import Segments
from kvtier.eviction.sessions import SessionPrompt
from kvtier.eviction.shadows import Shadows


class Adaptive:
    """As a maker of policies it returns its one live order. Used by one thread at a time, except
    the live order. ``compute``: what hits save of this place's model."""

    def __init__(self, compute: SavedCompute = SavedCompute()) -> None:  # noqa: B008
        self.compute = compute
        self.live = Segments(0)
        self.shadows = Shadows(0, compute)
        self.below = Below(compute)

    def __call__(self, room: int) -> Segments:
        self.live = Segments(room)
        self.shadows = Shadows(room, self.compute)
        return self.live

    def following(self, prompt: SessionPrompt, lock: AbstractContextManager[object]) -> Steps[None]:
        """A prompt came. In pieces, without the lock, which is taken for short when a setting
        changes."""
        yield from follow(self.live, self.shadows, prompt, lock)
        yield from self.below.following(prompt, lock)

    def over(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """These chunks will not be asked for again. In pieces, without the lock."""
        for shadows in (self.shadows, *(each for _, each in self.below.tiers)):
            yield from shadows.over(run)

    def counts(self) -> dict[str, int]:
        """The index of the setting in use (``policy_now``), the chunks that the shadows were asked
        for, how many of them each setting hit, and what those hits saved, in chunks at a prompt's
        beginning."""
        shadows = self.shadows
        return {
            "policy_asked": shadows.asked,
            **{f"policy_hits_{name}": count for name, count in shadows.hits().items()},
            **{f"policy_saved_{name}": count for name, count in shadows.saved().items()},
            "policy_now": shadows.now,
        }

    def on_evict(self, room: int) -> Segments:
        """Makes the order of a tier that is written when RAM drops a chunk. RAM's was made
        before."""
        return self.below.adapt(Exclusive(room, self.live))

    def orders(self) -> Orders:
        """RAM adapts, and so does each lower tier."""
        return Orders(self, self.below, self.on_evict, self)


class Orders(NamedTuple):
    """The orders in which chunks leave the places of one Store."""

    ram: PolicyOf = LRU
    lower: PolicyOf = LRU
    """Of each lower tier that is written when a chunk is saved."""
    on_evict: PolicyOf = LRU
    """Of each lower tier that is written when RAM drops a chunk."""
    adaptive: Adaptive | None = None
    """RAM's, if it adapts: it is told of each prompt."""
    keep: float = KEEP
    """The part of each place that one owner may keep by hints."""


ALL_LRU = Orders()
