"""The order in which chunks leave a place. Pure: only keys and their order. No sizes, no places, no
clock and no lock.

The order is leaf-first: the end of a prompt leaves before its beginning, because a chunk without
the chunks before it can serve nobody. Policies get this order for free, because they move a run
from its end to its beginning: the root is always the most recently used chunk of its run.

A policy is told two differences that are easily missed. A prompt asked for a chunk (``used``), or
the chunk was only stored or let go (``ordered``). A chunk left to make room and may come back
(``evicted``), or it is unwanted (``discard``). A pinned chunk stays known and keeps what the policy
remembers of it: the Directory passes it over.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kvtier.core.chunk import ChunkKey

_MOST_OWNERS = 8192
"""Owner numbers that are kept as one object each. When there are more, they are collected anew."""


class Policy(Protocol):
    """Which key leaves next. Not thread-safe: the owner's lock guards it."""

    def add(self, key: ChunkKey, owner: int = 0) -> None:
        """``key`` is held from now on, or is still held. It becomes the hottest of its kind, and
        belongs to ``owner``."""
        ...

    def owner(self, key: ChunkKey) -> int:
        """The owner of ``key``; 0 also for an unknown key."""
        ...

    def used(self, run: Sequence[ChunkKey]) -> None:
        """A prompt with this run (first chunk first) asked for it. Unknown keys are ignored."""
        ...

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        """The run was stored, or a reader let go of it: it is hot again, its end coldest. That does
        not count as a use, because every prompt is stored in several steps. Unknown keys are
        ignored."""
        ...

    def evicted(self, key: ChunkKey) -> None:
        """``key`` left to make room. Forget that it is held, and remember what helps if it comes
        back."""
        ...

    def discard(self, key: ChunkKey) -> None:
        """``key`` is unwanted or was lost: forget all about it, if known."""
        ...

    def coldest(self) -> ChunkKey | None:
        """The key to let go first. None when empty. It stays known until evicted or discarded."""
        ...

    def cool(self, run: Sequence[ChunkKey]) -> None:
        """These leave before all others, the end of the run first. Unknown keys are ignored."""
        ...

    def keep(self, run: Sequence[ChunkKey], seconds: float) -> None:
        """These leave after all others until ``seconds`` after their last use, as long as such
        chunks are at most half of all."""
        ...

    def tick(self, now: float) -> None:
        """The time is ``now``, in seconds."""
        ...

    def resize(self, room: int) -> None:
        """There is room for so many chunks from now on."""
        ...

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ChunkKey]:
        """Coldest first."""
        ...


PolicyOf = Callable[[int], Policy]
"""Makes a policy for a place with room for so many chunks. All chunks of a place have the same
size, so every quantity is counted in chunks."""


class LRU:
    """Least recently used leaves first.

    It is an OrderedDict and not a dict. Taking the front of a dict walks over the places of all
    deleted keys (measured 40 times slower at 100,000 keys), and ``move_to_end`` is one step. Its
    values are the owners.
    """

    __slots__ = ("_order",)

    def __init__(self, room: int = 0) -> None:
        self._order: OrderedDict[ChunkKey, int] = OrderedDict()

    def add(self, key: ChunkKey, owner: int = 0) -> None:
        self._order[key] = owner
        self._order.move_to_end(key)

    def owner(self, key: ChunkKey) -> int:
        return self._order.get(key, 0)

    def used(self, run: Sequence[ChunkKey]) -> None:
        order = self._order
        for key in reversed(run):
            if key in order:
                order.move_to_end(key)

    ordered = used

    def discard(self, key: ChunkKey) -> None:
        self._order.pop(key, None)

    evicted = discard

    def cool(self, run: Sequence[ChunkKey]) -> None:
        for key in run:
            if key in self._order:
                self._order.move_to_end(key, last=False)

    def keep(self, run: Sequence[ChunkKey], seconds: float) -> None:
        """The oldest chunk leaves first, whatever is said of it."""

    def tick(self, now: float) -> None:
        """It has no clock."""

    def resize(self, room: int) -> None:
        """The order is the same with any room."""

    def coldest(self) -> ChunkKey | None:
        return next(iter(self._order), None)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._order)


class Owned:
    """A Policy's order in which every key has an owner (:mod:`kvtier.core.tenant`). 0 means nobody.

    With ``split`` there is also an order for each owner, so that :meth:`coldest` and :meth:`count`
    can answer for one owner. That costs memory, so only places where owners have quotas use it. An
    owner's own order is LRU, because only all keys of a place together are enough to learn from.
    """

    __slots__ = ("_all", "_once", "_parts")

    def __init__(self, policy: Policy, split: bool) -> None:
        self._all = policy
        self._once: dict[int, int] = {}
        """Each owner's number, as one object for all its keys. Otherwise each key had its own
        object of 44 bytes."""
        self._parts: defaultdict[int, LRU] | None = defaultdict(LRU) if split else None

    def add(self, key: ChunkKey, owner: int = 0) -> None:
        if len(self._once) > _MOST_OWNERS:
            self._once.clear()
        self._all.add(key, self._once.setdefault(owner, owner) if owner else 0)
        if owner and self._parts is not None:
            self._parts[owner].add(key)

    def used(self, run: Sequence[ChunkKey]) -> None:
        self._all.used(run)
        if self._parts:
            self._order_parts(run)

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        self._all.ordered(run)
        if self._parts:
            self._order_parts(run)

    def _order_parts(self, run: Sequence[ChunkKey]) -> None:
        assert self._parts is not None
        for owner in {self._all.owner(key) for key in run} - {0}:
            self._parts[owner].ordered(run)

    def evicted(self, key: ChunkKey) -> None:
        self._leave_part(key)
        self._all.evicted(key)

    def discard(self, key: ChunkKey) -> None:
        self._leave_part(key)
        self._all.discard(key)

    def _leave_part(self, key: ChunkKey) -> None:
        if self._parts is not None and (owner := self._all.owner(key)):
            self._parts[owner].discard(key)
            if not self._parts[owner]:
                del self._parts[owner]

    def cool(self, run: Sequence[ChunkKey]) -> None:
        self._all.cool(run)
        if self._parts:
            for owner in {self._all.owner(key) for key in run} - {0}:
                self._parts[owner].cool(run)

    def keep(self, run: Sequence[ChunkKey], seconds: float) -> None:
        self._all.keep(run, seconds)

    def tick(self, now: float) -> None:
        self._all.tick(now)

    def resize(self, room: int) -> None:
        self._all.resize(room)

    def owner(self, key: ChunkKey) -> int:
        return self._all.owner(key)

    def count(self, owner: int) -> int:
        """Keys of this owner. Only where split."""
        return len(self._parts[owner]) if self._parts is not None and owner in self._parts else 0

    def coldest(self, owner: int | None = None) -> ChunkKey | None:
        """The key to let go first: of all keys, or (only where split) of one owner's keys."""
        if owner is None or self._parts is None:
            return self._all.coldest()
        return self._parts[owner].coldest() if owner in self._parts else None

    def part(self, owner: int) -> Iterator[ChunkKey]:
        """One owner's keys, coldest first. Only where split."""
        return (
            iter(self._parts[owner])
            if self._parts is not None and owner in self._parts
            else iter(())
        )

    def keys(self) -> Iterable[ChunkKey]:
        """Every key, in no order: the fastest way to copy them all."""
        return self._all

    def __contains__(self, key: object) -> bool:
        return key in self._all

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._all)
