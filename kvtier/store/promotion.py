"""Promotions: chunks on their way from lower tiers into slots, one by one or part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import EllipsisType

from kvtier.store.directory import FILLING, Entry
from kvtier.store.layerwise import Layerwise
from kvtier.store.lease import LoadLease
from kvtier.store.lower_tier import Below, Core

Start = Callable[[], None]


class Promotions:
    """``arrived`` is told, on a lane thread without the lock, whenever one has ended. Safe from any thread."""

    def __init__(self, core: Core, below: Sequence[Below], arrived: Callable[[], None]) -> None:
        self._core, self._below, self._arrived = core, below, arrived
        self._fillings = count(1)
        self._queued: set[Entry] = set()
        """Their reads have not begun."""
        self._in_parts: dict[Entry, Layerwise] = {}

    def begin(self, promotions: Sequence[tuple[Entry, int]]) -> None:
        """Read each of these FILLING entries from its tier (by index). What a lane refuses is a miss."""
        with self._core.lock:
            self._queued.update(entry for entry, _ in promotions)
        for entry, index in promotions:
            if not self._below[index].timed.submit(partial(self._promote, entry, index)):
                self._give_up(entry)

    def in_parts(self, lease: LoadLease, promotions: Sequence[tuple[Entry, int]], cuts: Sequence[int]) -> Start | None:
        """Under the lock: what begins all of them part by part, the parts of a slot ending at these bytes. None when
        something that the lease waits for cannot come so."""
        tiers = {index for _, index in promotions}
        waited = sum(entry.state is FILLING for entry in lease.entries)
        if len(tiers) != 1 or waited != len(promotions) or not self._below[min(tiers)].timed.in_parts:
            return None
        if self._below[min(tiers)].away:  # a step that began with its first layers would be thrown away
            return None
        index, entries = min(tiers), [entry for entry, _ in promotions]
        numbers = {entry.key: next(self._fillings) for entry in entries}
        lease.fillings = [numbers.get(entry.key, 0) for entry in lease.entries]
        ended = partial(self._ended_in_parts, index)
        ways = Layerwise(self._core.lock, self._core.pool, self._below[index].timed, cuts, ended)
        self._in_parts.update(dict.fromkeys(entries, ways))
        return partial(ways.fill, entries, list(numbers.values()))

    def unpinned(self, entry: Entry) -> None:
        """Under the lock: who waited for it has gone. A read that has not begun never will, and its slot is free at
        once: behind a tier that hangs, what nobody wants would take all of RAM."""
        if entry.pins:
            return
        ways = self._in_parts.get(entry)
        if entry in self._queued or (ways is not None and ways.give_up(entry)):
            self._ended_at_all(entry)
            self._core.directory.fill_failed(entry)

    def _ended_at_all(self, entry: Entry) -> None:
        """Under the lock."""
        self._queued.discard(entry)
        self._in_parts.pop(entry, None)

    def _promote(self, entry: Entry, index: int) -> None:
        """On a lane thread. A chunk that nobody waits for any more is not read."""
        with self._core.lock:
            if entry not in self._queued:
                return
            self._queued.discard(entry)
            if not entry.pins:
                self._core.directory.fill_failed(entry)
                return
        self._ended(index, entry, self._below[index].read(entry))

    def _ended(self, index: int, entry: Entry, whole: bool | None) -> None:
        """On a lane thread: so the read went. A failed one tries the next slower tier that holds the chunk, none twice;
        then it is a miss."""
        again, directory = None, self._core.directory
        with self._core.lock:
            self._below[index].was_read(entry, whole)
            if not whole:
                again = next((other for other in directory.holders(entry.key) if other > index), None)
                if again is None:
                    directory.fill_failed(entry)
        if again is not None:
            self.begin([(entry, again)])
        self._arrived()

    def _ended_in_parts(self, index: int, entry: Entry, whole: bool | EllipsisType | None) -> None:
        """No other tier is tried: who waits was told that this filling has failed."""
        if whole is ...:
            self._give_up(entry)
            return
        with self._core.lock:
            self._ended_at_all(entry)
            self._below[index].was_read(entry, whole)
            if not whole:
                self._core.directory.fill_failed(entry)
        self._arrived()

    def _give_up(self, entry: Entry) -> None:
        with self._core.lock:
            self._ended_at_all(entry)
            self._core.counts["promotion_refused"] += 1
            self._core.directory.fill_failed(entry)
