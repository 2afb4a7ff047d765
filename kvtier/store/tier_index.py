"""TierIndex: what one lower tier holds, is being given, and has yet to delete. Pure, as its
Directory is."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.core.chunk import ChunkKey
from kvtier.store.changes import Changes
from kvtier.store.eviction import Owned, PolicyOf


def quota_of(room: int, share: float | None) -> int | None:
    """The part of ``room`` chunks that one owner may have; None: all."""
    return None if share is None else max(1, int(room * share))


class TierIndex:
    """An order of leaving and a capacity in chunks; ``share``: see
    :class:`kvtier.store.directory.Directory`."""

    __slots__ = ("_share", "capacity", "changes", "leaving", "order", "place", "quota", "writing")

    def __init__(self, place: int, capacity: int, policy: PolicyOf, share: float | None) -> None:
        self.place = place
        self.changes: Changes | None = None
        """Where every change of what the tier holds is noted. None: nobody asks."""
        self.capacity = capacity
        self._share = share
        self.order = Owned(policy(capacity), share is not None)
        self.quota = quota_of(capacity, share)
        self.writing: dict[ChunkKey, int] = {}
        """Being written now, and whose; counted against the capacity, not yet held."""
        self.leaving: set[ChunkKey] = set()
        """No longer held; the tier has yet to delete them. Not written again before that."""

    def __len__(self) -> int:
        return len(self.order) + len(self.writing)

    def takes(self, key: ChunkKey) -> bool:
        """It neither holds the chunk nor is being given it nor has yet to delete it."""
        return not (key in self.order or key in self.writing or key in self.leaving)

    def hold(self, key: ChunkKey, owner: int = 0) -> None:
        """The tier has the chunk."""
        if self.changes is not None:
            self.changes.note(self.place, key, there=True)
        self.order.add(key, owner)

    def lose(self, key: ChunkKey) -> None:
        """The tier does not have the chunk, and nothing has to be deleted."""
        if self.changes is not None and key in self.order:
            self.changes.note(self.place, key, there=False)
        self.order.discard(key)

    def leave(self, key: ChunkKey) -> None:
        """It is unwanted."""
        self.lose(key)
        self.leaving.add(key)

    def evict(self, key: ChunkKey) -> None:
        """It goes for room, and may come back."""
        if self.changes is not None:
            self.changes.note(self.place, key, there=False)
        self.order.evicted(key)
        self.leaving.add(key)

    def leave_all(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Those of ``keys``, known or not, that the tier must delete now: it neither writes nor
        deletes them."""
        going = [key for key in keys if key not in self.writing and key not in self.leaving]
        for key in going:
            self.leave(key)
        return going

    def make_room(self, owner: int) -> list[ChunkKey] | None:
        """Room for one more chunk of ``owner``: which chunks leave for it; None when there is none
        to be had."""
        spent = self._is_spent(owner)
        if not spent and len(self) < self.capacity:
            return []
        victim = self.order.coldest(owner if spent else None)
        if victim is None:
            return None
        self.evict(victim)
        return [victim]

    def limit(self, capacity: int, most: int) -> list[ChunkKey]:
        """Hold at most ``capacity`` from now on; up to ``most`` chunks that leave for that, coldest
        first."""
        self.capacity, self.quota = capacity, quota_of(capacity, self._share)
        self.order.resize(capacity)
        surplus: list[ChunkKey] = []
        while (
            len(surplus) < most
            and len(self) > capacity
            and (victim := self.order.coldest()) is not None
        ):
            self.evict(victim)
            surplus.append(victim)
        return surplus

    def shrink(self, owners: Iterable[int]) -> list[ChunkKey]:
        """What leaves because it holds more than its capacity, or of one of ``owners`` more than
        the quota; of each the coldest first."""
        surplus: list[ChunkKey] = []
        for owner in owners:
            while self._is_spent(owner, 1) and (victim := self.order.coldest(owner)) is not None:
                self.evict(victim)
                surplus.append(victim)
        while len(self) > self.capacity and (victim := self.order.coldest()) is not None:
            self.evict(victim)
            surplus.append(victim)
        return surplus

    def _is_spent(self, owner: int, beyond: int = 0) -> bool:
        """The owner has used up its quota, and so many chunks more."""
        if self.quota is None or not owner:
            return False
        count = self.order.count(owner) + sum(whose == owner for whose in self.writing.values())
        return count >= self.quota + beyond
