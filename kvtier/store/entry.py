"""Entry: one stay of a chunk in RAM, and its states. Data: only the Directory changes it."""

from __future__ import annotations

from enum import Enum

from kvtier.core.chunk import ChunkKey


class State(Enum):
    FILLING = "filling"
    READY = "ready"
    GONE = "gone"


FILLING, READY, GONE = State.FILLING, State.READY, State.GONE


class Entry:
    """One stay of one chunk in one slot. Only the Directory changes its fields."""

    __slots__ = ("copies", "key", "offered", "origin", "owner", "pins", "slot", "state", "writes")

    def __init__(self, key: ChunkKey, slot: int, origin: int | None, owner: int) -> None:
        self.key = key
        self.owner = owner
        self.slot = slot
        self.state = FILLING
        self.pins = self.writes = 0
        """Holders that need the slot unchanged, and how many of them only write it to a lower
        tier."""
        self.origin = origin
        """The tier from which it is promoted, or None when an engine fills it. A promotion is
        FILLING for a bounded time."""
        self.offered = origin is not None
        """A lower tier holds it, or the tiers that write on eviction were asked to take it."""
        self.copies = 0
        """The tiers, as bits, that wrote their copy from this slot or filled it: they have exactly
        these bytes."""
