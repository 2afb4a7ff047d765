"""Adaptive: an eviction order of RAM that changes its setting when another one would hit more
(``policy: auto``).

The live order belongs to the Directory, and the Store's lock guards it. The shadows run on a lane
thread without the lock, in pieces of 128 chunks, between which the interpreter is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import Steps, pieces
from kvtier.eviction.below import Below
from kvtier.eviction.by_return import ByReturn
from kvtier.eviction.exclusive import Exclusive
from kvtier.eviction.kept import KEEP
from kvtier.eviction.order import LRU, PolicyOf
from kvtier.eviction.planned import Planned
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import Segments, Setting
from kvtier.eviction.sessions import SessionPrompt
from kvtier.eviction.shadows import Shadows

_NAMED = 1024
"""So many chunks are named ahead when a plan begins: not all at once, because a large table takes
milliseconds where it grows."""


class Adaptive:
    """As a maker of policies it returns its one live order. Used by one thread at a time, except
    the live order. ``compute``: what hits save of this place's model."""

    def __init__(self, compute: SavedCompute = SavedCompute()) -> None:  # noqa: B008
        self.compute = compute
        self.live = Planned(0)
        self.shadows = Shadows(0, compute)
        self.below = Below(compute)
        self.others: Iterator[Sequence[ChunkKey]] = iter(())
        """Chunks that were in the place when the plan began and were not looked at yet."""

    def __call__(self, room: int) -> Planned:
        self.live = Planned(room)
        self.shadows = Shadows(room, self.compute)
        return self.live

    def following(
        self,
        prompt: SessionPrompt,
        lock: AbstractContextManager[object],
        held: Callable[[], Iterator[Sequence[ChunkKey]]],
    ) -> Steps[None]:
        """A prompt came. In pieces, without the lock. It takes the lock for short when chunks are
        to leave early, or the setting changes. ``held``: all chunks of the place in pieces, each of
        which is drawn under the lock."""
        shadows = self.shadows
        if shadows.room != self.live.room:
            shadows.resize(self.live.room)
            with lock:
                self.live.end_plan()
        before = shadows.now
        yield from shadows.seeing(prompt)
        plan, setting = shadows.plan, shadows.settings[shadows.now]
        if shadows.now != before:
            with lock:
                self.live.end_plan()
                if isinstance(setting, Setting):
                    self.live.settle(setting)
            self.others = iter(()) if plan is None else held()
        elif plan is not None and plan.named:
            for part in pieces(plan.named):
                with lock:
                    self.live.leave_first(part)
                yield 0.0
        if plan is not None:
            yield from self.name_others(plan, lock)
        yield from self.below.following(prompt, lock)

    def over(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """These chunks will not be asked for again. In pieces, without the lock."""
        for shadows in (self.shadows, *(each for _, each in self.below.tiers)):
            yield from shadows.over(run)

    def name_others(self, plan: ByReturn, lock: AbstractContextManager[object]) -> Steps[None]:
        """What was in the place when the plan began, and the plan does not hold, leaves first, in
        no order: some of it now, and more when that has left."""
        while self.live.leaving < _NAMED:
            with lock:
                part = next(self.others, None)
                if part is None:
                    return
                self.live.leave_first(plan.leaving(part))
            yield 0.0

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
