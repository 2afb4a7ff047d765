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
        """Pins on the slot, and how many of them belong to writes to a lower tier."""
        self.origin = origin
        """Index of the tier from which the chunk is promoted, or None when an engine fills it. A
        promotion is FILLING for a bounded time."""
        self.offered = origin is not None
        """Whether a lower tier holds it, or tiers that write on eviction were asked to."""
        self.copies = 0
        """Tiers, as bits, that have exactly these bytes: they wrote them from this slot, or filled
        it."""
