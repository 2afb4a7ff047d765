"""Circuit breaker: a place that keeps failing is left alone for a while, then tried again by one
caller.

After Nygard, *Release It!*, chapter "Stability Patterns". It knows nothing of what it guards and
has no thread: the calls themselves turn it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable


class Breaker:
    """Closed (all calls go) until ``faults`` faults in a row; then open (no call goes) for
    ``wait_s``; then one call may try. Its success closes the breaker, its fault doubles the wait,
    up to ``longest_wait_s``.

    A place that comes and goes lets a trial through now and then, and then fails who relied on it.
    So a breaker that opens again within ``longest_wait_s`` of closing goes on where it was: with
    twice its last wait.

    A trial that never reports back is given up after the same wait, so that a lost caller cannot
    keep it open.

    Threads: any; its lock is held for a few instructions.
    """

    def __init__(
        self, faults: int, wait_s: float, longest_wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._bound, self._first_wait, self._longest_wait, self._clock = (
            faults,
            wait_s,
            longest_wait_s,
            clock,
        )
        self._lock = threading.Lock()
        self._faults = 0
        self._wait = wait_s
        self._calm_at = -math.inf
        """From then on what was before is forgotten."""
        self._until: float | None = None
        """None: closed. Else the time from which one call may try."""
        self._trying = False

    @property
    def open(self) -> bool:
        return self._until is not None

    @property
    def wait_s(self) -> float:
        """How long it stays, or stayed, open before the next trial."""
        return self._wait

    def allows(self) -> bool:
        """May this call go? Whoever gets True reports :meth:`ok` or :meth:`fault`."""
        with self._lock:
            if self._until is None:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._trying, self._until = True, now + self._wait
            return True

    def ok(self) -> bool:
        """A call succeeded. True when this closed the breaker."""
        with self._lock:
            closed = self._until is not None
            if closed:
                self._calm_at = self._clock() + self._longest_wait
            self._faults, self._until, self._trying = 0, None, False
            return closed

    def fault(self) -> bool:
        """A call failed. True when this opened the breaker."""
        with self._lock:
            if self._until is None:
                self._faults += 1
                if self._faults < self._bound:
                    return False
                now = self._clock()
                self._wait = self._first_wait if now >= self._calm_at else self._doubled()
                self._until = now + self._wait
                return True
            # Calls that began before it opened report late; only the trial's fault says that the
            # place is still bad.
            if self._trying:
                self._trying = False
                self._wait = self._doubled()
                self._until = self._clock() + self._wait
            return False

    def _doubled(self) -> float:
        return min(2 * self._wait, self._longest_wait)
