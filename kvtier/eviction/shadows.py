"""Shadows: find the setting of :class:`~kvtier.eviction.segments.Segments` that would hit most, by
trying all of them. Pure.

Each shadow is the index of a place under one setting, without any data. All shadows see the same
prompts, and the setting that hits most is used for the live place. For a large place only a part of
the sessions is followed, with all turns of each, in shadows that are smaller by the same factor.
Shadows never run under the Store's lock. One thread at a time uses them (a lane's).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.segments import SETTINGS, Segments

_MOST_ROOM, _LEAST_ROOM = 6144, 8
"""Chunks in a shadow. A larger place is followed in part."""
_REQUESTS = 200
"""Prompts between two comparisons of the settings."""
_LEAD, _FADES = 1.02, 0.8
"""A setting takes over when its score is higher by the first factor. At each comparison all scores
fade by the second factor, so that a change of load shows."""


class Shadow(Segments):
    """The index of a place, which serves prompts as a Store would."""

    __slots__ = ()

    def serve(self, run: Sequence[ChunkKey]) -> int:
        """A prompt asks for ``run``, then all of it is stored. Returns how many leading chunks were
        held.

        It has the same effect as ``used``, ``evicted`` and ``add`` of each chunk, and ``ordered``,
        without those calls.
        """
        once, again, ghosts = self._once, self._again, self._ghosts
        held = next(
            (at for at, key in enumerate(run) if key not in once and key not in again), len(run)
        )
        self.used(run)
        new = [key for key in run[held:] if key not in once and key not in again]
        self._make_room(len(new), run)
        del new[self.room - len(self) :]
        known_for, left = self._known_for if self._protected else 0, self._left
        for key in reversed(new):
            was = ghosts.pop(key, None)
            if was is not None and left - was < known_for:
                again[key] = 0
                if len(again) > self._protected:
                    self._demote()
            else:
                once[key] = 0
        self.ordered(run)
        return held

    def _make_room(self, count: int, run: Sequence[ChunkKey]) -> None:
        """Make room for ``count`` chunks of ``run``, but never evict a chunk of the run itself."""
        once, again, ghosts, own = self._once, self._again, self._ghosts, frozenset(run)
        for _ in range(len(once) + len(again) + count - self.room):
            order = once or again
            if not order:
                return
            key, _ = order.popitem(last=False)
            if key in own:
                order[key] = 0
                order.move_to_end(key, last=False)
                return
            self._left += 1
            ghosts[key] = self._left
        while len(ghosts) > self._most:
            ghosts.popitem(last=False)


class Shadows:
    """The shadows of a place with room for ``room`` chunks. They begin with the first of
    ``settings``."""

    settings = SETTINGS

    def __init__(self, room: int) -> None:
        self.now = 0
        """The index of the setting in use."""
        self.asked = 0
        """Chunks that the shadows were asked for. ``hits`` counts those hit, by setting."""
        self.hits = [0] * len(self.settings)
        self._scores = [0.0] * len(self.settings)
        self._requests = 0
        self.resize(room)

    def resize(self, room: int) -> None:
        """The live place has room for so many chunks from now on. The shadows start empty."""
        self.room = room
        self.part = part_of(room)
        self._shadows = [Shadow(room_of(room, self.part), each) for each in self.settings]

    def seeing(self, run: Sequence[ChunkKey], session: int) -> Iterator[None]:
        """A prompt of this session asked for ``run``. It runs in pieces, one for each shadow. After
        the last piece :attr:`now` says which setting to use."""
        if self.part == 1 or spread(session) < self.part:
            self.asked += len(run)
            for index, shadow in enumerate(self._shadows):
                hits = shadow.serve(run)
                self._scores[index] += hits
                self.hits[index] += hits
                yield
        self._requests += 1
        if not self._requests % _REQUESTS:
            self._compare()

    def over(self, run: Sequence[ChunkKey]) -> None:
        """These chunks will not be asked for again."""
        for shadow in self._shadows:
            shadow.cool(run)

    def _compare(self) -> None:
        scores = self._scores
        best = max(range(len(scores)), key=scores.__getitem__)
        if scores[best] > _LEAD * scores[self.now]:
            self.now = best
        self._scores = [score * _FADES for score in scores]


def part_of(room: int) -> float:
    """The part of the sessions that is followed for a place with room for so many chunks."""
    return min(1.0, _MOST_ROOM / max(1, room))


def room_of(room: int, part: float) -> int:
    """The room of a shadow of this place."""
    return max(_LEAST_ROOM, int(room * part))


def spread(session: int) -> float:
    """A number from 0 to 1, evenly distributed and always the same for one session: a multiple of
    the golden ratio."""
    return session * 0.6180339887498949 % 1.0
