"""Promotions: chunks on their way from lower tiers into slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvtier.store.entry import Entry
from kvtier.store.lower.lower_tier import Core, LowerTier


class Promotions:
    """Reads into slots. ``arrived``: called after each, on a lane thread without the lock."""

    def __init__(
        self, core: Core, lower_tiers: Sequence[LowerTier], arrived: Callable[[], None]
    ) -> None:
        self._core, self._lower_tiers = core, lower_tiers
        self._arrived, self._clock = arrived, core.clock
        self._queued: dict[Entry, float] = {}
        """Entries whose reads have not begun -> time since when they wait."""

    def begin(self, promotions: Sequence[tuple[Entry, int]]) -> None:
        """Read each FILLING entry from its tier (by index). A refused read is a miss."""
        if not promotions:
            return
        now = self._clock()
        with self._core.lock:
            for entry, index in promotions:
                self._queued[entry] = now
                self._lower_tiers[index].pace.queued += 1
        for entry, index in promotions:
            lower = self._lower_tiers[index]
            if not lower.lane.submit(partial(self._promote, entry, lower), urgent=True):
                self._give_up(entry, lower)

    def unpinned(self, entries: Sequence[Entry]) -> None:
        """Under the lock: a waiter of the entries has gone. After the last one, a read that has not
        begun never begins, and its slot is free at once. Otherwise chunks that no request wants
        would take all of RAM when a tier hangs."""
        for entry in entries if self._queued else ():
            if not entry.pins and self._queued.pop(entry, None) is not None:
                self._core.directory.fill_failed(entry)

    def _promote(self, entry: Entry, lower: LowerTier) -> None:
        """Read a chunk unless no waiter is left. On a lane thread."""
        with self._core.lock:
            lower.pace.queued -= 1
            since = self._queued.pop(entry, None)
            if since is None:
                return
            if not entry.pins:
                self._core.directory.fill_failed(entry)
                return
            call = lower.pace.begun(self._clock())
        whole = None
        try:
            whole = lower.tier.read(entry.key, self._core.pool.view(entry.slot))
        finally:
            self._ended(entry, lower, whole, call, since)

    def _ended(
        self, entry: Entry, lower: LowerTier, whole: bool | None, call: int, since: float
    ) -> None:
        """End a read. If it failed, the next slower tier that holds the chunk is tried, none twice.
        Then the chunk is a miss. On a lane thread."""
        again, directory = None, self._core.directory
        with self._core.lock:
            now = self._clock()
            lower.pace.read(call, now, bool(whole))
            lower.was_read(entry, whole)
            if whole:
                self._core.took("promotion", lower.tier.name, now - since)
            else:
                again = next(
                    (other for other in directory.holders(entry.key) if other > lower.index), None
                )
                if again is None:
                    directory.fill_failed(entry)
        if again is not None:
            self.begin([(entry, again)])
        self._arrived()

    def _give_up(self, entry: Entry, lower: LowerTier) -> None:
        with self._core.lock:
            lower.pace.queued -= 1
            self._queued.pop(entry, None)
            self._core.counts["promotion_refused"] += 1
            self._core.directory.fill_failed(entry)
