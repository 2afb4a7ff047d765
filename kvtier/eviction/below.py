"""Below: eviction orders of the tiers under RAM that change their setting when another one would
hit more (``policy: auto``).

Such a tier is written with what RAM drops, and it sees every prompt. So its order is that of
Segments, with shadows of its own that follow the prompts. They are as large as the tier.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from kvtier.core.steps import Steps
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import Segments
from kvtier.eviction.sessions import SessionPrompt
from kvtier.eviction.shadows import Shadows


class Below:
    """As a maker of policies it returns a live order for each tier, which the Store's lock guards.
    The rest is used by one thread at a time, without the lock. ``compute``: what hits save."""

    def __init__(self, compute: SavedCompute) -> None:
        self._compute = compute
        self.tiers: list[tuple[Segments, Shadows]] = []

    def __call__(self, room: int) -> Segments:
        return self.adapt(Segments(room))

    def adapt(self, live: Segments) -> Segments:
        """This order of a tier changes its setting from now on."""
        self.tiers.append((live, Shadows(live.room, self._compute)))
        return live

    def following(self, prompt: SessionPrompt, lock: AbstractContextManager[object]) -> Steps[None]:
        """A prompt came. In pieces, without the lock, which is taken for short when a setting
        changes."""
        for live, shadows in self.tiers:
            yield from follow(live, shadows, prompt, lock)


def follow(
    live: Segments, shadows: Shadows, prompt: SessionPrompt, lock: AbstractContextManager[object]
) -> Steps[None]:
    """A prompt came: ``live`` takes the setting that ``shadows`` find best. As
    :meth:`Below.following`."""
    if shadows.room != live.room:
        shadows.resize(live.room)
    yield from shadows.seeing(prompt)
    setting = shadows.settings[shadows.now]
    if setting != live.setting:
        with lock:
            live.settle(setting)
