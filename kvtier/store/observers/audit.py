"""Audit: compares one in 1,000 loaded chunks, in the background, with its copy in a lower tier.

Every read from a tier is compared with its checksum anyway. That cannot see a slot that changes
after it was filled: memory that flips bits, or a write through a stale address."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.core.chunk import ChunkKey
from kvtier.store.entry import READY, Entry
from kvtier.store.lower.lower_tier import Core, LowerTier
from kvtier.store.observer import Observer

logger = logging.getLogger("kvtier")

AUDIT_CHUNKS = 1000
"""Loaded chunks for one that is compared: a thousandth more reads, behind all others."""
_PIECE_BYTES = 256 * 1024
"""Bytes compared at once: for about 0.1 ms no other thread runs Python."""


class Audit(Observer):
    """Compares slots with copies of the same origin: written from this slot, or read into it. A
    chunk that was computed twice may differ in its last bits and be right both times, so tiers to
    which others write are left out. ``invalidate`` is called without the lock."""

    def __init__(
        self,
        core: Core,
        lower_tiers: Sequence[LowerTier],
        invalidate: Callable[[Sequence[ChunkKey]], None],
    ) -> None:
        self.one_in = AUDIT_CHUNKS
        """Loaded chunks for one that is compared; 0: never. Tests set it before the first load."""
        self._core, self._lower_tiers, self._invalidate = core, lower_tiers, invalidate
        self._passed = 0
        self._said = False

    def loaded(self, entries: Sequence[Entry]) -> None:
        """Queue a comparison if one is due, behind all that requests wait for."""
        passed = self._passed + len(entries)
        if not self.one_in or passed < self.one_in:
            self._passed = passed
            return
        for entry in entries:
            self._passed += 1
            due = self._passed >= self.one_in and entry.copies
            if due and (lower := self._copy(entry)) is not None:
                self._passed = 0
                lower.lane.submit(partial(self._compare, entry, lower))

    def _copy(self, entry: Entry) -> LowerTier | None:
        """Return the fastest tier that holds exactly the bytes of this slot. Under the lock."""
        holders = self._core.directory.holders(entry.key) if entry.state is READY else ()
        same = (self._lower_tiers[index] for index in holders if entry.copies >> index & 1)
        return next((lower for lower in same if not lower.tier.shared), None)

    def _compare(self, entry: Entry, lower: LowerTier) -> None:
        """Compare a chunk with the tier's copy, on a lane thread. The slot is pinned only from here
        on: a long queue holds no slots."""
        core = self._core
        lower.sweep()
        with core.lock:
            if self._copy(entry) is not lower:
                return
            core.directory.pin(entry)
        same = None
        try:
            copy = lower.try_read(entry.key)
            same = None if copy is None else _same(core.pool.view(entry.slot), copy)
        finally:
            with core.lock:
                core.directory.unpin((entry,))
                core.counts["audited"] += same is not None
                core.counts["audit_mismatch"] += same is False
        if same is False:
            self._say(entry.key, lower.tier.name)
            self._invalidate([entry.key])

    def _say(self, key: ChunkKey, tier: str) -> None:
        if not self._said:
            self._said = True
            logger.error(
                "audit: chunk %s has other bytes in RAM than in %s, although one is a copy of the "
                "other. It is dropped everywhere. Test this host's memory, and report this if the "
                "memory is sound. Further cases are only counted",
                key.hex()[:16],
                tier,
            )


def _same(one: memoryview, other: memoryview) -> bool:
    """Compare in pieces. Two bytes objects compare much faster than two views, but are copies."""
    pieces = range(0, len(one), _PIECE_BYTES)
    return all(
        bytes(one[at : at + _PIECE_BYTES]) == bytes(other[at : at + _PIECE_BYTES]) for at in pieces
    )
