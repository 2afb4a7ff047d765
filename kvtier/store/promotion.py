"""Promotions: chunks on their way from lower tiers into slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvtier.store.directory import Entry
from kvtier.store.lower_tier import Core, LowerTier


class Promotions:
    """``arrived`` is called whenever a promotion has ended, on a lane thread without the lock. Safe
    from any thread."""

    def __init__(
        self,
        core: Core,
        below: Sequence[LowerTier],
        arrived: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._core, self._below, self._arrived, self._clock = core, below, arrived, clock
        self._queued: dict[Entry, float] = {}
        """The entries whose reads have not begun, with the time since when they wait."""

    def begin(self, promotions: Sequence[tuple[Entry, int]]) -> None:
        """Read each of these FILLING entries from its tier (by index). An entry that a lane refuses
        is a miss."""
        now = self._clock()
        with self._core.lock:
            self._queued.update((entry, now) for entry, _ in promotions)
        for entry, index in promotions:
            if not self._below[index].timed.submit(partial(self._promote, entry, index)):
                self._give_up(entry)

    def unpinned(self, entry: Entry) -> None:
        """Under the lock: a waiter of the entry has gone. When it was the last one, a read that has
        not begun never begins, and its slot is free at once. Otherwise chunks that nobody wants
        would take all of RAM when a tier hangs."""
        if entry.pins:
            return
        if entry in self._queued:
            del self._queued[entry]
            self._core.directory.fill_failed(entry)

    def _promote(self, entry: Entry, index: int) -> None:
        """On a lane thread. A chunk that nobody waits for any more is not read."""
        with self._core.lock:
            begun = self._queued.pop(entry, None)
            if begun is None:
                return
            if not entry.pins:
                self._core.directory.fill_failed(entry)
                return
        self._ended(index, entry, self._below[index].read(entry), begun)

    def _ended(self, index: int, entry: Entry, whole: bool | None, begun: float) -> None:
        """On a lane thread: a read has ended. After a failed read the next slower tier that holds
        the chunk is tried, none twice. Then the chunk is a miss."""
        again, directory = None, self._core.directory
        with self._core.lock:
            self._below[index].was_read(entry, whole)
            if whole:
                self._core.timings.promotion[self._below[index].tier.name].add(
                    self._clock() - begun
                )
            else:
                again = next(
                    (other for other in directory.holders(entry.key) if other > index), None
                )
                if again is None:
                    directory.fill_failed(entry)
        if again is not None:
            self.begin([(entry, again)])
        self._arrived()

    def _give_up(self, entry: Entry) -> None:
        with self._core.lock:
            self._queued.pop(entry, None)
            self._core.counts["promotion_refused"] += 1
            self._core.directory.fill_failed(entry)
