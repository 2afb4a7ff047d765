"""Adaptive: eviction orders that change their setting when another one would hit more
(``policy: auto``), of RAM and of each tier below it.

A live order belongs to the Directory, and the Store's lock guards it. Its shadows are as large as
its place. They run on a lane thread without the lock, in pieces of 128 chunks, between which the
interpreter is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import Steps
from kvtier.eviction.exclusive import Exclusive
from kvtier.eviction.kept import KEEP
from kvtier.eviction.order import LRU, PolicyOf
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import Segments
from kvtier.eviction.sessions import SessionPrompt
from kvtier.eviction.shadows import Shadows


class Adaptive:
    """A maker of policies: RAM's first, then one for each tier. Used by one thread at a time,
    except the live orders. ``compute``: what hits save of the model."""

    def __init__(self, compute: SavedCompute = SavedCompute()) -> None:  # noqa: B008
        self.compute = compute
        self.places: list[tuple[Segments, Shadows]] = []
        """Live orders with their shadows. RAM's is the first."""

    def __call__(self, room: int) -> Segments:
        return self._adapting(Segments(room))

    def on_evict(self, room: int) -> Segments:
        """Make the order of a tier that is written when RAM drops a chunk."""
        return self._adapting(Exclusive(room, self.places[0][0]))

    def _adapting(self, live: Segments) -> Segments:
        self.places.append((live, Shadows(live.room, self.compute)))
        return live

    def following(self, prompt: SessionPrompt, lock: AbstractContextManager[object]) -> Steps[None]:
        """Let each place take the setting that its shadows find best with this prompt. In pieces,
        without the lock, which is taken for short when a setting changes."""
        for live, shadows in self.places:
            if shadows.room != live.room:
                shadows.resize(live.room)
            yield from shadows.seeing(prompt)
            setting = shadows.settings[shadows.now]
            if setting != live.setting:
                with lock:
                    live.settle(setting)

    def over(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """Chunks of ``run`` will not be asked for again. In pieces, without the lock."""
        for _, shadows in self.places:
            yield from shadows.over(run)

    def counts(self) -> dict[str, int]:
        """Of RAM: the index of the setting in use (``policy_now``), the chunks that the shadows
        were asked for, how many of them each setting hit, and what those hits saved, in chunks at a
        prompt's beginning."""
        _, shadows = self.places[0]
        return {
            "policy_asked": shadows.asked,
            **{f"policy_hits_{name}": count for name, count in shadows.hits().items()},
            **{f"policy_saved_{name}": count for name, count in shadows.saved().items()},
            "policy_now": shadows.now,
        }

    def orders(self) -> Orders:
        return Orders(self, self, self.on_evict, self)


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
