"""SetDisk: one disk of a :class:`~kvtier.tiers.nvme.disk_set.DiskSet`: its folder, the calls to it,
its pace, and what becomes of it after a fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from threading import Condition

from xxhash import xxh3_64_hexdigest

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import TierError
from kvtier.core.lanes import Lane
from kvtier.core.report import DiskStatus
from kvtier.tiers.breaker import OPENING_FAULTS, Breaker
from kvtier.tiers.nvme.chunk_folder import ChunkFolder

FROZEN_S = 2.0
"""Least age of a call from which on its disk hangs. A slow disk's is longer."""
_SLOWEST_BYTES_S = 25e6
"""Least bytes a second of a disk that works, before its pace is known."""
_HANGS_FACTOR = 16
"""Factor of the usual time of a call after which the disk hangs."""
_LATE_FACTOR, _LATE_S = 8, 0.05
"""Factor of other disks' time for a call, and its least, after which nobody waits for it."""
_FIRST_CALLS, _PACE_CALLS = 16, 64
"""Calls after which a disk's pace is known, and calls over which it is averaged."""
_OUT_FACTOR = 4
"""Factor by which one call may differ from the average."""
_TOLD = ("bytes_read", "bytes_written", "failed_reads", "failed_writes")


class SetDisk:
    """State of one disk, guarded by the set's lock, but for what says otherwise. Only a disk that
    is well, or a call that tries it again, has calls.

    Args:
        most_calls: the most at once. A disk that hangs holds this many threads of the lane.
        freed: a condition on the set's lock.
    """

    def __init__(
        self,
        chunks: ChunkFolder,
        most_calls: int,
        freed: Condition,
        clock: Callable[[], float],
    ) -> None:
        self.chunks, self.folder = chunks, chunks.path
        """Folder, opened only by the one call that tries the disk again."""
        self.note = f"cleared-{xxh3_64_hexdigest(str(self.folder).encode())}-"
        """Prefix of empty files' names on other disks, which tell whose chunks are to be
        dropped."""
        self.most_calls, self.freed, self._clock = most_calls, freed, clock
        self.lane = Lane("disk", 1, urgent_bound=2, bound=1)
        """Thread of the disk: opens, tries and closes it, and deletes what it owes. Nobody waits
        for that longer than a bound."""
        self.breaker = Breaker(clock)
        self.away = "it has not answered since the start"
        """Reason why the disk is left alone, or "" while it is well."""
        self.due = 0.0
        """Turn of the set from which the disk gets the next chunk."""
        self._pace_s, self._paced = math.inf, 0
        slowest_s = most_calls * chunks.slot_bytes / _SLOWEST_BYTES_S
        self.frozen_s = max(FROZEN_S, slowest_s)
        """Age of a call from which on the disk hangs. Read without the lock."""
        self.late_s = math.inf
        """Age of a call from which on others do not wait for the disk. Read without the lock."""
        self._late_at, self._slow = -math.inf, False
        """End of the last call that was late, and whether no call has failed since."""
        self._begun: dict[int, float] = {}
        self._calls = self._faults = 0
        self.oldest = math.inf
        """Start of the oldest call. Read without the lock."""

    def well(self) -> bool:
        """Return whether the disk is not left alone, and answers. Without the lock."""
        return not self.away and self.answers()

    def answers(self) -> bool:
        """Return whether no call is late. Without the lock."""
        return self._clock() - self.oldest < min(self.frozen_s, self.late_s)

    def keep_up(self, pace_s: float) -> None:
        """Set when calls are late. ``pace_s``: of the fastest other disk, infinite if unknown."""
        self.late_s = max(_LATE_S, _LATE_FACTOR * self.most_calls * pace_s)

    @property
    def calls(self) -> int:
        return len(self._begun)

    @property
    def pace_s(self) -> float | None:
        """Seconds that the disk is busy with one chunk, once that is known."""
        return self._pace_s if self._paced >= _FIRST_CALLS else None

    def status(self) -> DiskStatus:
        """Return the disk's counts and state. Without the lock."""
        chunks, away = self.chunks, bool(self.away)
        return DiskStatus(
            disk=str(self.folder),
            away=away,
            held=0 if away else chunks.used,
            **{event: chunks.counts[event] for event in _TOLD},
        )

    # ---- calls -----------------------------------------------------------------------------------

    def begun(self) -> int:
        self._calls += 1
        self._begun[self._calls] = now = self._clock()
        self.oldest = min(self.oldest, now)
        return self._calls

    def ended(self, call: int, *, moved: bool) -> None:
        """Note the end of a call, and learn from it. ``moved``: a chunk was written or read."""
        beside, now = len(self._begun), self._clock()
        begun = self._begun.pop(call)
        seconds = (now - begun) / beside
        self.oldest = next(iter(self._begun.values()), math.inf)
        self.freed.notify()
        if self.away:
            return
        if (faults := self._failed) > self._faults:
            self.breaker.fault()
            self._slow = False
        elif now - begun >= self.late_s:
            if begun >= self._late_at:  # of calls at once the first one counts
                self.breaker.fault()
            self._late_at, self._slow = now, True
        elif moved:
            self.breaker.ok()
            self._paced = min(self._paced + 1, _PACE_CALLS)
            sample = min(seconds, _OUT_FACTOR * self._pace_s)
            before = 0.0 if self._paced == 1 else self._pace_s
            self._pace_s = before + (sample - before) / self._paced
            if (pace_s := self.pace_s) is not None:
                self.frozen_s = max(FROZEN_S, _HANGS_FACTOR * self.most_calls * pace_s)
        self._faults = faults

    @property
    def _failed(self) -> int:
        return self.chunks.counts["failed_reads"] + self.chunks.counts["failed_writes"]

    def fault(self) -> str:
        """Return why the disk has to be left alone from now on, "" if not."""
        if self._clock() - self.oldest >= self.frozen_s:
            return f"a call has lasted {self.frozen_s:.1f} s"
        if self.breaker.open and self._slow:
            return "it is far slower than the other disks"
        if self.breaker.open:
            return "its reads or writes fail: look at the kernel's log (dmesg)"
        return self.chunks.trouble

    def leave_alone(self, why: str) -> Sequence[ChunkKey]:
        """Leave the disk alone. Returns the chunks that it holds."""
        self.away = why
        for _ in range(OPENING_FAULTS):
            self.breaker.fault()
        self.freed.notify_all()
        return self.chunks.held()

    # ---- without the lock, by one call at a time -------------------------------------------------

    def try_again(self, *, lent: bool) -> None:
        """Open the folder unless what is open works. Raises TierError or OSError."""
        begun, chunks, was_open = self._clock(), self.chunks, self.chunks.was_open
        if was_open and chunks.works():
            if self._clock() - begun >= self.late_s / self.most_calls:
                raise TierError("it is far slower than the other disks")
            return
        chunks.open(lent=lent)
        self._faults = self._failed
        if was_open and not chunks.works():
            raise TierError("it was opened again, and cannot be read and written")
