"""Layerwise: chunks that come up from a lower tier part by part, all first parts before any second one.

A slot holds a chunk layer by layer, so with every first part the first layers of a whole prompt are there: an engine
with nothing else to do begins to compute with them while the rest is read, and the shorter of the two times is hidden.
(The "layer-wise pre-loading" of Gao et al., *CachedAttention*, USENIX ATC 2024, from host to GPU; here it begins at the
disk.)

What a part holds is not verified before the last one is there. So the engine's workers are told, in the pool itself
(``Pool.arrivals``, one word a slot), which parts of which filling have come, and at the end whether all was right; an
answer that was computed from a chunk that is not confirmed is thrown away by who computed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import EllipsisType

from kvtier.core.errors import TierError
from kvtier.core.pool import Pool
from kvtier.store.directory import Entry
from kvtier.store.timed_tier import TimedTier

CONFIRMED, BROKEN = 0xFF, 0xFE
MOST_PARTS = 8
_LEAST_PART_BYTES = 512 * 1024
"""A read costs its call and a look at the index; from this size on that is little beside the transfer."""
_SHIFT = 8
_LOOK_S = 0.0001


def told(pool: Pool, slot: int) -> tuple[int, int]:
    """``(filling, parts)`` of a slot: how many parts of that filling have come, or CONFIRMED, or BROKEN."""
    word = pool.arrivals[slot]
    return word >> _SHIFT, word & (1 << _SHIFT) - 1


def await_parts(pool: Pool, slot: int, filling: int, parts: int, until: float) -> None:
    """Return when ``parts`` parts of the filling are in the slot (CONFIRMED: when all of it is, verified).

    Looks every 0.1 ms: what it waits for is another process's. Raises TierError when the filling failed, when the slot
    has gone to another, or at ``until`` (monotonic seconds).
    """
    while True:
        number, come = told(pool, slot)
        if number > filling or (number == filling and come == BROKEN):
            raise TierError("a chunk on its way from a lower tier turned out to be bad, or was given up")
        if number == filling and come >= parts:
            return
        if time.monotonic() >= until:
            raise TierError("a chunk on its way from a lower tier did not come in time")
        time.sleep(_LOOK_S)


class Filling:
    """One entry that is being filled part by part."""

    __slots__ = ("active", "away", "broken", "come", "entry", "given_up", "left", "number", "unwanted")

    def __init__(self, entry: Entry, number: int, parts: int) -> None:
        self.entry = entry
        self.number = number
        self.left = parts
        """Reads that have not ended."""
        self.active = 0
        """Reads under way: something writes into the slot."""
        self.come = [False] * parts
        self.broken = self.away = self.unwanted = self.given_up = False


class Layerwise:
    """Promotions of one claim from one tier.

    Args:
        lock: guards the fillings.
        tier: where they come from; its tier is a :class:`~kvtier.tiers.base.PartReader`.
        cuts: where parts end, bytes of a slot, whole pages, the last at its end.
        ended: told, on a lane thread without the lock, the entry and how its read went: True, False or None as the
            tier said; ``...`` when it was not asked (nobody waits for it, or the lane refused).
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        pool: Pool,
        tier: TimedTier,
        cuts: Sequence[int],
        ended: Callable[[Entry, bool | EllipsisType | None], None],
    ) -> None:
        self._lock, self._pool, self._tier, self._ended = lock, pool, tier, ended
        self._spans = list(zip((0, *cuts), cuts, strict=False))
        self._fillings: dict[Entry, Filling] = {}

    def fill(self, entries: Sequence[Entry], numbers: Sequence[int]) -> None:
        """Queue all reads, those of all first parts first. ``numbers``: of the fillings, never used before."""
        fillings = [Filling(entry, number, len(self._spans)) for entry, number in zip(entries, numbers, strict=True)]
        with self._lock:
            for filling in fillings:
                self._fillings[filling.entry] = filling
                self._tell(filling, 0)
        for part in range(len(self._spans)):
            for filling in fillings:
                if not self._tier.submit(partial(self._read, filling, part), 1 / len(self._spans)):
                    with self._lock:
                        filling.unwanted = True
                        filling.active += 1
                    self._end(filling, part, come=False)

    def give_up(self, entry: Entry) -> bool:
        """Under the lock: nobody waits for the entry. False when something writes into its slot, or is about to see
        whether all is right; else nothing ever will again."""
        filling = self._fillings.get(entry)
        if filling is None or filling.active or not filling.left:
            return False
        filling.given_up = True
        self._tell(filling, BROKEN)
        return True

    def _read(self, filling: Filling, part: int) -> None:
        """On a lane thread. What nobody waits for any more is not read."""
        with self._lock:
            if filling.given_up:
                return
            filling.active += 1
            filling.unwanted |= not filling.entry.pins
            wanted = not (filling.unwanted or filling.broken)
        come: bool | None = wanted and self._part(filling.entry, *self._spans[part])
        with self._lock:
            filling.broken |= wanted and not come
            filling.away |= come is None
        self._end(filling, part, come=bool(come))

    def _part(self, entry: Entry, begin: int, end: int) -> bool | None:
        return self._tier.read_part(entry.key, self._pool.view(entry.slot), begin, end)

    def _end(self, filling: Filling, part: int, *, come: bool) -> None:
        """A read ended. The slot stays the entry's until the last one has: then nothing writes into it any more."""
        with self._lock:
            filling.active -= 1
            if filling.given_up:
                return
            filling.left -= 1
            filling.come[part] = come
            whole, last = filling.come.index(False) if not all(filling.come) else len(filling.come), not filling.left
            if not last and come:
                self._tell(filling, whole)
        if last:
            self._finish(filling, whole == len(filling.come))

    def _finish(self, filling: Filling, whole: bool) -> None:
        """Told before the entry's end: after that the slot may be another's."""
        right = whole and self._tier.verify(filling.entry.key, self._pool.view(filling.entry.slot))
        self._tell(filling, CONFIRMED if right else BROKEN)
        if whole or filling.broken:
            self._ended(filling.entry, None if filling.away else right)
        else:
            self._ended(filling.entry, ...)

    def _tell(self, filling: Filling, parts: int) -> None:
        self._pool.arrivals[filling.entry.slot] = filling.number << _SHIFT | parts


def cut(ends: Sequence[int], page: int, whole: int, most: int = MOST_PARTS) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where to cut a slot of ``whole`` bytes whose layers end at ``ends``: ``(bytes, layers)``, for each part where it
    ends, rounded up to ``page``, and how many layers are whole with it. At most ``most`` parts of about equal size."""
    size = max(_LEAST_PART_BYTES, -(-whole // most))
    at: list[int] = []
    layers: list[int] = []
    for number, end in enumerate(ends, start=1):
        rounded = -(-end // page) * page
        if end >= (at[-1] if at else 0) + size and rounded < whole:
            at.append(rounded)
            layers.append(number)
    return (*at, whole), (*layers, len(ends))
