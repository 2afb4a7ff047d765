"""Audit: one in so many loaded chunks is compared, in the background, with its copy in a lower
tier.

Every read from a tier is checked against its checksum as it is. What that cannot see is a slot that
changes after it was filled: memory that flips bits, or a write through a stale address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.store.directory import READY, Entry
from kvtier.store.lower_tier import Core, LowerTier

logger = logging.getLogger("kvtier")

ONE_IN = 1000
"""Loaded chunks for one that is compared: a thousandth more reads, behind all others."""
_PIECE_BYTES = 256 * 1024
"""Compared at once: for about 0.1 ms nobody else runs Python."""


class Pair(NamedTuple):
    """A slot and the tier that has its bytes too."""

    entry: Entry
    below: LowerTier


class Audit:
    """``invalidate`` drops chunks everywhere; it is called without the lock.

    Only copies of one origin are compared: written from this slot, or read into it. A chunk that
    was computed twice may differ in its last bits and be right both times. For that reason tiers
    that others write to are left out.
    """

    def __init__(
        self, core: Core, below: Sequence[LowerTier], forget: Callable[[Sequence[ChunkKey]], None]
    ) -> None:
        self.one_in = ONE_IN
        """Tests set another one, before the first load. 0: never."""
        self._core, self._below, self._forget = core, below, forget
        self._passed = 0
        self._said = False

    def drawn(self, loaded: Sequence[Entry]) -> list[Pair]:
        """Under the lock: of chunks that were loaded just now, those whose turn it is."""
        drawn: list[Pair] = []
        for entry in loaded if self.one_in else ():
            self._passed += 1
            if self._passed >= self.one_in and (below := self._copy(entry)) is not None:
                self._passed = 0
                drawn.append(Pair(entry, below))
        return drawn

    def begin(self, pairs: Sequence[Pair]) -> None:
        """Queue the comparisons, behind everything that somebody waits for. A full lane: this time
        not."""
        for pair in pairs:
            pair.below.lane.submit(partial(self._compare, pair))

    def _copy(self, entry: Entry) -> LowerTier | None:
        """Under the lock: the fastest tier that holds the very bytes of this slot."""
        holders = self._core.directory.holders(entry.key) if entry.state is READY else ()
        return next(
            (
                self._below[at]
                for at in holders
                if entry.copies >> at & 1 and not self._below[at].tier.shared
            ),
            None,
        )

    def _compare(self, pair: Pair) -> None:
        """On a lane thread. The slot is pinned only from here on: a long queue holds no slots."""
        (entry, below), core = pair, self._core
        below.sweep()
        with core.lock:
            if self._copy(entry) is not below:
                return
            core.directory.pin(entry)
        same = None
        try:
            copy = below.try_read(entry.key)
            same = None if copy is None else _same(core.pool.view(entry.slot), copy)
        finally:
            with core.lock:
                core.directory.unpin(entry)
                core.counts["audited"] += same is not None
                core.counts["audit_mismatch"] += same is False
        if same is False:
            self._say(entry.key, below.tier.name)
            self._forget([entry.key])

    def _say(self, key: ChunkKey, tier: str) -> None:
        if not self._said:
            self._said = True
            logger.error(
                "audit: chunk %s has other bytes in RAM than in %s, although one is a copy of the "
                "other; it is dropped "
                "everywhere. Test this host's memory, and report it if that is sound. Further ones "
                "are only counted",
                key.hex()[:16],
                tier,
            )


def _same(one: memoryview, other: memoryview) -> bool:
    """Byte by byte, in pieces: bytes compare much faster than views, and need a copy."""
    pieces = range(0, len(one), _PIECE_BYTES)
    return all(
        bytes(one[at : at + _PIECE_BYTES]) == bytes(other[at : at + _PIECE_BYTES]) for at in pieces
    )
