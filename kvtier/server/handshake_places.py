"""Handshakes: the places of connections from other hosts that have not shown yet that they may come
in. Pure.

Whoever reaches the port can open connections and say nothing. They have few places of their own,
apart from those of engines that were let in, and what is full makes room at once: the oldest
leaves, first of the address that has most. An engine needs its place for a moment only, so a flood
of sockets that say nothing costs it at most a second try.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Generic, TypeVar

PLACES = 64
PLACES_OF_ONE = 16
"""Of one address; of one network of 64 bits for IPv6, where a host has as many addresses as it
likes."""
_NETWORK_BITS = 64
T = TypeVar("T")


class Handshakes(Generic[T]):
    """Connections by the address they come from, the oldest first. Not thread-safe."""

    def __init__(self, places: int = PLACES, places_of_one: int = PLACES_OF_ONE) -> None:
        self._places = places
        self._places_of_one = places_of_one
        self._under_way: dict[T, str] = {}

    def __contains__(self, one: T) -> bool:
        return one in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    def enter(self, one: T, address: str) -> T | None:
        """``one`` begins its handshake; returns who must leave for it."""
        origin = _origin(address)
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
        """``one`` is let in, or gone. No effect the second time."""
        self._under_way.pop(one, None)

    def _oldest(self, origin: str) -> T:
        oldest = next(one for one, its in self._under_way.items() if its == origin)
        del self._under_way[oldest]
        return oldest


def _origin(address: str) -> str:
    """The part of an address that one host cannot choose."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), _NETWORK_BITS), strict=False))
