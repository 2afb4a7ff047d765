"""WriteBudget: limit of writes to a disk that wears out. Pure: the caller has the clock."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

_DAY_S = 86_400.0
_BURST_S = 600.0
"""Time whose unused writes may be made at once: a burst of prompts, or RAM at a close."""


class WriteBudget:
    """Bytes a day, with a burst of ten minutes' worth: a token bucket (Turner, *New directions in
    communications*, IEEE Communications Magazine 24(10), 1986), full at first.

    A drive's data sheet gives the number: terabytes written / days of warranty, or drive-writes per
    day * its size. Guarded by the Store's lock, and by ``lock`` where several Stores share it.
    """

    def __init__(
        self, a_day: int, least: int, lock: AbstractContextManager[object] | None = None
    ) -> None:
        """Begin full. ``a_day``: bytes. ``least``: bytes of one write that a full bucket allows."""
        self._lock = lock or nullcontext()
        self._rate = a_day / _DAY_S
        self._most = self._level = max(self._rate * _BURST_S, float(least))
        self._at: float | None = None

    def fit(self, least: int) -> None:
        """Allow single writes of ``least`` bytes."""
        with self._lock:
            more = max(0.0, least - self._most)
            self._most += more
            self._level += more

    def allows(self, bytes_: int, now: float) -> bool:
        """Return whether this many bytes may be written at ``now`` (monotonic seconds)."""
        with self._lock:
            passed = 0.0 if self._at is None else max(0.0, now - self._at)
            self._level = min(self._most, self._level + passed * self._rate)
            self._at = now
            return self._level >= bytes_

    def spend(self, bytes_: int) -> None:
        """Take the bytes that :meth:`allows` has just allowed."""
        with self._lock:
            self._level -= bytes_
