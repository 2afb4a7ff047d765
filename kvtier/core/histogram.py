"""Histogram: durations counted by powers of two. Pure, and cheap enough for what takes
microseconds."""

from __future__ import annotations

FIRST_BIT, PLACES = 10, 26
BOUNDS = tuple(2**bit / 1e9 for bit in range(FIRST_BIT, FIRST_BIT + PLACES))
"""Upper bounds in seconds, from 1 microsecond to 34 s; what took longer is in the place behind
them."""
_PER_PLACE = 1e9 / 2**FIRST_BIT
_ALL = 64 - FIRST_BIT


class Histogram:
    """Counts and sums of seconds by place. Whoever owns it guards it: not thread-safe."""

    __slots__ = ("_counts", "_sums")

    def __init__(self) -> None:
        self._counts = [0] * _ALL
        self._sums = [0.0] * _ALL

    def add(self, seconds: float) -> None:
        place = int(seconds * _PER_PLACE).bit_length()
        self._counts[place] += 1
        self._sums[place] += seconds

    @property
    def counts(self) -> list[int]:
        """By place, not cumulated; one more than :data:`BOUNDS`."""
        return [*self._counts[:PLACES], sum(self._counts[PLACES:])]

    @property
    def sums(self) -> list[float]:
        """Seconds by place."""
        return [*self._sums[:PLACES], sum(self._sums[PLACES:])]
