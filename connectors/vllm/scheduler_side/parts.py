"""Parts in which one load comes, from the first claim to the end. Pure: no store, no clock, no
vLLM.

Parts are consecutive pieces of a run. Each is read into slots, copied into blocks by all ranks, and
let go. Several may be under way. What counts in the end is :attr:`InParts.kept`: the leading pieces
that every rank has confirmed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    READING = "reading"
    COPYING = "copying"
    """Stage of a part that is in slots, verified, until all ranks have copied it."""
    COPIED = "copied"
    FAILED = "failed"


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
    """A load of ``pieces`` pieces, which can only become shorter. Methods that make it shorter
    return the parts that are not wanted any more: their claims are to be given back at once."""

    def __init__(self, pieces: int) -> None:
        self.end = pieces
        """Number of pieces that are loaded if nothing fails from now on."""
        self.kept = 0
        """Number of leading pieces that all ranks have."""
        self._claimed = 0
        self._parts = deque[Part]()

    def claim(self, most: int) -> Part | None:
        """Begin to read the next part, of ``most`` pieces at most. None if nothing is left to
        read."""
        size = min(most, self.end - self._claimed)
        if size <= 0:
            return None
        part = Part(self._claimed, self._claimed + size)
        self._claimed = part.end
        self._parts.append(part)
        return part

    @property
    def reading(self) -> Part | None:
        return next((part for part in self._parts if part.stage is Stage.READING), None)

    @property
    def is_over(self) -> bool:
        return self.kept == self.end and not self._parts

    def arrived(self, part: Part, ready: int) -> list[Part]:
        """End the read of a part with its first ``ready`` pieces, which are copied next. If they
        are not all, the load ends with them."""
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
        """End a part's copy, which every rank has reported. A failed one cuts the load before."""
        assert part.stage is Stage.COPYING
        part.stage = Stage.COPIED if well else Stage.FAILED
        dropped = [] if well else self._end_at(part.begin)
        while self._parts and self._parts[0].stage in (Stage.COPIED, Stage.FAILED):
            first = self._parts.popleft()
            if first.stage is Stage.COPIED and first.end <= self.end:
                self.kept = first.end
        return dropped

    def cut(self) -> list[Part]:
        """End the load with what has arrived."""
        first = self.reading
        return self._end_at(self._claimed if first is None else first.begin)

    def _end_at(self, end: int) -> list[Part]:
        self.end = min(self.end, end)
        dropped = [part for part in self._parts if part.stage is Stage.READING]
        self._parts = deque(part for part in self._parts if part.stage is not Stage.READING)
        return dropped
