"""ObjectTier: chunks in a bucket that hosts share and that outlives them: a new host starts warm
from it.

Every chunk is one object, which stores write whole or not at all. A reader compares XXH3-128 over
key and payload, so a wrong byte is a miss and a count, and never served.

Looking a run up lists nothing. What leaves a run leaves it from its end, so that a run is held up
to a point, and that point is found by bisection: one request where nothing is held, eight for 128
chunks. A run with a gap, such as one that a lifecycle rule has thinned out, may be told longer than
it is. Its missing chunk is a miss when it is read.

Order and room are the Directory's, as for every tier: it deletes leaf first within ``capacity``.
Several servers on one bucket: each owns a budget of its own and sees what the others wrote by
asking. What one deletes is gone for all, and a miss for them. Chunks that no server remembers leave
by a lifecycle rule of the bucket.

A store that fails is left alone for a while, then tried by one call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TypeVar

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError, TierError
from kvtier.core.tenant import NOBODY
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import FAULTS_TO_OPEN, Breaker
from kvtier.tiers.event_counts import AWAY_EVENTS, EventCounts
from kvtier.tiers.objects.bucket import FAULTS, Bucket, words
from kvtier.tiers.objects.layout import HEADER_BYTES, Form, header, room
from kvtier.tiers.owed_deletions import OwedDeletions
from kvtier.tiers.recovery_order import coldest_first

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_MAX_CHUNK_BYTES = 1 << 30
_ALL_ASKED = 8
"""So many chunks are asked for one by one: exact, and no more requests than a bisection of 128."""
_LIST_S = 5.0
_MOST_LISTED = 2_000_000


class ObjectTier(Tier):
    """Chunks in a bucket.

    Args:
        bucket: where it is.
        form: names.
        bytes_: our share of it.
        chunk_bytes: the largest chunk, at most 1 GiB.
        clock: monotonic seconds.

    A store that cannot be reached is no error: the tier misses and refuses, and is there once the
    store is. Raises TierError for what does not heal by waiting: credentials, region, clock, no
    such bucket, no room for a chunk.

    Threads: any number of lane threads. No thread of its own but the library's.
    """

    name = "object"
    shared = True

    def __init__(
        self,
        bucket: Bucket,
        form: Form,
        bytes_: int,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < chunk_bytes <= _MAX_CHUNK_BYTES:
            raise StateError(f"chunk_bytes={chunk_bytes}: expected 1 to {_MAX_CHUNK_BYTES}")
        self.chunk_room = room(chunk_bytes)
        self.capacity = bytes_ // self.chunk_room
        if not self.capacity:
            raise TierError(
                f"object tier {bucket.label}: {bytes_:,} bytes hold no chunk; give at least "
                f"object_bytes={self.chunk_room:,}"
            )
        self.chunk_bytes = chunk_bytes
        self._events = EventCounts(AWAY_EVENTS, _LOG, f"object tier {bucket.label}")
        self._bucket, self._form, self._clock = bucket, form, clock
        self._breaker = Breaker(clock)
        self._owed = OwedDeletions(self._unlink)
        self._closed = False
        try:
            bucket.greet(form.folder)
        except FAULTS as error:
            self._failed("failed_finds", error)

    @property
    def counts(self) -> Mapping[str, int]:
        return self._events.values

    @property
    def open_breakers(self) -> int:
        """1 while the store is left alone because it failed."""
        return int(self._breaker.open)

    @property
    def owed(self) -> int:
        return len(self._owed)

    def recovered(self) -> Sequence[ChunkKey]:
        """See :meth:`Tier.recovered`. At most ``capacity`` keys, those written last: the rest may
        be another server's, and is found by asking. Bounded in time and number. On a fault, what
        was found so far."""
        stamps, whole = self._listed()
        order = coldest_first(stamps.items())
        if stamps:
            more = max(0, len(order) - self.capacity)
            text = (
                "object tier %s: %d chunks found%s, %d more than our share are left to "
                "other servers"
            )
            _LOG.info(
                text,
                self._bucket.label,
                len(order),
                "" if whole else " in the time a start may take",
                more,
            )
        return order[-self.capacity :]

    def write(self, key: ChunkKey, data: memoryview, owner: int = NOBODY) -> bool:
        """See :meth:`Tier.write`. Raises StateError for a wrong size."""
        if not 0 < data.nbytes <= self.chunk_bytes:
            raise StateError(
                f"a chunk of {data.nbytes} bytes for a tier of chunks of {self.chunk_bytes} bytes"
            )
        if not self._owed.cancel(key):
            self._events.add("refused")
            return False
        name = self._form.name(key)
        if (
            self._call("failed_writes", partial(self._bucket.put, name, [header(key, data), data]))
            is None
        ):
            self._owed.add([key])  # it may be there all the same: an answer that was lost
            return False
        self._events.add("writes")
        self._events.add("bytes_written", data.nbytes)
        return True

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        """See :meth:`Tier.read`. ``into`` has exactly the size that was written. None while the
        store is away."""
        name, length = self._form.name(key), room(into.nbytes)
        answer = self._call("failed_reads", lambda: [self._bucket.get(name, length)])
        if answer is None:
            return None
        (found,) = answer
        if found is None:
            self._events.add("misses")
            return False
        if found.nbytes == length:
            into[:] = found[HEADER_BYTES:]
            if found[:HEADER_BYTES] == header(key, into):
                self._events.add("reads")
                self._events.add("bytes_read", into.nbytes)
                return True
        self._events.add("corrupt")
        self._events.log_first("corrupt", key.hex())
        self.delete(key)
        return False

    def may_read(self, key: ChunkKey) -> bool:
        """See :meth:`Tier.may_read`."""
        return self._breaker.reserves()

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """See :meth:`Tier.find`. Exact for up to 8 keys. Of more it believes that a run has no
        gaps: at most 8 requests for 128 keys, and one where nothing is held."""
        if len(keys) <= _ALL_ASKED:
            return next((index for index, key in enumerate(keys) if not self._has(key)), len(keys))
        if not self._has(keys[0]):
            return 0
        # Of the first `held` chunks all are there, of the first `missing` not all.
        held, missing = 1, len(keys) + 1
        while missing - held > 1:
            middle = (held + missing) // 2
            if (there := self._has(keys[middle - 1])) is None:
                return held
            held, missing = (middle, missing) if there else (held, middle)
        return held

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """See :meth:`Tier.held_of`. A bucket keeps no owners: of one nothing is found, and None
        finds all."""
        if owner is not None:
            return [], False
        stamps, whole = self._listed()
        return list(stamps), whole

    def delete(self, key: ChunkKey) -> None:
        """See :meth:`Tier.delete`. While the store is away the delete is owed, and made good after
        the next call that succeeds; of more than 65,536 the oldest is given up, and leaves by the
        bucket's lifecycle rule."""
        self._unlink([key])

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Nothing is kept but what is in the bucket: the order of the next start is that of the
        last writes."""
        self._closed = True

    def _listed(self) -> tuple[dict[ChunkKey, datetime], bool]:
        """Every chunk with the time of its last write. False when a fault, the time or the number
        cut the search short."""
        stamps: dict[ChunkKey, datetime] = {}
        until, pages = self._clock() + _LIST_S, self._bucket.listed(self._form.folder)
        while self._clock() < until and len(stamps) < _MOST_LISTED:
            found = self._call("failed_finds", lambda: list(islice(pages, 1000)))
            if not found:
                return stamps, found is not None
            for name, size, stamp in found:
                key = self._form.key(name)
                if key is not None and HEADER_BYTES < size <= self.chunk_room:
                    stamps[key] = stamp
        return stamps, False

    # ---- faults ----------------------------------------------------------------------------------

    def _has(self, key: ChunkKey) -> bool | None:
        """None where it cannot be asked."""
        name = self._form.name(key)
        return self._call("failed_finds", lambda: self._bucket.has(name))

    def _call(self, count: str, action: Callable[[], T], *, settle: bool = True) -> T | None:
        """``action``. None when the store fails, or is left alone because it did."""
        if self._closed or not self._breaker.allows():
            self._events.add("refused")
            return None
        try:
            result = action()
        except FAULTS as error:
            self._failed(count, error)
            return None
        if self._breaker.ok():
            _LOG.info("object tier %s: answers again", self._bucket.label)
        if settle:
            self._owed.make_good()
        return result

    def _failed(self, count: str, error: Exception) -> None:
        self._events.add(count)
        self._events.log_first(count, self._bucket.hopeless(error) or words(error))
        if self._breaker.fault():
            self._events.add("breaker_trips")
            _LOG.warning(
                "object tier %s: %d faults in a row; every call misses for %.1f s, then one tries "
                "again (%s)",
                self._bucket.label,
                FAULTS_TO_OPEN,
                self._breaker.wait_s,
                words(error),
            )

    def _unlink(self, keys: Sequence[ChunkKey]) -> None:
        names = [self._form.name(key) for key in keys]
        if self._call("failed_deletes", partial(self._bucket.delete, names), settle=False) is None:
            self._owed.add(keys)
