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
    """Chunks that each owner may have in one place. Used under the Store's lock.

    Args:
        share: the part of the place that one owner may have, above 0 and up to 1. None: no quotas.
        room: of the whole place, in chunks.
        count: how many chunks an owner has there.
    """

    def __init__(self, share: float | None, room: int, count: Callable[[int], int]) -> None:
        self._share, self._count = share, count
        self.whole = self._of(room)
        """Chunks of the whole place that one owner may have. None without quotas."""
        self.part = self.whole
        """Chunks of the Store's part of the place that one owner may have. None without quotas."""
        self._beyond: dict[int, None] = {}
        """Owners that have more than their quota of the part, as keys, and some that had."""

    def _of(self, room: int) -> int | None:
        return None if self._share is None else max(1, int(room * self._share))

    def resize(self, room: int, owners: Iterable[int]) -> None:
        """Set the Store's part of the place, in chunks. ``owners``: all that have some."""
        self.part = self._of(room)
        self._beyond.clear()
        for owner in owners:
            self.got(owner)

    def got(self, owner: int) -> None:
        if self.part is not None and owner != UNOWNED and self._count(owner) > self.part:
            self._beyond[owner] = None

    def spent(self, owner: int, beyond: int = 0) -> bool:
        """Return whether the owner has its quota of the whole place and ``beyond`` more: then only
        its own chunks leave for another one."""
        if self.whole is None or owner == UNOWNED:
            return False
        return self._count(owner) >= self.whole + beyond

    def giver(self, owner: int) -> int:
        """Return the owner whose chunk leaves for one more of this owner's, where there is no free
        room. 0 for the coldest chunk of all."""
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
        """Return the chunk that leaves for one more of this owner, where there is no free room.
        ``spent``: :meth:`spent` of it. ``coldest``: returns an owner's next to leave (0: all)."""
        giver = owner if spent else self.giver(owner)
        found = coldest(giver)
        if found is None and giver != owner:  # all that the giver has is in use
            found = coldest(UNOWNED)
        return found

    def left(self, owner: int, free: int) -> int:
        """Return the number of chunks that the owner gets before its own leave for them, with room
        for ``free``. Only where there are quotas."""
        assert self.part is not None and self.whole is not None
        count = self._count(owner)
        return max(self.part - count, min(free, self.whole - count))
