"""TierIndex: what one lower tier holds, is being given, and has yet to delete. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from kvtier.core.chunk import ChunkKey
from kvtier.core.tenant import UNOWNED, may
from kvtier.eviction.kept import KEEP_PART, Kept
from kvtier.eviction.order import Owned, PolicyOf
from kvtier.store.observer import Left, Observers
from kvtier.store.quota import Quota


class TierIndex:
    """Eviction order and capacity, in chunks, of one lower tier. ``share`` and ``keep``: see
    :class:`kvtier.store.directory.Directory`."""

    def __init__(
        self,
        place: int,
        capacity: int,
        policy: PolicyOf,
        share: float | None,
        observers: Observers,
        keep: float = KEEP_PART,
    ) -> None:
        self.place, self._observers = place, observers
        self.shared = False
        """Whether others write to the tier too. Set once, before the tier is used."""
        self.capacity = capacity
        self.order = Owned(policy(capacity), share is not None, Kept(capacity, keep, share))
        self.quota = Quota(share, capacity, self._count)
        self.writing: dict[ChunkKey, int] = {}
        """Chunks being written, with their owners. They count against the capacity already."""
        self.leaving: set[ChunkKey] = set()
        """Chunks that the tier has yet to delete. Until then they are not written again."""

    def __len__(self) -> int:
        return len(self.order) + len(self.writing)

    def takes(self, key: ChunkKey) -> bool:
        """Return whether the tier neither holds, writes nor deletes the chunk, and may get it."""
        return not (key in self.order or key in self.writing or key in self.leaving)

    def held_first(self, keys: Sequence[ChunkKey]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.order), len(keys))

    def may_drop(self, key: ChunkKey, owner: int | None) -> bool:
        """Return whether ``owner`` may drop this chunk of the tier."""
        return may(owner, self.order.owner(key), shared=self.shared)

    def unowned(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Return the chunks of ``keys`` that the tier holds and whose owner is not known here."""
        return [key for key in keys if key in self.order and self.order.owner(key) == UNOWNED]

    def hold(self, key: ChunkKey, owner: int = 0) -> None:
        for tell in self._observers.came:
            tell(self.place, key)
        self.order.add((key,), owner)
        self.quota.got(owner)

    def lost(self, key: ChunkKey, how: Left = Left.EVICTED) -> None:
        """Note that the tier does not hold the chunk, so nothing has to be deleted. Not for a tier
        that cannot be asked now: its chunks must stay known, or no
        :meth:`kvtier.store.directory.Directory.invalidate` reaches them."""
        if key in self.order:
            self._drop(key, how)
        else:
            for tell in self._observers.missing:
                tell(key, how)

    def leave(self, key: ChunkKey) -> None:
        if key in self.order:
            self._drop(key, Left.FORGOTTEN)
        self.leaving.add(key)

    def _drop(self, key: ChunkKey, how: Left) -> None:
        for tell in self._observers.left:
            tell(self.place, key, how)
        self.order.discard(key)

    def evict(self, key: ChunkKey) -> None:
        """Let the chunk leave to make room. It may come back."""
        for tell in self._observers.left:
            tell(self.place, key, Left.EVICTED)
        self.order.evicted((key,))
        self.leaving.add(key)

    def leave_all(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Let ``keys`` go, known here or not. Returns those that the tier must delete before it
        calls :meth:`deleted`: neither being written nor deleted already."""
        going = [key for key in keys if key not in self.writing and key not in self.leaving]
        for key in going:
            self.leave(key)
        return going

    def deleted(self, keys: Iterable[ChunkKey]) -> None:
        self.leaving.difference_update(keys)

    def make_room(self, owner: int) -> list[ChunkKey] | None:
        """Evict for one more chunk of ``owner``. Returns the keys that leave, None if none can."""
        spent = self.quota.spent(owner)
        if not spent and len(self) < self.capacity:
            return []
        victim = self.quota.victim(owner, spent, lambda giver: self.order.coldest(giver or None))
        if victim is None:
            return None
        self.evict(victim)
        return [victim]

    def limit(self, capacity: int, most: int) -> list[ChunkKey]:
        """Set the capacity, in chunks. Evicts and returns up to ``most`` chunks beyond it."""
        self.capacity = capacity
        self.quota.resize(capacity, self.order.owners())
        self.order.resize(capacity)
        return self._over(most)

    def found(self, keys: Sequence[ChunkKey], owners: Iterable[int] = repeat(0)) -> list[ChunkKey]:
        """Add ``keys``, coldest first, which the tier turned out to hold, with these owners. All of
        them become hotter than the chunks known before. Returns what :meth:`shrink` does."""
        grown = set[int]()
        for key, owner in zip(keys, owners, strict=False):
            if self.takes(key):
                self.hold(key, owner)
                grown.add(owner)
        return self.shrink(grown)

    def shrink(self, owners: Iterable[int]) -> list[ChunkKey]:
        """Evict, and return, chunks beyond the tier's capacity, or beyond the quota of one of
        ``owners``. Each group leaves coldest first."""
        surplus: list[ChunkKey] = []
        for owner in owners:
            while self.quota.spent(owner, 1) and (victim := self.order.coldest(owner)) is not None:
                self.evict(victim)
                surplus.append(victim)
        return surplus + self._over()

    def _over(self, most: int | None = None) -> list[ChunkKey]:
        surplus: list[ChunkKey] = []
        while (
            len(surplus) != most
            and len(self) > self.capacity
            and (victim := self.order.coldest()) is not None
        ):
            self.evict(victim)
            surplus.append(victim)
        return surplus

    def _count(self, owner: int) -> int:
        return self.order.count(owner) + sum(whose == owner for whose in self.writing.values())
