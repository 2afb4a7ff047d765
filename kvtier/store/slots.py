"""RamSlots: which of RAM's slots are free, and which have given their memory back. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class RamSlots:
    """For a Directory with so many slots. A slot that an entry has is in none of these lists."""

    __slots__ = ("_count", "_given", "_leaving", "free", "limit")

    def __init__(self, count: int) -> None:
        self._count = count
        self.limit = count
        """Slots that may be in use. They are fewer than all slots while another Store has the room
        of the rest."""
        self.free = list(range(count - 1, -1, -1))
        self._leaving: list[int] = []
        """Slots whose memory will be given back. They are not free before :meth:`gave_back`."""
        self._given: list[int] = []
        """Slots without memory."""

    def __len__(self) -> int:
        """How many no entry has."""
        return len(self.free) + len(self._leaving) + len(self._given)

    @property
    def unused(self) -> list[int]:
        """All that no entry has. It copies the lists."""
        return [*self.free, *self._leaving, *self._given]

    @property
    def occupied(self) -> int:
        """Slots that have memory, or may get memory at any time."""
        return self._count - len(self._given)

    @property
    def surplus(self) -> int:
        """Slots in use or free, less the slots that may be."""
        return self._count - len(self._leaving) - len(self._given) - self.limit

    def put_back(self, slots: Sequence[int]) -> None:
        """Entries have no use for these any more."""
        leaving = max(0, self.surplus)
        self._leaving += slots[:leaving]
        self.free += slots[leaving:]

    def withdraw(self) -> None:
        """One that is free leaves."""
        self._leaving.append(self.free.pop())

    def leaving(self, most: int) -> list[int]:
        """Up to ``most`` slots whose memory is not used any more and is to be given back.
        :meth:`gave_back` follows."""
        return self._leaving[-most:]

    def gave_back(self, slots: Sequence[int]) -> None:
        """The memory of these slots, which :meth:`leaving` named, is given back."""
        gone = set(slots)
        self._leaving = [slot for slot in self._leaving if slot not in gone]
        self._given += slots

    def next_given(self, most: int) -> list[int]:
        """Up to ``most`` slots that :meth:`refill` makes free next."""
        return self._given[: -most - 1 : -1] if most > 0 else []

    def refill(self) -> None:
        """As many of the slots that were given back become free again as may be in use."""
        while self.surplus < 0 and self._given:
            self.free.append(self._given.pop())
