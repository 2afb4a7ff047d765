"""Histogram: durations counted by powers of two. Pure, and cheap enough for operations that take
microseconds."""

from __future__ import annotations

FIRST_BIT, PLACES = 10, 26
BOUNDS = tuple(2**bit / 1e9 for bit in range(FIRST_BIT, FIRST_BIT + PLACES))
"""Upper bounds in seconds, from 1 microsecond to 34 s. Longer durations are in one more bucket
after them."""
_PER_PLACE = 1e9 / 2**FIRST_BIT
_ALL = 64 - FIRST_BIT


class Histogram:
    """Counts and sums of seconds by bucket. Not thread-safe: its owner guards it."""

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
        """Counts by bucket, not cumulated. There is one more bucket than :data:`BOUNDS`."""
        return [*self._counts[:PLACES], sum(self._counts[PLACES:])]

    @property
    def sums(self) -> list[float]:
        """Sums of seconds by bucket."""
        return [*self._sums[:PLACES], sum(self._sums[PLACES:])]
