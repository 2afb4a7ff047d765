"""Circuit breaker: a machine that keeps failing is left alone for a while, then tried again by one
caller. The only place where a tier, or a server, waits before it is tried again.

After Nygard, *Release It!*, chapter "Stability Patterns". It knows nothing of what it guards and
has no thread: the calls themselves change its state.

It belongs to the tier, which has one for each machine and reports every call to it. The Store asks
the same breaker before it takes a slot for a read (:meth:`kvtier.tiers.base.Tier.may_read`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

OPENING_FAULTS = 3
WAIT_S, LONGEST_WAIT_S = 0.5, 30.0


class Breaker:
    """State of a machine: closed (all calls go) until ``faults`` faults in a row, then open (no
    call goes) for ``wait_s``. Then one call may try. Its success closes the breaker, its fault
    doubles the wait, up to ``longest_wait_s``.

    A machine that comes and goes passes a trial now and then. So a breaker that opens again within
    ``longest_wait_s`` of closing waits twice as long as the last time.

    A trial that is reserved and not begun, or that never reports back, is given up after the same
    wait, so that a lost caller cannot keep the breaker open. Threads: any."""

    def __init__(
        self,
        clock: Callable[[], float],
        faults: int = OPENING_FAULTS,
        wait_s: float = WAIT_S,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._clock = clock
        self._bound = faults
        self._first_wait, self._longest_wait = wait_s, longest_wait_s
        self._lock = threading.Lock()
        self._faults = 0
        self._wait = wait_s
        self._calm_at = -math.inf
        """Time from which earlier faults do not lengthen the wait."""
        self._until: float | None = None
        """Time from which one call may try; None while closed."""
        self._reserved = False
        """Whether a trial is kept for the next call."""
        self._trying = False

    @property
    def open(self) -> bool:
        return self._until is not None

    @property
    def wait_s(self) -> float:
        """Seconds from opening to the next trial."""
        return self._wait

    def reserves(self) -> bool:
        """Return whether a call is worth its preparation. While the breaker is open, one caller
        gets True when a trial is due, which is then kept for the first call that comes."""
        with self._lock:
            if self._until is None:
                return True
            if not self._due():
                return False
            self._reserved = True
            return True

    def allows(self) -> bool:
        """Return whether this call may go. If so its end is told by :meth:`ok` or :meth:`fault`."""
        with self._lock:
            if self._until is None:
                return True
            if not self._reserved and not self._due():
                return False
            self._reserved, self._trying = False, True
            return True

    def _due(self) -> bool:
        """Return whether a trial is due. The next is due after the same wait. Under the lock."""
        now = self._clock()
        if self._until is None or now < self._until:
            return False
        self._until = now + self._wait
        return True

    def ok(self) -> bool:
        """Note a call that succeeded. Returns whether this closed the breaker."""
        with self._lock:
            closed = self._until is not None
            if closed:
                self._calm_at = self._clock() + self._longest_wait
            self._faults, self._until = 0, None
            self._reserved = self._trying = False
            return closed

    def fault(self) -> bool:
        """Note a call that failed. Returns whether this opened the breaker."""
        with self._lock:
            if self._until is None:
                self._faults += 1
                if self._faults < self._bound:
                    return False
                now = self._clock()
                self._wait = self._first_wait if now >= self._calm_at else self._doubled()
                self._until = now + self._wait
                return True
            # Calls that began before it opened report late. Only the trial's fault says that the
            # machine is still bad.
            if self._trying:
                self._trying = False
                self._wait = self._doubled()
                self._until = self._clock() + self._wait
            return False

    def _doubled(self) -> float:
        return min(2 * self._wait, self._longest_wait)
