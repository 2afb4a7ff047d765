"""Ages: the turn of each chunk's last use, so that Stores that share one budget can compare their
coldest chunks. Pure.

Ages are kept for a sample of the chunks, which the keys decide (spatial sampling: Waldspurger et
al., *SHARDS*, FAST 2015), and only while turns are counted. A Store alone pays one comparison a
run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.store.observer import Observer

_AHEAD_CHUNKS = 512
"""Most chunks looked through for one of the sample, within 0.1 ms under the Store's lock."""
_WHOLE_CHUNKS = 1024
_LEAST_PARTS = 64
_USED_CHUNKS = 65_536


class Room(NamedTuple):
    """One Store's part of a place that several Stores share (:mod:`kvtier.server.shares`)."""

    unit: int
    """Bytes of one chunk there."""
    fixed: int
    """Bytes that are taken even without any chunk."""
    most: int
    """Chunks that the Store could hold if it had the whole place."""
    limit: int
    """Chunks that the Store may hold now."""
    used: int
    """Chunks that the Store holds or is being given."""
    occupied: int
    """Chunks whose bytes no other Store can have now."""
    wanted: int
    """Chunks since the start for which no room was free."""
    coldest: int | None
    """Turn of the last use of the chunk that would leave next. None if none can, or unknown."""

    @property
    def taken(self) -> int:
        """Bytes that no other Store can have now."""
        return self.fixed + self.unit * self.occupied


class Ages(Observer):
    """Last uses in a Directory with room for ``chunks`` chunks. Under the Store's lock."""

    def __init__(self, chunks: int) -> None:
        part = min(_LEAST_PARTS, -(-chunks // _WHOLE_CHUNKS))
        self._mask = (1 << (part - 1).bit_length()) - 1
        """Bits that are all 0 in the first byte of a key of the sample."""
        self._used: OrderedDict[ChunkKey, int] = OrderedDict()
        self._turn = self._floor = 0

    def begin(self, turn: int) -> None:
        """Begin a turn, to which uses count from now on. 0 stops counting. Chunks that were there
        when counting began count as used then."""
        if not turn:
            self._used.clear()
        elif not self._turn:
            self._floor = turn
        self._turn = turn

    def used(self, run: Sequence[ChunkKey]) -> None:
        if not self._turn:
            return
        used, mask = self._used, self._mask
        for key in run:
            if not key[0] & mask:
                used[key] = self._turn
                used.move_to_end(key)
        while len(used) > _USED_CHUNKS:
            self._floor = used.popitem(last=False)[1]

    stored = used

    def coldest(self, order: Iterable[ChunkKey]) -> int | None:
        """Return the turn of the last use of the chunk that leaves first in this order, estimated
        from the sample. None if no chunk can leave, or none near is in the sample."""
        if not self._turn:
            return None
        near = islice(order, _AHEAD_CHUNKS)
        return next(
            (self._used.get(key, self._floor) for key in near if not key[0] & self._mask), None
        )
