"""How long one tier takes: its reads, its queue, and when to try it again. Pure: every time comes
from the caller, in monotonic seconds. No clock, lock or I/O.

What is learned is forgotten with time, so that a tier that changes is believed to have changed.
Owners guard these objects with their own lock.
"""

from __future__ import annotations

import math

_FORGET_S = 2.0
"""Pause between two samples after which the newer one has a weight of 63 %."""
_LEAST_SAY_PART = 1 / 8
_BURST_S = -_FORGET_S * math.log(1 - _LEAST_SAY_PART)
"""Pause between two samples below which the newer one has the least weight."""
_PROBE_S, _PROBE_READS, _LONGEST_PROBE_S = 2.0, 4.0, 30.0
"""Pause between trial reads of a declined tier: a base, reads whose time is added, the longest."""


class Average:
    """Exponentially weighted moving average (Roberts 1959) of samples that come at irregular times.

    A sample's weight grows with the time since the last one (the "last point" scheme of Zumbach and
    Müller, *Operators on inhomogeneous time series*, 2001), from 1/8 in a burst to nearly 1 after a
    long silence.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.at = 0.0

    def add(self, sample: float, now: float) -> None:
        """Add a sample. One that is negative or not finite (a clock that jumped) is left out."""
        if not 0 <= sample < math.inf:
            return
        if self.value is None:
            self.value = sample
        else:
            passed, say = now - self.at, _LEAST_SAY_PART
            if passed > _BURST_S:
                say = 1 - math.exp(-passed / _FORGET_S)
            self.value = (1 - say) * self.value + say * sample
        self.at = now


class Pace:
    """One tier's lane: what its threads do now, what waits for them, how long one chunk takes.

    All chunks of a Store are equally large, so latency and bandwidth need not be told apart:
    seconds a chunk, measured with as many reads beside it as there usually are.
    """

    def __init__(self, threads: int, *, comes_whole: bool = False) -> None:
        self.comes_whole = comes_whole
        self.queued = 0
        self.odds = 1.0
        """Expected part of what a shared tier is asked for that it turns out to hold."""
        self.remembered_s: float | None = None
        """Seconds of one read in an earlier run. Counts until there was a read in this one."""
        self._threads = max(1, threads)
        self._reads, self._writes = Average(), Average()
        self._begun: dict[int, float] = {}
        self._calls = 0
        self._probing = False
        self._probed_at = -math.inf

    @property
    def chunk_s(self) -> float | None:
        """Return the seconds of one read: of this run, else of an earlier, else of one write."""
        known = self._reads.value, self.remembered_s, self._writes.value
        return next((seconds for seconds in known if seconds is not None), None)

    @property
    def read_s(self) -> float | None:
        return self._reads.value

    def begun(self, now: float) -> int:
        """Note that a thread calls the tier. Returns the number of this call."""
        self._calls += 1
        self._begun[self._calls] = now
        return self._calls

    def read(self, call: int, now: float, whole: bool) -> None:
        """Note the end of a read. One that failed says how slow the tier can be, never how fast."""
        self._took(now - self._begun.pop(call), now, whole)

    def wrote(self, call: int, now: float, stored: bool) -> None:
        seconds = now - self._begun.pop(call)
        if stored:
            self._writes.add(seconds, now)

    def asked(self, call: int, now: float, found: float) -> None:
        """Note the end of a find, in which the tier held the part ``found`` of the run."""
        self._took(now - self._begun.pop(call), now, whole=False)
        self.odds += _LEAST_SAY_PART * (found - self.odds)

    def wait(self, reads: int, now: float) -> float | None:
        """Return the seconds until ``reads`` more reads have ended, behind all that is queued and
        under way. None if unknown.

        A fluid queue of equal threads: each takes work from when it is free, and all end together.
        A call that is overdue is expected to last as long again as it has lasted (Lindy's law), so
        a tier that stalls is believed slow before the first call fails."""
        ages = [max(0.0, now - at) for at in self._begun.values()]
        one = self.chunk_s
        if one is None:
            if not ages:
                return None
            one = max(ages)
        free = sorted(age if age > one else one - age for age in ages)[: self._threads]
        free = [0.0] * (self._threads - len(free)) + free
        work, end = (self.queued + reads) * one, 0.0
        for threads in range(1, self._threads + 1):
            end = (work + sum(free[:threads])) / threads
            if threads == self._threads or end <= free[threads]:
                break
        return max(end, free[0] + one)

    def probe_due(self, now: float) -> bool:
        """Return whether to read one chunk now to learn the pace. Then :meth:`probed` follows."""
        pause = min(_PROBE_S + _PROBE_READS * (self.chunk_s or 0.0), _LONGEST_PROBE_S)
        if self._probing or now - self._probed_at < pause:
            return False
        self._probing = True
        return True

    def probed(self, now: float) -> None:
        self._probing, self._probed_at = False, now

    def _took(self, seconds: float, now: float, whole: bool) -> None:
        if whole or seconds > (self.chunk_s or 0.0):
            self._reads.add(seconds, now)
