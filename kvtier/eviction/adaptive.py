"""Adaptive: eviction orders that change their setting when another one would hit more
(``policy: auto``), of RAM and of each tier below it.

A live order belongs to the Directory, and the Store's lock guards it. Its *shadows* find the order
whose hits would save most compute, by trying all: each is the index of the place under one setting,
without any data. For a large place only a part of the sessions is followed, with all turns of each,
in shadows that are smaller by the same factor. They run on a lane thread without the lock.

The order of a tier that is written when RAM drops a chunk is
:class:`Exclusive` (Wong and Wilkes, *My cache or yours? Making storage more exclusive*, USENIX
2002). A chunk may be lost on its way down, so how many may be in RAM alone is learnt from what
becomes of them, as a sender learns a network's room (Jacobson, *Congestion avoidance and control*,
SIGCOMM 1988).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import PIECE_CHUNKS, Steps, pieces
from kvtier.eviction.kept import KEEP_PART
from kvtier.eviction.order import SETTINGS, PolicyOf, Segments, Setting
from kvtier.eviction.saved_compute import SavedCompute

_EARLY_PART = 0.25
"""Copies that may leave early for each chunk that is written."""
_PAUSE_CHUNKS, _LONGEST_PAUSE_CHUNKS = 400.0, 8_000.0
"""Copies that must stay for each chunk that was lost, and the most that losses together keep. A
prompt's run is cut at a lost chunk, which costs more than the room of many copies is worth."""
_ALONE_PARTS = 8
"""Divisor of RAM's chunks: at first this part of them may be in RAM alone."""


class Exclusive(Segments):
    """Order in which copies of what RAM keeps leave early, so that RAM and the tier together hold
    more different chunks. ``ram`` is the order of the RAM above it, which the same lock guards."""

    def __init__(self, room: int, ram: Segments) -> None:
        super().__init__(room, adapts=True)
        self._ram = ram
        self._twice: OrderedDict[ChunkKey, None] = OrderedDict()
        """Chunks that RAM kept when their prompt was stored, the latest last."""
        self._alone: OrderedDict[ChunkKey, None] = OrderedDict()
        """Chunks whose copy left early, and that were not written again yet."""
        self._may_be_alone = ram.room / _ALONE_PARTS
        self._may_leave = 0.0
        """Number of copies that may leave early. Below 0 for a while after losses."""
        ram.evicts.append(self._left_ram)

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        super().add(run, owner)
        self._may_leave += _EARLY_PART * len(run)
        alone = self._alone
        for key in run:
            if key in alone:
                del alone[key]
                self._may_be_alone = min(self._may_be_alone + 1, self._ram.room)

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        super().ordered(run)
        keeps, twice = self._ram.keeps, self._twice
        for key in reversed(run):
            if keeps(key) and key in self:
                twice[key] = None
                twice.move_to_end(key)
        self._bound(twice)
        self._may_leave = min(self._may_leave, self._ram.room)

    def cool(self, run: Sequence[ChunkKey]) -> None:
        super().cool(run)
        for key in run:  # what is over is not written when it leaves RAM
            self._alone.pop(key, None)

    def coldest(self) -> ChunkKey | None:
        # RAM's hottest chunks leave first here: RAM will drop, and so write, them last.
        twice = self._twice
        while twice and self._may_leave >= 1 and self._has_room_for_one_more():
            key = next(reversed(twice))
            if self._ram.keeps(key) and key in self:
                return key
            del twice[key]
        return super().coldest()

    def evicted(self, run: Sequence[ChunkKey]) -> None:
        twice = self._twice
        for key in run:
            if key in twice:
                del twice[key]
                if self._ram.keeps(key):
                    self._may_leave -= 1
                    self._alone[key] = None
                    self._bound(self._alone)
        super().evicted(run)

    def _left_ram(self, run: Sequence[ChunkKey]) -> None:
        alone = self._alone
        for key in run:
            if key in alone:
                del alone[key]
                self._may_be_alone = max(1.0, self._may_be_alone / 2)
                self._may_leave = max(
                    min(self._may_leave, 0.0) - _PAUSE_CHUNKS, -_LONGEST_PAUSE_CHUNKS
                )

    def _has_room_for_one_more(self) -> bool:
        """Return whether one more chunk may be in RAM alone. If not, drop the oldest such chunk
        from the count if RAM no longer has it."""
        if len(self._alone) < self._may_be_alone:
            return True
        key, _ = self._alone.popitem(last=False)
        if key in self._ram:
            self._alone[key] = None
        return False

    def _bound(self, keys: OrderedDict[ChunkKey, None]) -> None:
        while len(keys) > self._ram.room:
            keys.popitem(last=False)


# ---- shadows -------------------------------------------------------------------------------------

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
        self.every: list[Shadow] = []
        self.resize(room)

    def resize(self, room: int) -> None:
        """Set the live place's room, in chunks. The shadows start empty and keep their scores."""
        self.room, self.part = room, min(1.0, _MOST_ROOM_CHUNKS / max(1, room))
        before, size = self.every, max(_LEAST_ROOM_CHUNKS, int(room * self.part))
        self.every = [Shadow(size, setting) for setting in self.settings]
        for old, new in zip(before, self.every, strict=False):
            new.hits, new.saved, new.score = old.hits, old.saved, old.score

    def seeing(self, run: Sequence[ChunkKey], session: int) -> Steps[None]:
        """Serve a prompt in all shadows, in pieces. Then :attr:`now` says which setting to use."""
        passed = 0
        # A multiple of the golden ratio is evenly distributed, and always the same for one session.
        if self.part == 1 or session * 0.6180339887498949 % 1.0 < self.part:
            for each in self.every:
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
        scores = [each.score for each in self.every]
        if max(scores) > scores[self.now]:
            self.now = scores.index(max(scores))
        for each in self.every:
            each.score *= _FADE_FACTOR

    def over(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """Cool chunks of ``run``, which will not be asked for again, in pieces."""
        for each in self.every:
            for part in pieces(run):
                each.cool(part)
                yield 0.0


class Adaptive:
    """A maker of policies: RAM's first, then one for each tier. Used by one thread at a time,
    except the live orders. ``compute``: what hits save of the model."""

    def __init__(self, compute: SavedCompute = SavedCompute()) -> None:  # noqa: B008
        self.compute = compute
        self.places: list[tuple[Segments, Shadows]] = []
        """Live orders with their shadows. RAM's is the first."""

    def __call__(self, room: int) -> Segments:
        return self._adapting(Segments(room, adapts=True))

    def on_evict(self, room: int) -> Segments:
        """Make the order of a tier that is written when RAM drops a chunk."""
        return self._adapting(Exclusive(room, self.places[0][0]))

    def _adapting(self, live: Segments) -> Segments:
        self.places.append((live, Shadows(live.room, self.compute)))
        return live

    def following(
        self, run: Sequence[ChunkKey], session: int, lock: AbstractContextManager[object]
    ) -> Steps[None]:
        """Let each place take the setting that its shadows find best with this prompt, in pieces.
        The lock is taken for short when a setting changes, and not held otherwise."""
        for live, shadows in self.places:
            if shadows.room != live.room:
                shadows.resize(live.room)
            yield from shadows.seeing(run, session)
            setting = shadows.settings[shadows.now]
            if setting != live.setting:
                with lock:
                    live.settle(setting)
                left = True
                while left:
                    yield 0.0
                    with lock:
                        left = live.trim(PIECE_CHUNKS)

    def over(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """Cool chunks of ``run``, which will not be used again. In pieces, without the lock."""
        for _, shadows in self.places:
            yield from shadows.over(run)

    def counts(self) -> dict[str, int]:
        """Return the counts of RAM's shadows: the index of the setting in use (``policy_now``), the
        chunks that the shadows were asked for, how many of them each setting hit, and what those
        hits saved, in chunks at a prompt's beginning."""
        _, shadows = self.places[0]
        return {
            "policy_asked": shadows.asked,
            **{f"policy_hits_{each.setting.name}": int(each.hits) for each in shadows.every},
            **{f"policy_saved_{each.setting.name}": int(each.saved) for each in shadows.every},
            "policy_now": shadows.now,
        }

    def orders(self) -> Orders:
        return Orders(self, self, self.on_evict, self)


class Orders(NamedTuple):
    ram: PolicyOf = Segments
    lower: PolicyOf = Segments
    """Policy of each lower tier that is written when a chunk is saved."""
    on_evict: PolicyOf = Segments
    """Policy of each lower tier that is written when RAM drops a chunk."""
    adaptive: Adaptive | None = None
    """Maker of RAM's policy, if it adapts: it is told of each prompt."""
    keep: float = KEEP_PART
    """Part of each place that one owner may keep by hints."""


ALL_LRU = Orders()
