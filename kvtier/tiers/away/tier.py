"""AwayTier: common parts of tiers whose chunks lie on other machines.

A machine that fails is left alone for a while, then tried by one call. Failed deletions are owed,
and made good after the next call that succeeds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from kvtier.core.chunk import ChunkKey, coldest_first
from kvtier.core.errors import StateError
from kvtier.core.steps import pieces
from kvtier.tiers.base import AWAY_EVENTS, EventCounts, Tier
from kvtier.tiers.breaker import OPENING_FAULTS, Breaker

_DELETE_CHUNKS = 32
_OWED_CHUNKS = 65_536


class OwedDeletions:
    """Deletions that failed. ``delete`` deletes chunks, and owes them again (:meth:`add`) where
    that fails. Threads: any. No I/O under the lock."""

    def __init__(self, delete: Callable[[Sequence[ChunkKey]], None]) -> None:
        self._delete = delete
        self._lock = threading.Lock()
        self._owed: dict[ChunkKey, None] = {}
        self.going: set[ChunkKey] = set()

    def __len__(self) -> int:
        return len(self._owed)

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Owe these deletions too. Beyond 65,536 the oldest are given up."""
        with self._lock:
            self._owed.update(dict.fromkeys(keys))
            while len(self._owed) > _OWED_CHUNKS:
                del self._owed[next(iter(self._owed))]

    def cancel(self, key: ChunkKey) -> bool:
        """Cancel the deletion of a chunk to be written. Returns False if it is under way."""
        with self._lock:
            if key in self.going:
                return False
            self._owed.pop(key, None)
            return True

    def make_good(self) -> None:
        """Delete a few of the owed chunks, once the store answers."""
        if not self._owed:
            return
        with self._lock:
            keys = [key for key in islice(self._owed, _DELETE_CHUNKS) if key not in self.going]
            for key in keys:
                del self._owed[key]
            self.going.update(keys)
        try:
            self._delete(keys)
        finally:
            with self._lock:
                self.going.difference_update(keys)


_LOG = logging.getLogger(__name__)
_MAX_CHUNK_BYTES = 1 << 30
ASKED_CHUNKS = 512


class AwayTier(Tier):
    """Tier whose chunks others see and write too. ``place``: the tier's name in logs. ``events``:
    counts besides :data:`AWAY_EVENTS`."""

    shared = True

    def __init__(
        self, place: str, chunk_bytes: int, clock: Callable[[], float], *events: str
    ) -> None:
        if not 0 < chunk_bytes <= _MAX_CHUNK_BYTES:
            raise StateError(f"chunk_bytes={chunk_bytes}: expected 1 to {_MAX_CHUNK_BYTES}")
        self.chunk_bytes = chunk_bytes
        self._place, self._clock = place, clock
        self._events = EventCounts((*AWAY_EVENTS, *events), _LOG, place)
        self._owed = OwedDeletions(self._unlink)
        self._closed = False

    @property
    def counts(self) -> Mapping[str, int]:
        return self._events.values

    @property
    def owed(self) -> int:
        return len(self._owed)

    def find(self, keys: Sequence[ChunkKey]) -> int:
        held = 0
        for run in pieces(keys, ASKED_CHUNKS):
            found = self._held(run)
            held += found
            if found < len(run):
                break
        return held

    def _held(self, run: Sequence[ChunkKey]) -> int:
        raise NotImplementedError

    def delete(self, key: ChunkKey) -> None:
        self._unlink([key])

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Close the tier. The next start sorts by the store's own times, so no order is kept."""
        self._closed = True

    def _unlink(self, keys: Sequence[ChunkKey]) -> None:
        """Delete these chunks. What fails is owed."""
        raise NotImplementedError

    def _check_size(self, data: memoryview) -> None:
        if not 0 < data.nbytes <= self.chunk_bytes:
            raise StateError(
                f"a chunk of {data.nbytes} bytes for a tier of chunks of {self.chunk_bytes} bytes"
            )

    def _newest(self, stamps: Mapping[ChunkKey, Any], how: str = "") -> Sequence[ChunkKey]:
        """Return the chunks found at the start, coldest first, as many as our share holds."""
        order = coldest_first(stamps.items())
        if order:
            _LOG.info(
                "%s: %d chunks found%s, %d more than our share are left to other servers",
                self._place,
                len(order),
                how,
                max(0, len(order) - self.capacity),
            )
        return order[max(0, len(order) - self.capacity) :]

    # ---- faults ----------------------------------------------------------------------------------

    def _answered(self, breaker: Breaker, *, settle: bool) -> None:
        """Note a call that succeeded. ``settle``: delete owed chunks now."""
        if breaker.ok():
            _LOG.info("%s: answers again", self._place)
        if settle:
            self._owed.make_good()

    def _failed(self, breaker: Breaker | None, count: str, told: object) -> None:
        """Count and log a call that failed. ``told``: words without secrets."""
        self._events.add(count)
        self._events.log_first(count, told)
        if breaker is not None and breaker.fault():
            self._events.add("breaker_trips")
            _LOG.warning(
                "%s: %d faults in a row; every call misses for %.1f s, then one tries again (%s)",
                self._place,
                OPENING_FAULTS,
                breaker.wait_s,
                told,
            )
