"""Exclusive: the order of a tier that is written when RAM drops a chunk. Copies of what RAM keeps
leave it early, so that RAM and the tier together hold more different chunks. Pure.

What RAM keeps for long has come back from below, so nearly all of it is there twice. Where RAM is
LRU it is not: most of its chunks have not left it yet. A tier that drops what went up, and gets it
again when it leaves, is an exclusive cache (Wong and Wilkes, *My cache or yours? Making storage
more exclusive*, USENIX 2002). That costs a write for each chunk that comes down again, so only a
part of the writes may go into it. And a chunk may be lost on its way down, where writes are late or
not allowed. So how many may be in RAM alone is learnt from what becomes of them, as a sender learns
a network's room (Jacobson, *Congestion avoidance and control*, SIGCOMM 1988).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.segments import Segments

_PART = 0.25
"""Copies that may leave early for one chunk that is written."""
_PAUSE, _LONGEST_PAUSE = 400.0, 8_000.0
"""Copies more that stay for each chunk that was lost, and at most. A prompt's run is cut there,
which costs more than the room of many copies is worth."""
_FIRST_PART = 8
"""At first one of so many chunks in RAM may be there alone."""


class Exclusive(Segments):
    """A :class:`kvtier.eviction.order.Policy`. ``ram`` is the order of the RAM above it, which the
    same lock guards."""

    __slots__ = ("_alone", "_may_be_alone", "_may_leave", "_ram", "_twice")

    def __init__(self, room: int, ram: Segments) -> None:
        super().__init__(room)
        self._ram = ram
        self._twice: OrderedDict[ChunkKey, None] = OrderedDict()
        """Chunks that RAM kept when their prompt was stored, the latest last."""
        self._alone: OrderedDict[ChunkKey, None] = OrderedDict()
        """Chunks whose copy left early, and that were not written again yet."""
        self._may_be_alone = ram.room / _FIRST_PART
        self._may_leave = 0.0
        """Copies that may leave early for what was written."""
        ram.evicts.append(self._left_ram)

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        super().add(run, owner)
        self._may_leave += _PART * len(run)
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
        # The hottest of RAM leave first here: it will be longest until they are written again.
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
                self._may_leave = max(min(self._may_leave, 0.0) - _PAUSE, -_LONGEST_PAUSE)

    def _has_room_for_one_more(self) -> bool:
        """Whether one more chunk may be in RAM alone. If not, one of those is looked at, which may
        have been forgotten there."""
        if len(self._alone) < self._may_be_alone:
            return True
        key, _ = self._alone.popitem(last=False)
        if key in self._ram:
            self._alone[key] = None
        return False

    def _bound(self, keys: OrderedDict[ChunkKey, None]) -> None:
        while len(keys) > self._ram.room:
            keys.popitem(last=False)
