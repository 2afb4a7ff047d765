"""Adaptive: an eviction order of RAM that changes its setting when another one would hit more
(``policy: auto``).

The live order belongs to the Directory, and the Store's lock guards it. The shadows run on a lane
thread without the lock. They release the interpreter after each shadow, so another thread waits at
most for one prompt in one shadow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvtier.core.chunk import ChunkKey
from kvtier.store.segments import Segments
from kvtier.store.shadows import Shadows


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
