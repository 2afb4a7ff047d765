"""RamSlots: which of RAM's slots are free, and which have given their memory back. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class RamSlots:
    """Slots that no entry has, in three lists: free, leaving, given back."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.limit = count
        """Most slots that may be in use. The rest are another Store's room for now."""
        self.free = list(range(count - 1, -1, -1))
        self._leaving: list[int] = []
        """Slots whose memory will be given back. They are not free before :meth:`gave_back`."""
        self._given: list[int] = []

    def __len__(self) -> int:
        """Number of slots that no entry has."""
        return len(self.free) + len(self._leaving) + len(self._given)

    @property
    def unused(self) -> list[int]:
        """A copy of all three lists."""
        return [*self.free, *self._leaving, *self._given]

    @property
    def occupied(self) -> int:
        """Number of slots that have memory, or may get memory at any time."""
        return self._count - len(self._given)

    @property
    def surplus(self) -> int:
        """Number of slots in use or free beyond :attr:`limit`."""
        return self._count - len(self._leaving) - len(self._given) - self.limit

    def put_back(self, slots: Sequence[int]) -> None:
        leaving = max(0, self.surplus)
        self._leaving += slots[:leaving]
        self.free += slots[leaving:]

    def withdraw(self) -> None:
        self._leaving.append(self.free.pop())

    def leaving(self, most: int) -> list[int]:
        """Return up to ``most`` slots whose memory is to be given back before :meth:`gave_back`."""
        return self._leaving[-most:]

    def gave_back(self, slots: Sequence[int]) -> None:
        gone = set(slots)
        self._leaving = [slot for slot in self._leaving if slot not in gone]
        self._given += slots

    def next_given(self, most: int) -> list[int]:
        """Return up to ``most`` slots that :meth:`refill` makes free next."""
        return self._given[: -most - 1 : -1] if most > 0 else []

    def refill(self) -> None:
        """Free slots that were given back, as many as may be in use."""
        while self.surplus < 0 and self._given:
            self.free.append(self._given.pop())
