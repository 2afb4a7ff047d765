"""Room: what one Store has of a place whose bytes several Stores share
(:mod:`kvtier.server.balance`). Pure."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    unit: int
    """Bytes of one chunk there."""
    fixed: int
    """Bytes that are taken even without any chunk."""
    most: int
    """Chunks that it could hold if it had the whole place."""
    limit: int
    """Chunks that it may hold now."""
    used: int
    """Chunks that it holds or is being given."""
    occupied: int
    """Chunks whose bytes no other Store can have now."""
    wanted: int
    """Chunks since the start for which no room was free."""
    coldest: int | None
    """The turn of the last use of the chunk that would leave next. None: no chunk can leave, or the
    turn is not known."""

    @property
    def taken(self) -> int:
        """Bytes that no other Store can have now."""
        return self.fixed + self.unit * self.occupied
