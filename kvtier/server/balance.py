"""Balance: how many bytes of one place each slot size of a server may take. Pure.

The rule is one LRU over all sizes, in bytes: the size whose coldest chunk was used longest ago
gives room, and a size that finds no free room gets it. CacheLib moves slabs between its allocation
classes in the same way, by the age of the tails of their lists (its *LRU tail age* strategy). An
LRU of slots cannot do more, because a chunk of one size does not fit another size's slot. Free room
counts as colder than any chunk. Every size keeps a least part, so that its engines can use it at
once when they come back.

Three bounds keep room from going back and forth. Room moves only to a size that lacked some in the
last turn. It is at most twice what that size lacked, and at most an eighth of the place a turn. A
chunk leaves only for one that is clearly hotter (:data:`_RATIO`, :data:`_MARGIN`), so nothing moves
between two sizes under equal pressure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

_LEAST_PART = 80
"""Seven sizes that only keep their least part leave nine tenths to the eighth."""
_TURN_PART, _TURN_BYTES = 8, 8 << 30
_RATIO, _MARGIN = 1.25, 2
"""In turns: the giver's coldest chunk must be unused for this much longer than the taker's."""


class Side(NamedTuple):
    """A slot size's part of one place, in bytes."""

    room: int
    unit: int
    """Of one chunk."""
    fixed: int
    """Taken even without any chunk."""
    used: int
    """With ``fixed``."""
    wanted: int = 0
    """Of the chunks that found no free room in the last turn."""
    age: int | None = None
    """Turns since the last use of the coldest chunk. None where no chunk can leave, or it is not
    known."""

    def least(self, place: int) -> int:
        return self.fixed + max(self.unit, place // _LEAST_PART)


def divide(place: int, sides: Mapping[int, Side]) -> dict[int, int]:
    """Rooms when a size has come or gone.

    Each size first gets room for what it holds. Free room then makes the sizes as equal as it can.
    When there is too little, the largest sizes give, down to what each always keeps.
    """
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
    """Rooms for the next turn."""
    rooms = {size: side.room for size, side in sides.items()}
    left = min(place // _TURN_PART, _TURN_BYTES)
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
    """Sizes that give to ``taker``, and the most of each: free room first, then the coldest
    chunks."""
    others = {size: side for size, side in sides.items() if size != taker}
    bound = _RATIO * (sides[taker].age or 0) + _MARGIN
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
