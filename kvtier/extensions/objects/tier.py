"""ObjectTier: chunks in a bucket that hosts share and that outlives them: a new host starts warm
from it.

A lookup lists nothing: bisection finds the end of a run. A run with a gap, such as one that a
lifecycle rule has thinned out, may be taken for a longer one. Its missing chunk is a miss when it
is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import islice

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Lane
from kvtier.core.steps import pieces
from kvtier.core.tenant import UNOWNED, may
from kvtier.extensions.objects.bucket import Bucket
from kvtier.tiers.away.tier import ASKED_CHUNKS
from kvtier.tiers.away.whole_objects import HEADER_BYTES, WholeObjectTier

_LOG = logging.getLogger(__name__)
_ALL_ASKED_CHUNKS = 8
"""Longest run whose chunks are all asked for: as many requests as a bisection of 128 chunks."""
_LIST_S = 5.0
_ASK_S = 8.0
_ASKED_CHUNKS = 16
_LISTED_NAMES = 2_000_000


class ObjectTier(WholeObjectTier[Bucket]):
    """Chunks in a bucket. Raises TierError for what waiting does not heal: credentials, region,
    clock, no such bucket, no room for a chunk. Threads: any number of lane threads. Sixteen more
    while owners are asked for."""

    name = "object"
    keeps_owners = asks_for_owners = True
    is_apart = False
    """Whether a list has shown chunks of another size, see :attr:`Tier.is_apart`."""
    _share = "object_bytes"

    def recovered(self) -> Sequence[ChunkKey]:
        """List at most ``capacity`` keys, those written last. A fault or a bound of time or number
        ends the list early; :meth:`find` finds the rest. See :meth:`Tier.recovered`."""
        stamps, whole = self._listed()
        return self._newest(stamps, "" if whole else " in the time a start may take")

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """See :meth:`Tier.find`. Exact for up to 8 keys. Longer runs are taken to have no gaps."""
        if len(keys) <= _ALL_ASKED_CHUNKS:
            return next((index for index, key in enumerate(keys) if not self._has(key)), len(keys))
        if not self._has(keys[0]):
            return 0
        # The first `held` chunks are all there, the first `missing` are not.
        held, missing = 1, len(keys) + 1
        while missing - held > 1:
            middle = (held + missing) // 2
            if (there := self._has(keys[middle - 1])) is None:
                return held
            held, missing = (middle, missing) if there else (held, middle)
        return held

    def owners(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Ask for each chunk's owner by a request of its own, sixteen at a time."""
        return [UNOWNED if whose is None else whose for whose in self._whose(keys)]

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """See :meth:`Tier.held_of`. An owner's chunks are asked for one by one, for eight seconds
        at most. Objects without an owner (of an older kvtier, or in a store that drops metadata)
        are found by None only, and make the search incomplete."""
        stamps, whole = self._listed()
        if owner is None:
            return list(stamps), whole
        found, unowned, until = list[ChunkKey](), 0, self._clock() + _ASK_S
        for run in pieces(list(stamps), ASKED_CHUNKS):
            if (left := until - self._clock()) <= 0:
                return found, False
            told = self._whose(run, left)
            whole &= None not in told
            unowned += told.count(UNOWNED)
            found += [
                key
                for key, whose in zip(run, told, strict=True)
                if whose is not None and may(owner, whose, shared=True)
            ]
        if unowned:
            _LOG.warning(
                "%s: %d chunks have no owner there (an older kvtier wrote them, or the store drops "
                "metadata), so they were left: clear --everything deletes them",
                self._place,
                unowned,
            )
        return found, whole and not unowned

    def _whose(self, keys: Sequence[ChunkKey], seconds: float = _ASK_S) -> list[int | None]:
        """Ask for the chunks' owners. None for those that did not answer within ``seconds``."""
        told: dict[ChunkKey, int | None] = {}

        def ask(key: ChunkKey) -> None:
            name = self._form.name(key)
            told[key] = self._call("failed_finds", lambda: self._store.owner(name))

        lane = Lane("object-owners", min(_ASKED_CHUNKS, len(keys)), urgent_bound=0, bound=len(keys))
        for key in keys:
            lane.submit(partial(ask, key))
        lane.close(seconds)
        return [told.get(key) for key in keys]

    def _put(self, name: str, parts: Sequence[bytes | memoryview], owner: int) -> int:
        return self._store.put(name, parts, owner)

    def _listed(self) -> tuple[dict[ChunkKey, datetime], bool]:
        """List chunks -> last write. Also whether no fault, time or number cut the list."""
        stamps: dict[ChunkKey, datetime] = {}
        until, pages = self._clock() + _LIST_S, self._store.listed(self._form.folder)
        while self._clock() < until and len(stamps) < _LISTED_NAMES:
            found = self._call("failed_finds", lambda: list(islice(pages, 1000)))
            if not found:
                return stamps, found is not None
            for name, size, stamp in found:
                key = self._form.key(name)
                if key is not None:
                    self.is_apart |= size != self.chunk_room
                    if HEADER_BYTES < size <= self.chunk_room:
                        stamps[key] = stamp
        return stamps, False

    def _has(self, key: ChunkKey) -> bool | None:
        name = self._form.name(key)
        return self._call("failed_finds", lambda: self._store.has(name))
