"""Kept: the chunks of one place that leave after all others, each for a time after its last use.
Pure.

They are not pins. What one owner keeps is bounded, and what all keep together. Beyond that the
owner that keeps most gives way, and of one owner the cache salt that keeps most, so that no client
pushes out what another one keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey

KEEP_PART = 0.5
"""The part of a place that one owner may keep, where nothing else is configured."""
_TOGETHER_PART = 0.75
"""The part of a place that all owners may keep together."""
_TICK_CHUNKS = 8


class Stay(NamedTuple):
    owner: int
    seconds: float
    """Seconds after the last use for which the chunk is kept."""
    until: float
    salt: str = ""
    """:func:`~kvtier.eviction.hints.salt_name` of the client that keeps the chunk."""


Released = tuple[ChunkKey, int]
"""A chunk that is kept no longer, and its owner."""


class Kept:
    """Kept chunks of one place, used under the Store's lock. ``room``: of the place, in chunks.
    ``part``: of the place, or of its own quota (``share``), that one owner may keep."""

    def __init__(self, room: int, part: float = KEEP_PART, share: float | None = None) -> None:
        self._room, self._part, self._share = room, part, share
        self._now = 0.0
        self.stays: OrderedDict[ChunkKey, Stay] = OrderedDict()
        """Every kept chunk, in the order in which :meth:`tick` looks at them."""
        self._of: dict[int, _Salts] = {}

    @property
    def own_bound(self) -> int:
        return int(self._part * (self._share or 1.0) * self._room)

    @property
    def bound(self) -> int:
        return int(max(self._part, _TOGETHER_PART) * self._room)

    def resize(self, room: int) -> list[Released]:
        """Set the room, in chunks. Drops and returns the chunks that are too many."""
        self._room = room
        return [one for owner in list(self._of) for one in self._surplus(owner)]

    def keep(
        self,
        run: Sequence[tuple[ChunkKey, int]],
        seconds: float,
        salt: str = "",
        until: float | None = None,
    ) -> list[Released]:
        """Keep these chunks, which were not kept, each with its owner, for a client with this salt.
        The last one becomes the hottest. ``until``: None for ``seconds`` from now. Drops and
        returns the chunks that are too many."""
        until = self._now + seconds if until is None else until
        for key, owner in run:
            self.stays[key] = Stay(owner, seconds, until, salt)
            self._of.setdefault(owner, _Salts()).put(key, salt)
        return [one for owner in {owner for _, owner in run} for one in self._surplus(owner)]

    def use(self, key: ChunkKey) -> None:
        stay = self.stays[key]
        self.stays[key] = stay._replace(until=self._now + stay.seconds)
        self._of[stay.owner].use(key, stay.salt)

    def drop(self, key: ChunkKey) -> int:
        stay = self.stays.pop(key)
        own = self._of[stay.owner]
        own.drop(key, stay.salt)
        if not own.count:
            del self._of[stay.owner]
        return stay.owner

    def tick(self, now: float) -> list[Released]:
        """Look at the next few chunks. Drops and returns those whose time is over."""
        self._now, over = now, list[Released]()
        for key, stay in list(islice(self.stays.items(), _TICK_CHUNKS)):
            if stay.until > now:
                self.stays.move_to_end(key)
            else:
                over.append((key, self.drop(key)))
        return over

    def _surplus(self, owner: int) -> list[Released]:
        """Drop and return what this owner keeps beyond its bound, and all beyond theirs."""
        count = self.count(owner) - self.own_bound
        released = self._release(owner, count)
        while (count := len(self.stays) - self.bound) > 0:
            released += self._release(max(self._of, key=self.count), count)
        return released

    def _release(self, owner: int, count: int) -> list[Released]:
        return [(key := self._of[owner].first(), self.drop(key)) for _ in range(count)]

    def count(self, owner: int) -> int:
        own = self._of.get(owner)
        return 0 if own is None else own.count

    def owners(self) -> Iterable[int]:
        return self._of.keys()

    def of(self, owner: int) -> Iterator[ChunkKey]:
        return iter(self._of.get(owner, ()))

    def __iter__(self) -> Iterator[ChunkKey]:
        """Iterate in the order in which chunks leave: those of the owner that keeps most first."""
        for owner in sorted(self._of, key=self.count, reverse=True):
            yield from self._of[owner]

    def __len__(self) -> int:
        return len(self.stays)

    def check(self) -> list[str]:
        most = max(map(self.count, self._of), default=0)
        sums = {sum(1 for _ in self), sum(map(self.count, self._of)), len(self)}
        if most > self.own_bound or len(self) > self.bound or len(sums) > 1:
            may = f"at most {self.bound} and {self.own_bound} may be"
            return [f"{len(self)} chunks are kept, {most} of one owner: {may}"]
        return []


class _Salts:
    """Kept chunks of one owner, by cache salt. No step depends on their number."""

    __slots__ = ("_keys", "_most", "_with", "count")

    def __init__(self) -> None:
        self.count = 0
        self._keys: dict[str, OrderedDict[ChunkKey, None]] = {}
        """Salt -> its chunks, coldest first."""
        self._with: dict[int, OrderedDict[str, None]] = {}
        self._most = 0
        """Chunks of the salt that keeps most."""

    def put(self, key: ChunkKey, salt: str) -> None:
        own = self._keys.setdefault(salt, OrderedDict())
        own[key] = None
        self._counted(salt, len(own) - 1, len(own))

    def drop(self, key: ChunkKey, salt: str) -> None:
        own = self._keys[salt]
        del own[key]
        if not own:
            del self._keys[salt]
        self._counted(salt, len(own) + 1, len(own))

    def use(self, key: ChunkKey, salt: str) -> None:
        self._keys[salt].move_to_end(key)

    def first(self) -> ChunkKey:
        """Return the coldest chunk of the salt that keeps most."""
        return next(iter(self))

    def _counted(self, salt: str, before: int, now: int) -> None:
        self.count += now - before
        if before:
            del self._with[before][salt]
            if not self._with[before]:
                del self._with[before]
        if now:
            self._with.setdefault(now, OrderedDict())[salt] = None
        self._most = max(self._most, now)
        if self._most not in self._with:
            self._most = now

    def __iter__(self) -> Iterator[ChunkKey]:
        for count in range(self._most, 0, -1):
            for salt in self._with.get(count, ()):
                yield from self._keys[salt]
