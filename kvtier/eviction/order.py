"""The order in which chunks leave a place. Pure: only keys and their order. No sizes, no places, no
clock and no lock.

:class:`Segments` decides what leaves first, and remembers what left. One setting turns it from LRU
into an order that a scan cannot flush. It has two lists: chunks that were used once, and chunks
that came back, which may take a part of the room. A chunk that left is remembered for a while (a
ghost), so a chunk that is stored again soon counts as one that came back. It is a segmented LRU
(Karedla, Love, Wherry, *Caching strategies to improve disk system performance*, IEEE Computer
27(3), 1994) with 2Q's A1out (Johnson and Shasha, *2Q*, VLDB 1994).

The order is leaf-first. It gets that for free, because a run is moved from its end to its
beginning: the root is always the most recently used chunk of its run.

Two differences are easily missed. A prompt asked for a chunk (``used``), or the chunk was only
stored or let go (``ordered``). A chunk left to make room and may come back (``evicted``), or it is
unwanted (``discard``).

:class:`Owned` is what places have: such an order, owners, and what is kept by hints. A pinned chunk
stays known and keeps what the order remembers of it: the Directory passes it over.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.kept import Kept, Released

_MOST_OWNERS = 8192
"""Number of owners at which their shared number objects are collected anew."""
_MOST_GHOSTS = 1 << 16
"""Most chunks that left and are remembered, at 250 bytes each."""
_TRIM_CHUNKS = 4
"""Keys moved at a time after a change of the setting, which may have to move thousands."""


class Setting(NamedTuple):
    """Preference of a :class:`Segments` for chunks that came back."""

    share: float
    """The part of the room for chunks that came back, 0 for LRU."""
    memory: float
    """Departures for which a chunk that left is remembered, as a multiple of the room."""

    @property
    def name(self) -> str:
        """Name in statistics: ``lru``, or the percentage and the multiple."""
        return f"keep{self.share * 100:.0f}_{self.memory:g}x" if self.share else "lru"


LRU_SETTING = Setting(0.0, 0.0)
SETTINGS = (LRU_SETTING, Setting(0.9, 4.0), Setting(0.9, 1.0), Setting(0.5, 2.0))
_LONGEST_MEMORY = max(setting.memory for setting in SETTINGS)


class Segments:
    """Order in which keys leave. Not thread-safe: the owner's lock guards it. Unknown keys are
    ignored. ``adapts``: whether :meth:`settle` is called, so that what left is remembered for as
    long as any setting wants it.

    OrderedDicts (key -> owner) and not dicts: taking the front of a dict walks over the places of
    all deleted keys (40 times slower at 100,000 keys)."""

    def __init__(
        self, room: int = 0, setting: Setting = LRU_SETTING, *, adapts: bool = False
    ) -> None:
        self.room, self.setting, self._adapts = room, setting, adapts
        self._once: OrderedDict[ChunkKey, int] = OrderedDict()
        self._again: OrderedDict[ChunkKey, int] = OrderedDict()
        """Chunks that came back, with their owners, coldest first."""
        self._ghosts: OrderedDict[ChunkKey, int] = OrderedDict()
        """Chunks that left, the oldest first, with the number of their departure."""
        self._left = 0
        self.evicts: list[Callable[[Sequence[ChunkKey]], object]] = []
        """Observers, called with the chunks that leave to make room."""
        self._weigh()

    def settle(self, setting: Setting) -> None:
        """Change the setting. Held and remembered chunks stay."""
        self.setting = setting
        self._weigh()

    def resize(self, room: int) -> None:
        """Set the capacity, in chunks."""
        self.room = room
        self._weigh()

    def cool(self, run: Sequence[ChunkKey]) -> None:
        """Let the run leave before all others, its end first."""
        for key in run:
            if key in self:
                owner = self.owner(key)
                self._drop(key)
                self._once[key] = owner
                self._once.move_to_end(key, last=False)

    def _drop(self, key: ChunkKey) -> None:
        if self._once.pop(key, None) is None:
            self._again.pop(key, None)

    def _weigh(self) -> None:
        self._protected = int(self.setting.share * self.room)
        self._known_for = int(self.setting.memory * self.room)
        longest = int(_LONGEST_MEMORY * self.room) if self._adapts else self._known_for
        self._most = min(_MOST_GHOSTS, longest)

    def add(self, run: Sequence[ChunkKey], owner: int = 0) -> None:
        """Add chunks of ``run``, which are held from now on, or still. Each becomes the hottest of
        its kind, the last one last, and belongs to ``owner``."""
        once, again, ghosts = self._once, self._again, self._ghosts
        for key in run:
            if key in again:
                again[key] = owner
                again.move_to_end(key)
                continue
            left = ghosts.pop(key, None)
            if left is not None and self._left - left < self._known_for and self._protected:
                once.pop(key, None)
                again[key] = owner
                self.trim()
                continue
            if key in once:  # a new key is the hottest without a move
                once.move_to_end(key)
            once[key] = owner

    def owner(self, key: ChunkKey) -> int:
        """Return the owner of ``key``, 0 also for an unknown key."""
        return self._once.get(key) or self._again.get(key, 0)

    def used(self, run: Sequence[ChunkKey]) -> None:
        """Note that a prompt asked for this run, first chunk first."""
        once, again, protected = self._once, self._again, self._protected
        before = len(again)
        for key in reversed(run):
            if key in again:
                again.move_to_end(key)
            elif key in once:
                if protected:
                    again[key] = once.pop(key)
                else:
                    once.move_to_end(key)
        self.trim(len(again) - before + _TRIM_CHUNKS)

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        """Make the run hot again, its end coldest: it was stored, or a reader let go of it. That
        does not count as a use, because every prompt is stored in several steps."""
        once, again = self._once, self._again
        in_once, in_again = once.move_to_end, again.move_to_end
        for key in reversed(run):
            if key in once:
                in_once(key)
            elif key in again:
                in_again(key)
        if len(again) > self._protected:
            self.trim()

    def evicted(self, run: Sequence[ChunkKey]) -> None:
        """Note that chunks of ``run`` left to make room, in this order, and remember them."""
        once, again, ghosts, left = self._once, self._again, self._ghosts, self._left
        for key in run:
            if once.pop(key, None) is None:
                again.pop(key, None)
            left += 1
            ghosts[key] = left
        self._left = left
        surplus = min(len(run), max(0, len(ghosts) - self._most))
        for key in list(islice(ghosts, surplus)):
            del ghosts[key]
        for tell in self.evicts:
            tell(run)

    def discard(self, key: ChunkKey) -> None:
        """Forget all about ``key``, which is unwanted or was lost."""
        self._drop(key)
        self._ghosts.pop(key, None)

    def keeps(self, key: ChunkKey) -> bool:
        """Return whether ``key`` is held, and came back often enough to stay longer."""
        return key in self._again

    def coldest(self) -> ChunkKey | None:
        """Return the key to let go first, or None. It stays known until evicted or discarded."""
        for key in self._once or self._again:
            return key
        return None

    def trim(self, most: int = _TRIM_CHUNKS) -> bool:
        """Move up to ``most`` chunks that have no room in the second list to the first one. Returns
        whether more are left."""
        surplus = len(self._again) - self._protected
        for _ in range(min(surplus, most)):
            key, owner = self._again.popitem(last=False)
            self._once[key] = owner
        return surplus > most

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[ChunkKey]:
        """Iterate over the keys, coldest first."""
        return chain(self._once, self._again)


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

    def keep(
        self,
        run: Sequence[ChunkKey],
        seconds: float,
        salt: str = "",
        until: float | None = None,
    ) -> None:
        """Let the run leave after all others until ``seconds`` after its last use, within the
        bounds of :class:`Kept`. ``salt``: of the client that keeps it. ``until``: time at which it
        leaves unless it is used, None for ``seconds`` from now."""
        known = [(key, self.owner(key)) for key in reversed(run) if key in self]
        for key, _ in known:
            self.discard(key)
        self._release(self.kept.keep(known, seconds, salt, until))

    def keep_as(self, other: Owned, key: ChunkKey) -> None:
        """Keep this chunk as long as it is kept in the ``other`` order."""
        stay = other._stays.get(key)
        if stay is not None and key not in self._stays:
            self.keep((key,), stay.seconds, stay.salt, stay.until)

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
