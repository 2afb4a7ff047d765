"""EventCounts: what happened in one tier since the start, and the first fault of each kind in the
log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

EVENTS = (
    *("writes", "reads", "misses", "bytes_written", "bytes_read"),
    *("failed_writes", "failed_reads", "corrupt", "refused"),
)
AWAY_EVENTS = (*EVENTS, "failed_finds", "failed_deletes", "breaker_trips")


class EventCounts:
    """``place``: the tier's name in the log. Threads: any."""

    def __init__(self, events: Iterable[str], logger: logging.Logger, place: str) -> None:
        self.values = dict.fromkeys(events, 0)
        self._logger, self._place = logger, place
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def add(self, event: str, by: int = 1) -> None:
        with self._lock:
            self.values[event] += by

    def log_first(self, kind: str, what: object) -> None:
        """Log the first fault of this kind. Later ones are only counted."""
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        self._logger.warning(
            "%s: first fault of kind %s: %s (only counted from now on)", self._place, kind, what
        )
