"""Quota: how many chunks of one place an owner may have. Pure.

An owner has at most its quota of the *whole* place, also while other Stores have a part of the
place (:mod:`kvtier.server.shares`). So an owner asks for room as long as it may use it, and a part
that shrinks breaks no quota. Owners of one Store also share what this Store has now: where there is
no free room, an owner that has its quota of this part makes room for its own chunks, and an owner
that has more than that makes room for others first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvtier.core.tenant import UNOWNED

Victim = TypeVar("Victim")


class Quota:
    """Used under the Store's lock.

    Args:
        share: the part of the place that one owner may have, above 0 and up to 1. None: no quotas.
        room: of the whole place, in chunks.
        count: how many chunks an owner has there.
    """

    __slots__ = ("_beyond", "_count", "_share", "part", "whole")

    def __init__(self, share: float | None, room: int, count: Callable[[int], int]) -> None:
        self._share, self._count = share, count
        self.whole = self._of(room)
        """Chunks of the whole place that an owner may have. None: there are no quotas."""
        self.part = self.whole
        """The same share of the Store's part of the place."""
        self._beyond: dict[int, None] = {}
        """Every owner that has more than its quota of the part, and some that had."""

    def _of(self, room: int) -> int | None:
        return None if self._share is None else max(1, int(room * self._share))

    def resize(self, room: int, owners: Iterable[int]) -> None:
        """``room``: chunks of the place that the Store has now. ``owners``: all that have some."""
        self.part = self._of(room)
        self._beyond.clear()
        for owner in owners:
            self.got(owner)

    def got(self, owner: int) -> None:
        if self.part is not None and owner != UNOWNED and self._count(owner) > self.part:
            self._beyond[owner] = None

    def spent(self, owner: int, beyond: int = 0) -> bool:
        """Whether the owner has its quota of the whole place and ``beyond`` more: only its own
        chunks leave for another one."""
        if self.whole is None or owner == UNOWNED:
            return False
        return self._count(owner) >= self.whole + beyond

    def giver(self, owner: int) -> int:
        """Whose chunk leaves for one more of this owner's, where there is no free room. 0: the
        coldest of all."""
        if self.part is None:
            return UNOWNED
        if owner != UNOWNED and self._count(owner) >= self.part:
            return owner
        for one in list(self._beyond):
            if self._count(one) > self.part:
                return one
            del self._beyond[one]
        return UNOWNED

    def victim(
        self, owner: int, spent: bool, coldest: Callable[[int], Victim | None]
    ) -> Victim | None:
        """The chunk that leaves for one more of this owner, where there is no free room. ``spent``:
        :meth:`spent` of it. ``coldest``: the next to leave of an owner's chunks, of all for 0."""
        giver = owner if spent else self.giver(owner)
        found = coldest(giver)
        if found is None and giver != owner:  # all that the giver has is in use
            found = coldest(UNOWNED)
        return found

    def left(self, owner: int, free: int) -> int:
        """Number of chunks that the owner gets before its own leave for them, with room for
        ``free``. Only where there are quotas."""
        assert self.part is not None and self.whole is not None
        count = self._count(owner)
        return max(self.part - count, min(free, self.whole - count))
