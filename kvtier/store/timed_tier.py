"""TimedTier: a tier with its lane, as its readers find it: every call timed, every waiting read
counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Executor, Work
from kvtier.core.lookup import Asking
from kvtier.load_policy.latency import Pace
from kvtier.tiers.base import Tier, owners_in, write_for


class TimedTier:
    """Safe from any thread. Its lock guards the pace, is held for a few instructions, and may be
    taken under the Store's. ``clock``: monotonic seconds."""

    def __init__(self, tier: Tier, lane: Executor, clock: Callable[[], float]) -> None:
        self._tier, self._lane, self._clock = tier, lane, clock
        self._lock = threading.Lock()
        self._pace = Pace(lane.threads)

    # ---- forecasts -------------------------------------------------------------------------------

    def wait(self, reads: int) -> float | None:
        """See Pace.wait."""
        with self._lock:
            return self._pace.wait(reads, self._clock())

    def asking(self, keys: int) -> Asking:
        """What asking this shared tier for ``keys`` chunks would take."""
        with self._lock:
            now = self._clock()
            return Asking(self._pace.wait(1, now), self._pace.wait(1 + keys, now), self._pace.odds)

    # ---- work for the lane -----------------------------------------------------------------------

    def submit(self, work: Work) -> bool:
        """Queue a read, or a find, that somebody waits for. False: refused."""

        def begin() -> None:
            with self._lock:
                self._pace.queued -= 1
            work()

        with self._lock:
            self._pace.queued += 1
        if self._lane.submit(begin, urgent=True):
            return True
        with self._lock:
            self._pace.queued -= 1
        return False

    def probe(self, work: Work) -> None:
        """Queue ``work``, which reads one chunk that nobody waits for, if it is time to try the
        tier again."""
        with self._lock:
            due = self._pace.probe_due(self._clock())
        if due and not self._lane.submit(partial(self._probe, work)):
            self._probe(_nothing)

    def _probe(self, work: Work) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._pace.probed(self._clock())

    # ---- the tier's calls, on lane threads -------------------------------------------------------

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        call, whole = self._begun(), None
        try:
            whole = self._tier.read(key, into)
        finally:
            with self._lock:
                self._pace.read(call, self._clock(), bool(whole))
        return whole

    def write(self, key: ChunkKey, data: memoryview, owner: int) -> bool:
        call, stored = self._begun(), False
        try:
            stored = write_for(self._tier, key, data, owner)
        finally:
            with self._lock:
                self._pace.wrote(call, self._clock(), stored)
        return stored

    def find(self, keys: Sequence[ChunkKey]) -> int:
        call, found = self._begun(), 0
        try:
            found = self._tier.find(keys)
        finally:
            with self._lock:
                self._pace.asked(call, self._clock(), found / max(1, len(keys)))
        return found

    def owners(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Whose chunks these are, 0 for nobody's; see OwnerKeeper. At the start too."""
        return owners_in(self._tier, keys)

    def _begun(self) -> int:
        with self._lock:
            return self._pace.begun(self._clock())


def _nothing() -> None:
    """There was no room for a trial."""
