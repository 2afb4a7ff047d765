"""The order in which chunks leave a place. Pure: only keys and their order. No sizes, no places, no
clock and no lock.

A policy (:class:`~kvtier.eviction.segments.Segments`) decides what leaves first. :class:`Owned` is
what places have: a policy's order, owners, and what is kept by hints. A pinned chunk stays known
and keeps what the policy remembers of it: the Directory passes it over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.kept import Kept, Released
from kvtier.eviction.segments import Segments

_MOST_OWNERS = 8192
"""Number of owners at which their shared number objects are collected anew."""
PolicyOf = Callable[[int], Segments]
"""Maker of a policy for a place with room for this many chunks. All chunks of a place have the same
size, so every quantity is counted in chunks."""


class Owned:
    """A policy's order in which every key has an owner (:mod:`kvtier.core.tenant`), and in which
    what is kept leaves after all else, whatever the policy is. The owner 0 means no owner.

    With ``split`` there is also an order for each owner, so that :meth:`coldest` and :meth:`count`
    can answer for one owner. That costs memory, so only places where owners have quotas use it. An
    owner's own order is LRU, because only all keys of a place together are enough to learn from."""

    def __init__(self, policy: Segments, split: bool, kept: Kept) -> None:
        self._all = policy
        self.kept = kept
        self._stays = kept.stays
        self._once: dict[int, int] = {}
        """Owner -> the same number, as one object for all its keys: saves 44 bytes a key."""
        self._split = split
        self._parts: defaultdict[int, Segments] = defaultdict(Segments)

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        if self._stays:
            for key in run:
                if key in self._stays:
                    self.kept.use(key)
            run = [key for key in run if key not in self._stays]
        if len(self._once) > _MOST_OWNERS:
            self._once.clear()
        self._all.add(run, self._once.setdefault(owner, owner) if owner else 0)
        if owner and self._split and run:
            self._parts[owner].add(run)

    def used(self, run: Sequence[ChunkKey]) -> None:
        self._all.used(run)
        if self._parts:
            self._order_parts(run)
        if self._stays:
            for key in reversed(run):
                if key in self._stays:
                    self.kept.use(key)

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        self._all.ordered(run)
        if self._parts:
            self._order_parts(run)

    def _order_parts(self, run: Sequence[ChunkKey]) -> None:
        for owner in {self._all.owner(key) for key in run} - {0}:
            self._parts[owner].ordered(run)

    def evicted(self, run: Sequence[ChunkKey]) -> None:
        if self._stays or self._parts:
            for key in run:
                self._leave(key)
        self._all.evicted(run)

    def discard(self, key: ChunkKey) -> None:
        self._leave(key)
        self._all.discard(key)

    def _leave(self, key: ChunkKey) -> None:
        if key in self._stays:
            self.kept.drop(key)
        elif self._parts and (owner := self._all.owner(key)):
            self._parts[owner].discard(key)
            if not self._parts[owner]:
                del self._parts[owner]

    def cool(self, run: Sequence[ChunkKey]) -> None:
        """Let the run leave before all others, its end first. It is kept no longer."""
        self._release([(key, self.kept.drop(key)) for key in run if key in self._stays])
        self._all.cool(run)
        if self._parts:
            for owner in {self._all.owner(key) for key in run} - {0}:
                self._parts[owner].cool(run)

    def keep(self, run: Sequence[ChunkKey], seconds: float, salt: str = "") -> None:
        """Let the run leave after all others until ``seconds`` after its last use, within the
        bounds of :class:`Kept`. ``salt``: of the client that keeps it."""
        known = [(key, self.owner(key)) for key in reversed(run) if key in self]
        for key, _ in known:
            self._leave(key)
            self._all.discard(key)
        self._release(self.kept.keep(known, seconds, salt))

    def keep_as(self, other: Owned, key: ChunkKey) -> None:
        """Keep this chunk as long as it is kept in the ``other`` order."""
        stay = other._stays.get(key)
        if stay is not None and key not in self._stays and key in self:
            owner = self.owner(key)
            self._leave(key)
            self._all.discard(key)
            self._release(self.kept.keep_one(key, stay._replace(owner=owner)))

    def tick(self, now: float) -> None:
        self._release(self.kept.tick(now))

    def resize(self, room: int) -> None:
        self._all.resize(room)
        self._release(self.kept.resize(room))

    def _release(self, released: Iterable[Released]) -> None:
        for key, owner in released:
            self.add((key,), owner)

    def owner(self, key: ChunkKey) -> int:
        stay = self._stays.get(key)
        return self._all.owner(key) if stay is None else stay.owner

    def count(self, owner: int) -> int:
        """Return the number of an owner's keys. Only where split."""
        return len(self._parts.get(owner, ())) + self.kept.count(owner)

    def has_seen(self, owner: int) -> bool:
        """Return whether the owner is remembered to have or have had a key here. Needs no lock."""
        return owner in self._once

    def owners(self) -> set[int]:
        """Return every owner of a key. Only where split."""
        return {*self._parts, *self.kept.owners()} - {0}

    def coldest(self, owner: int | None = None) -> ChunkKey | None:
        """Return the key to let go first: of all keys, or (only where split) of one owner's."""
        if owner is None:
            first = self._all.coldest()
            return next(iter(self.kept), None) if first is None else first
        return next(self.part(owner), None)

    def keeps(self, key: ChunkKey) -> bool:
        return self._all.keeps(key)

    def part(self, owner: int) -> Iterator[ChunkKey]:
        """Iterate over one owner's keys, coldest first. Only where split."""
        return chain(self._parts.get(owner, ()), self.kept.of(owner))

    def keys(self) -> Iterable[ChunkKey]:
        """Iterate over every key, in no order: the fastest way to copy them all."""
        return chain(self._all, self._stays)

    def __contains__(self, key: object) -> bool:
        return key in self._all or key in self._stays

    def __len__(self) -> int:
        return len(self._all) + len(self._stays)

    def __iter__(self) -> Iterator[ChunkKey]:
        return chain(self._all, self.kept)
