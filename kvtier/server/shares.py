"""Shares: how many slots of one pool each engine may take at once, and how often a client may ask
for work over all chunks. Pure.

An engine takes a slot while it fills it (a save lease) or reads it (a load lease). No other engine
can use the slot then, however long that takes. So the number of taken slots must be bounded. A
bound by tenant name is not enough, because a name is claimed and not proved.

With n engines attached, one part in 2(n + 1) of the slots is a reserve, which no engine gets that
has taken many. A single engine gets three quarters of the pool, and more engines get more together.
One half of the reserve is divided among the engines that have taken few. The other half is for
engines to come. So no engine is kept out by what others have taken, whatever names they use and
whenever they came. Slots are never taken back from an engine, because that would not be safe while
it may still write.

Streams of one client from another host count as one engine together, however many connections it
opens. What that engine gets is divided among its streams by the same rule.

:func:`divide` and :func:`shift` say how many bytes of one place each slot size may take. The rule
is one LRU over all sizes, in bytes: the size whose coldest chunk was used longest ago gives room,
and a size that finds no free room gets it. CacheLib moves slabs between its allocation classes in
the same way, by the age of the tails of their lists (its *LRU tail age* strategy). Free room counts
as colder than any chunk. Every size keeps a least part, so that its engines can use it at once when
they come back. Three bounds keep room from going back and forth: it moves only to a size that
lacked some in the last turn, at most twice what that size lacked, and at most an eighth of the
place a turn; and a chunk leaves only for one that is clearly hotter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from kvtier.core.steps import Steps

_REST_FACTOR = 99
"""Pause in lengths of the work before it, which thus takes one part in a hundred of the time."""
R = TypeVar("R")


class Shares:
    """Slots of one pool that engines have taken. Not thread-safe: for the server's loop."""

    def __init__(self, slots: Callable[[], int], within: Share | None = None) -> None:
        self._slots = slots
        self._within = within
        self._shares: set[Share] = set()
        self._clients: dict[str, Shares] = {}

    def join(self) -> Share:
        share = Share(self._slots, self._shares, self._within)
        self._shares.add(share)
        return share

    def join_stream(self, client: str) -> Share:
        """Return a stream's share of the share that all streams of its client have together."""
        self._clients = {name: one for name, one in self._clients.items() if one._shares}
        if client not in self._clients:
            whole = self.join()
            self._clients[client] = Shares(lambda: whole.held + whole.left, whole)
        return self._clients[client].join()


class Share:
    """One engine's share. ``shares``: of all engines. ``within``: the share that contains it."""

    def __init__(
        self, slots: Callable[[], int], shares: set[Share], within: Share | None = None
    ) -> None:
        self._slots, self._shares, self._within = slots, shares, within
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    @held.setter
    def held(self, slots: int) -> None:
        if self._within is not None:
            self._within.held += slots - self._held
        self._held = slots

    @property
    def left(self) -> int:
        slots, count = self._slots(), len(self._shares)
        free = slots - sum(one.held for one in self._shares)
        reserve = slots // (2 * (count + 1))
        own = max(1, reserve // (2 * count))
        return max(0, free - reserve, min(own - self.held, free))

    def leave(self) -> None:
        """Give the share back. Without effect the second time."""
        self._shares.discard(self)
        if self._within is not None and not self._shares:
            self._within.leave()


class ScanLimiter:
    """Limit of work that cannot be cut into pieces: a hundredth of the time. On the loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._after = 0.0

    def looking(self, look: Callable[[], R]) -> Steps[R]:
        while (left := self._after - self._clock()) > 0:
            yield left
        begun = self._clock()
        found = look()
        now = self._clock()
        self._after = now + _REST_FACTOR * (now - begun)
        return found


_LEAST_PARTS = 240
"""Parts of a place, one of which each size keeps: 24 sizes leave nine tenths to share."""
_TURN_PARTS, _TURN_BYTES = 8, 8 << 30
_HOTTER_FACTOR, _HOTTER_TURNS = 1.25, 2
"""Factor and turns by which a giver's coldest chunk must be unused longer than the taker's."""


class Side(NamedTuple):
    """A slot size's part of one place, in bytes."""

    room: int
    unit: int
    """Bytes of one chunk."""
    fixed: int
    """Bytes that are taken even without any chunk."""
    used: int
    wanted: int = 0
    """Bytes of the chunks that found no free room in the last turn."""
    age: int | None = None
    """Turns since the last use of the coldest chunk. None if no chunk can leave, or unknown."""

    def least(self, place: int) -> int:
        return self.fixed + max(self.unit, place // _LEAST_PARTS)


def divide(place: int, sides: Mapping[int, Side]) -> dict[int, int]:
    """Return each size's room after a size has come or gone.

    Each size first gets room for what it holds. Free room then makes the sizes as equal as it can.
    When there is too little, the largest sizes give, down to what each always keeps."""
    least = {size: side.least(place) for size, side in sides.items()}
    held = {size: max(least[size], side.used) for size, side in sides.items()}
    if sum(least.values()) > place:
        least = dict.fromkeys(sides, 0)

    def rooms(level: int) -> dict[int, int]:
        if sum(held.values()) <= place:
            return {size: max(room, level) for size, room in held.items()}
        return {size: max(least[size], min(room, level)) for size, room in held.items()}

    fits = bisect_right(range(place + 1), place, key=lambda level: sum(rooms(level).values()))
    return rooms(max(0, fits - 1))


def shift(place: int, sides: Mapping[int, Side]) -> dict[int, int]:
    rooms = {size: side.room for size, side in sides.items()}
    left = min(place // _TURN_PARTS, _TURN_BYTES)
    for taker in sorted(sides, key=lambda size: sides[size].age or 0):
        side = sides[taker]
        lacking = min(left, 2 * side.wanted - max(0, rooms[taker] - side.used))
        lacking = -(-max(0, lacking) // side.unit) * side.unit
        for giver, spare in _givers(place, sides, rooms, taker):
            given = min(spare, lacking)
            rooms[giver] -= given
            rooms[taker] += given
            lacking -= given
            left -= given
    return rooms


def _givers(
    place: int, sides: Mapping[int, Side], rooms: Mapping[int, int], taker: int
) -> list[tuple[int, int]]:
    """Return sizes and the most that each gives ``taker``: free room, then room of cold chunks."""
    others = {size: side for size, side in sides.items() if size != taker}
    bound = _HOTTER_FACTOR * (sides[taker].age or 0) + _HOTTER_TURNS
    free = {
        size: max(0, rooms[size] - max(side.used, side.least(place)))
        for size, side in others.items()
        if not side.wanted
    }
    cold = {
        size: max(0, rooms[size] - free.get(size, 0) - side.least(place))
        for size, side in others.items()
        if side.age is not None and side.age > bound
    }
    ages = {size: side.age or 0 for size, side in others.items()}
    return [
        *((size, free[size]) for size in sorted(free, key=lambda size: free[size], reverse=True)),
        *((size, cold[size]) for size in sorted(cold, key=lambda size: ages[size], reverse=True)),
    ]
