"""The parts in which one load comes, from the first claim to the end. Pure: no store, no clock, no
vLLM.

Parts are consecutive pieces of a run. Each is read into slots, copied into blocks by all ranks, and
let go. Several may be under way. What counts in the end is :attr:`InParts.kept`: the leading pieces
that every rank has confirmed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    READING = "reading"
    """It is on its way into slots."""
    COPYING = "copying"
    """All of it is in slots, verified, and ranks copy it. Its slots stay until all have said so."""
    COPIED = "copied"
    """Every rank has all of it."""
    FAILED = "failed"
    """Some rank could not copy it."""


@dataclass(slots=True, eq=False)
class Part:
    """Pieces ``[begin, end)`` of the run."""

    begin: int
    end: int
    stage: Stage = Stage.READING

    @property
    def size(self) -> int:
        return self.end - self.begin


class InParts:
    """A load of so many ``pieces``. It can only become shorter. Methods that make it shorter return
    the parts that are not wanted any more: their claims are to be given back at once."""

    def __init__(self, pieces: int) -> None:
        self.end = pieces
        """How many pieces are loaded if nothing fails from now on."""
        self.kept = 0
        """How many leading pieces all ranks have."""
        self._claimed = 0
        self._parts = deque[Part]()

    def claim(self, most: int) -> Part | None:
        """The next part, of at most so many pieces, is being read from now on. None: there is
        nothing left to read."""
        size = min(most, self.end - self._claimed)
        if size <= 0:
            return None
        part = Part(self._claimed, self._claimed + size)
        self._claimed = part.end
        self._parts.append(part)
        return part

    @property
    def reading(self) -> Part | None:
        """The first part that has not arrived."""
        return next((part for part in self._parts if part.stage is Stage.READING), None)

    @property
    def is_over(self) -> bool:
        """No rank copies, and nothing more comes."""
        return self.kept == self.end and not self._parts

    def arrived(self, part: Part, ready: int) -> list[Part]:
        """All that will come of the first part that is being read are its first ``ready`` pieces.
        They are copied next. If they are not all, the load ends with them."""
        assert part is self.reading
        assert 0 <= ready <= part.size
        whole = ready == part.size
        part.end = part.begin + ready
        part.stage = Stage.COPYING
        if whole:
            return []
        if not ready:
            self._parts.remove(part)
        return self._end_at(part.end)

    def copied(self, part: Part, *, well: bool) -> list[Part]:
        """Every rank has reported the copy of this part. Where it failed the load ends before
        it."""
        assert part.stage is Stage.COPYING
        part.stage = Stage.COPIED if well else Stage.FAILED
        dropped = [] if well else self._end_at(part.begin)
        while self._parts and self._parts[0].stage in (Stage.COPIED, Stage.FAILED):
            first = self._parts.popleft()
            if first.stage is Stage.COPIED and first.end <= self.end:
                self.kept = first.end
        return dropped

    def cut(self) -> list[Part]:
        """Nothing more is read: the load ends with what has arrived."""
        first = self.reading
        return self._end_at(self._claimed if first is None else first.begin)

    def _end_at(self, end: int) -> list[Part]:
        self.end = min(self.end, end)
        dropped = [part for part in self._parts if part.stage is Stage.READING]
        self._parts = deque(part for part in self._parts if part.stage is not Stage.READING)
        return dropped
