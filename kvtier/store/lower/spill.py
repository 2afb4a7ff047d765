"""Spills: chunks on their way from slots to one lower tier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvtier.core.chunk import ChunkKey
from kvtier.store.entry import GONE, READY, Entry
from kvtier.store.lower.lower_tier import Core, LowerTier


class Spills:
    """Writes to one tier, within its budget. Safe from any thread."""

    def __init__(self, core: Core, lower: LowerTier) -> None:
        self.lower, self.budget = lower, lower.budget
        self._core, self._clock = core, core.clock
        self._directory, self._counts = core.directory, core.counts
        self._chunk_bytes = lower.tier.chunk_room or core.pool.slot_bytes
        if self.budget is not None:
            self.budget.fit(self._chunk_bytes)

    def offer(self, entries: Sequence[Entry], run: Sequence[ChunkKey]) -> None:
        """Queue a spill of each of these chunks of ``run``. Takes the lock."""
        taken = sum(self.lower.lane.submit(partial(self._spill, entry, run)) for entry in entries)
        with self._core.lock:
            self._counts[f"{self.lower.tier.name}_spill_refused"] += len(entries) - taken

    def _spill(self, entry: Entry, run: Sequence[ChunkKey]) -> None:
        """Write a chunk to the tier. It is pinned only from here on: a long queue holds no slots,
        and chunks evicted before their turn are not written. On a lane thread."""
        lower = self.lower
        lower.sweep()
        with self._core.lock:
            takes = entry.state is READY and self._affords(entry.key)
            victims = self._directory.spill_begun(entry, lower.index) if takes else None
            if victims is not None and self.budget is not None:
                self.budget.spend(self._chunk_bytes)
            if entry.state is GONE:
                self._counts[f"{lower.tier.name}_spill_late"] += 1
        if victims is None:
            return
        lower.delete(victims)
        with self._core.lock:
            begun = self._clock()
            call = lower.pace.begun(begun)
            self._counts[f"{lower.tier.name}_evicted"] += len(victims)
        stored = False
        try:
            stored = lower.tier.write(entry.key, self._core.pool.view(entry.slot), entry.owner)
        finally:
            self._ended(entry, run, stored, call, begun)
        lower.sweep()

    def _ended(
        self, entry: Entry, run: Sequence[ChunkKey], stored: bool, call: int, begun: float
    ) -> None:
        """End a write. Then ``run`` is hottest in the tier, as in RAM. On a lane thread."""
        lower, name = self.lower, self.lower.tier.name
        with self._core.lock:
            now = self._clock()
            lower.pace.wrote(call, now, stored)
            if stored:
                self._core.took("spill", name, now - begun)
            self._counts[f"{name}_stored" if stored else f"{name}_store_failed"] += 1
            if not self._directory.spill_ended(entry, lower.index, stored):
                lower.discard(entry.key)
            lower.chunks.order.ordered(run)

    def _affords(self, key: ChunkKey) -> bool:
        """Return whether the budget allows a write now. If not, nothing leaves. Under the lock."""
        if self.budget is None or self.budget.allows(self._chunk_bytes, self._clock()):
            return True
        self._counts[f"{self.lower.tier.name}_write_over_budget"] += self.lower.chunks.takes(key)
        return False
