"""Handshakes: the places for connections from other hosts that have not proved yet that they may
come in. Pure.

Any client that reaches the port can open connections and say nothing. Such connections have few
places, apart from the places of engines that were let in. When the places are full, the oldest
connection of the address that has the most leaves at once. An engine needs its place for a moment
only, so a flood of silent sockets costs it at most a second attempt.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from kvtier.server.listening.origins import origin_of

PLACES = 64
PLACES_OF_ONE = 16
"""Places of one address. For IPv6 it is one network of 64 bits, because a host has as many
addresses in it as it likes."""
T = TypeVar("T")


class Handshakes(Generic[T]):
    """Connections by the address from which they come, the oldest first. Not thread-safe."""

    def __init__(self, places: int = PLACES, places_of_one: int = PLACES_OF_ONE) -> None:
        self._places = places
        self._places_of_one = places_of_one
        self._under_way: dict[T, str] = {}

    def __contains__(self, one: T) -> bool:
        return one in self._under_way

    def enter(self, one: T, address: str) -> T | None:
        """``one`` begins its handshake. Returns the connection that must leave for it, or None."""
        origin = origin_of(address)
        counts = Counter(self._under_way.values())
        if counts[origin] >= self._places_of_one:
            leaves = self._oldest(origin)
        elif len(self._under_way) >= self._places:
            leaves = self._oldest(counts.most_common(1)[0][0])
        else:
            leaves = None
        self._under_way[one] = origin
        return leaves

    def leave(self, one: T) -> None:
        """``one`` was let in or has closed. No effect the second time."""
        self._under_way.pop(one, None)

    def _oldest(self, origin: str) -> T:
        oldest = next(one for one, its in self._under_way.items() if its == origin)
        del self._under_way[oldest]
        return oldest
