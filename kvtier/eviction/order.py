"""The order in which chunks leave a place. Pure: only keys and their order. No sizes, no places, no
clock and no lock.

A :class:`Policy` decides what leaves first. :class:`Owned` is what places have: a policy's order,
owners, and what is kept by hints.

The order is leaf-first. Policies get that for free, because they move a run from its end to its
beginning: the root is always the most recently used chunk of its run.

A policy is told two differences that are easily missed. A prompt asked for a chunk (``used``), or
the chunk was only stored or let go (``ordered``). A chunk left to make room and may come back
(``evicted``), or it is unwanted (``discard``). A pinned chunk stays known and keeps what the policy
remembers of it: the Directory passes it over.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.kept import Kept, Released

_MOST_OWNERS = 8192
"""Number of owners at which their shared number objects are collected anew."""


class Policy(Protocol):
    """Order in which keys leave. Not thread-safe: the owner's lock guards it."""

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        """Add chunks of ``run``, which are held from now on, or still. Each becomes the hottest of
        its kind, the last one last, and belongs to ``owner``."""

    def owner(self, key: ChunkKey) -> int:
        """Return the owner of ``key``, 0 also for an unknown key."""

    def used(self, run: Sequence[ChunkKey]) -> None:
        """Note that a prompt asked for this run, first chunk first. Unknown keys are ignored."""

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        """Make the run hot again, its end coldest: it was stored, or a reader let go of it. That
        does not count as a use, because every prompt is stored in several steps. Unknown keys are
        ignored."""

    def evicted(self, run: Sequence[ChunkKey]) -> None:
        """Note that chunks of ``run`` left to make room, in this order. Forget that they are held,
        and remember what helps if they come back."""

    def discard(self, key: ChunkKey) -> None:
        """Forget all about ``key``, which is unwanted or was lost. Unknown keys are ignored."""

    def coldest(self) -> ChunkKey | None:
        """Return the key to let go first, or None. It stays known until evicted or discarded."""

    def keeps(self, key: ChunkKey) -> bool:
        """Return whether ``key`` is held, and came back often enough to stay longer."""

    def cool(self, run: Sequence[ChunkKey]) -> None:
        """Let the run leave before all others, its end first. Unknown keys are ignored."""

    def resize(self, room: int) -> None:
        """Set the capacity, in chunks."""

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ChunkKey]:
        """Iterate over the keys, coldest first."""


PolicyOf = Callable[[int], Policy]
"""Maker of a policy for a place with room for this many chunks. All chunks of a place have the same
size, so every quantity is counted in chunks."""


class LRU:
    """Order in which the least recently used key leaves first.

    An OrderedDict (key -> owner) and not a dict: taking the front of a dict walks over the places
    of all deleted keys (40 times slower at 100,000 keys)."""

    __slots__ = ("_order",)

    def __init__(self, room: int = 0) -> None:
        self._order: OrderedDict[ChunkKey, int] = OrderedDict()

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        order = self._order
        for key in run:
            if key in order:  # a new key is the hottest without a move
                order.move_to_end(key)
            order[key] = owner

    def owner(self, key: ChunkKey) -> int:
        return self._order.get(key, 0)

    def used(self, run: Sequence[ChunkKey]) -> None:
        order = self._order
        for key in reversed(run):
            if key in order:
                order.move_to_end(key)

    ordered = used

    def evicted(self, run: Sequence[ChunkKey]) -> None:
        for key in run:
            self._order.pop(key, None)

    def discard(self, key: ChunkKey) -> None:
        self._order.pop(key, None)

    def cool(self, run: Sequence[ChunkKey]) -> None:
        for key in run:
            if key in self._order:
                self._order.move_to_end(key, last=False)

    def resize(self, room: int) -> None: ...

    def coldest(self) -> ChunkKey | None:
        return next(iter(self._order), None)

    def keeps(self, key: ChunkKey) -> bool:
        return False  # to this order all are alike

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._order)


class Owned:
    """A Policy's order in which every key has an owner (:mod:`kvtier.core.tenant`), and in which
    what is kept leaves after all else, whatever the policy is. The owner 0 means no owner.

    With ``split`` there is also an order for each owner, so that :meth:`coldest` and :meth:`count`
    can answer for one owner. That costs memory, so only places where owners have quotas use it. An
    owner's own order is LRU, because only all keys of a place together are enough to learn from."""

    def __init__(self, policy: Policy, split: bool, kept: Kept) -> None:
        self._all = policy
        self.kept = kept
        self._stays = kept.stays
        self._once: dict[int, int] = {}
        """Owner -> the same number, as one object for all its keys: saves 44 bytes a key."""
        self._split = split
        self._parts: defaultdict[int, LRU] = defaultdict(LRU)

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
