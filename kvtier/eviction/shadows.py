"""Shadows: find the order of leaving whose hits would save most compute, by trying all of them.
Pure.

Each shadow is the index of a place under one setting of
:class:`~kvtier.eviction.segments.Segments`, without any data. For a large place only a part of the
sessions is followed, with all turns of each, in shadows that are smaller by the same factor. One
thread at a time uses them (a lane's), never under the Store's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import PIECE_CHUNKS, Steps, pieces
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.segments import SETTINGS, Segments, Setting

_MOST_ROOM_CHUNKS, _LEAST_ROOM_CHUNKS = 12_288, 8
"""Most and fewest chunks in a shadow. A larger place is followed in part."""
_FADE_FACTOR = 0.9 ** (1 / 200)
"""Factor by which all scores fade with each prompt, so that a change of load shows."""


class Shadow(Segments):
    """Index of a place under one setting, which serves prompts as a Store would."""

    def __init__(self, room: int, setting: Setting) -> None:
        super().__init__(room, setting)
        self.hits = self.saved = self.score = 0.0
        """Chunks hit, the compute that they saved, and a sum of the latter that fades."""

    def serving(self, run: Sequence[ChunkKey]) -> Steps[int]:
        """Serve a prompt that asks for ``run``, after which all of it is stored, in pieces. Returns
        the number of leading chunks that were held."""
        known, new, own, held = list[ChunkKey](), list[ChunkKey](), set[ChunkKey](), len(run)
        for number, part in enumerate(pieces(run)):
            absent = [key for key in part if key not in self]
            if absent and not new:
                held = number * PIECE_CHUNKS + part.index(absent[0])
            new += absent
            known += [key for key in part if key in self] if absent else part
            own.update(part)
            if len(part) == PIECE_CHUNKS:
                yield 0.0
        for part in _last_first(known):
            self.used(part)
            if len(part) == PIECE_CHUNKS:
                yield 0.0
        surplus = len(self) + len(new) - self.room
        while surplus > 0 and (left := list(self._leaving(min(surplus, PIECE_CHUNKS), own))):
            self.evicted(left)
            surplus -= len(left)
            yield 0.0
        for part in _last_first(new[: self.room - len(self)]):
            self.add(part[::-1])
            if len(part) == PIECE_CHUNKS:
                yield 0.0
        for part in _last_first(run):
            self.ordered(part)
            if len(part) == PIECE_CHUNKS:
                yield 0.0
        return held

    def _leaving(self, most: int, own: set[ChunkKey]) -> Iterator[ChunkKey]:
        """Return up to ``most`` of the coldest chunks, cut before the first one of ``own``."""
        for key in islice(self, most):
            if key in own:
                break
            yield key


def _last_first(run: Sequence[ChunkKey]) -> Iterator[Sequence[ChunkKey]]:
    return reversed(list(pieces(run)))


class Shadows:
    """The shadows of a place with room for ``room`` chunks. They begin with the first of
    ``settings``. ``compute``: what hits save, by which the settings are compared."""

    settings = SETTINGS

    def __init__(self, room: int, compute: SavedCompute) -> None:
        self._compute = compute
        self.now = 0
        self.asked = 0
        """Chunks that the shadows were asked for."""
        self._shadows: list[Shadow] = []
        self.resize(room)

    def resize(self, room: int) -> None:
        """Set the live place's room, in chunks. The shadows start empty and keep their scores."""
        self.room, self.part = room, min(1.0, _MOST_ROOM_CHUNKS / max(1, room))
        before, size = self._shadows, max(_LEAST_ROOM_CHUNKS, int(room * self.part))
        self._shadows = [Shadow(size, setting) for setting in self.settings]
        for old, new in zip(before, self._shadows, strict=False):
            new.hits, new.saved, new.score = old.hits, old.saved, old.score

    def seeing(self, run: Sequence[ChunkKey], session: int) -> Steps[None]:
        """Serve a prompt in all shadows, in pieces. Then :attr:`now` says which setting to use."""
        passed = 0
        # A multiple of the golden ratio is evenly distributed, and always the same for one session.
        if self.part == 1 or session * 0.6180339887498949 % 1.0 < self.part:
            for each in self._shadows:
                hits = yield from each.serving(run)
                saved = self._compute.of(hits)
                each.hits += hits
                each.saved += saved
                each.score += saved
                passed += len(run)
                if passed >= PIECE_CHUNKS:
                    passed = 0
                    yield 0.0
            self.asked += len(run)
        scores = [each.score for each in self._shadows]
        if max(scores) > scores[self.now]:
            self.now = scores.index(max(scores))
        for each in self._shadows:
            each.score *= _FADE_FACTOR

    def over(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """Cool chunks of ``run``, which will not be asked for again, in pieces."""
        for each in self._shadows:
            for part in pieces(run):
                each.cool(part)
                yield 0.0

    def hits(self) -> dict[str, int]:
        """Return by each setting's name how many of the :attr:`asked` chunks it hit."""
        return {each.setting.name: int(each.hits) for each in self._shadows}

    def saved(self) -> dict[str, int]:
        """Return by each setting's name the compute saved, in chunks at a prompt's beginning."""
        return {each.setting.name: int(each.saved) for each in self._shadows}
