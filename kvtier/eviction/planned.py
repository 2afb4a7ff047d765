"""Planned: RAM's live order. It is that of Segments, behind the chunks that a plan names. Pure.

The plan is made elsewhere, without the lock: :mod:`kvtier.eviction.shadows` says which chunks an
order that learns would not hold. Segments are told everything all the while. So where the plan
runs dry, or ends, its order is as good as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.segments import Segments


class Planned(Segments):
    """A :class:`kvtier.eviction.order.Policy`. It begins without a plan, as LRU."""

    __slots__ = ("_first", "evicts")

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._first: OrderedDict[ChunkKey, None] = OrderedDict()
        """Chunks that leave first, in this order. All of them are held."""
        self.evicts: list[Callable[[Sequence[ChunkKey]], object]] = []
        """Called with what leaves to make room."""

    def leave_first(self, run: Sequence[ChunkKey]) -> None:
        """These leave before all others, behind those that were named before. Unknown keys are
        ignored. A use or a save of one takes it out of the plan."""
        self._first.update(dict.fromkeys(key for key in run if key in self))

    def keeps(self, key: ChunkKey) -> bool:
        return key in self._again and key not in self._first

    @property
    def leaving(self) -> int:
        """How many are to leave first."""
        return len(self._first)

    def end_plan(self) -> None:
        """The order is that of Segments again."""
        self._first = OrderedDict()

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        if self._first:
            self._stay(run)
        super().add(run, owner)

    def used(self, run: Sequence[ChunkKey]) -> None:
        if self._first:
            self._stay(run)
        super().used(run)

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        if self._first:
            self._stay(run)
        super().ordered(run)

    def _stay(self, run: Sequence[ChunkKey]) -> None:
        first = self._first
        for key in run:
            if key in first:
                del first[key]

    def cool(self, run: Sequence[ChunkKey]) -> None:
        has_plan = bool(self._first)
        super().cool(run)  # which takes them out of the plan
        if has_plan:
            for key in run:
                if key in self:
                    self._first[key] = None
                    self._first.move_to_end(key, last=False)

    def coldest(self) -> ChunkKey | None:
        for key in self._first:
            return key
        return super().coldest()

    def evicted(self, run: Sequence[ChunkKey]) -> None:
        if self._first:
            self._stay(run)
        super().evicted(run)
        for tell in self.evicts:
            tell(run)

    def _drop(self, key: ChunkKey) -> None:
        if self._first:
            self._first.pop(key, None)
        super()._drop(key)

    def __iter__(self) -> Iterator[ChunkKey]:
        first = self._first
        if not first:
            return super().__iter__()
        others = super().__iter__()
        return chain(first, (key for key in others if key not in first))
