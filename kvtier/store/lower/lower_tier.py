"""LowerTier: one tier below RAM as its Store uses it: how fast it answers, what it is asked, what
it has yet to delete, and its part of a budget.

Promotions (:mod:`kvtier.store.lower.promotion`) read from it into slots, and spills
(:mod:`kvtier.store.lower.spill`) write to it. What is decided under the Store's lock is done
outside it, on the tier's lane. The Store keeps the claims and leases."""

from __future__ import annotations

import mmap
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Lane, Work
from kvtier.core.lookup import Asking
from kvtier.core.pool import Pool
from kvtier.core.steps import PIECE_CHUNKS, Steps
from kvtier.core.tenant import UNOWNED, may
from kvtier.load_policy.latency import Pace
from kvtier.store.directory import Directory
from kvtier.store.entry import Entry
from kvtier.store.lower.write_budget import WriteBudget
from kvtier.store.observer import Left
from kvtier.store.observers.ages import Ages, Room
from kvtier.tiers.base import Tier

_ASKED_CHUNKS = 64
"""Chunks whose owners a tier is asked for in one piece of work."""
_MEASURED_CHUNKS = 4
"""Most chunks that a start reads to measure a tier."""
_DOUBTING_OWNERS = 64
"""Most owners for whose chunks the tier is asked at once."""


class TierSpec(NamedTuple):
    tier: Tier
    lane: Lane
    budget: WriteBudget | None = None
    """Limit of writes; None for no limit."""
    on_evict: bool = False
    """Whether chunks are written when RAM is about to evict them, and not when they were saved.

    What is forgotten before costs no write, and no hit is lost: a public trace of conversations
    (room for 2.5 % of it in RAM, 20 % below) has 35.0 % for 34.5 % of its chunks hit, with 2 %
    fewer writes. But a crash loses what only RAM had. A clean close writes it. When saves come
    faster than writes, the coldest chunk leaves unwritten and is counted as late: the newest is
    likelier to be asked for again, and a refused save would cut its run."""


class Core(NamedTuple):
    """Parts of a Store that its lower tiers share. ``lock`` guards all but the pool's bytes.
    ``clock``: monotonic seconds."""

    lock: AbstractContextManager[object]
    directory: Directory
    pool: Pool
    counts: Counter[str]
    clock: Callable[[], float]

    def took(self, what: str, place: str, seconds: float) -> None:
        """Tell the observers how long work took. Under the lock."""
        for tell in self.directory.observers.took:
            tell(what, place, seconds)


class LowerTier:
    """Tier number ``index`` and its lane. Methods say whether they run under the Store's lock, take
    it themselves, or run on a lane thread."""

    def __init__(self, core: Core, index: int, place: TierSpec) -> None:
        self.tier, self.lane, self.index = place.tier, place.lane, index
        self.pace = Pace(place.lane.threads, comes_whole=place.tier.comes_whole)
        self.budget = place.budget
        """Limit of writes; None for no limit."""
        self._core, self._clock = core, core.clock
        self._lock, self._directory, self._counts = core.lock, core.directory, core.counts
        self.chunks = core.directory.tiers[index]
        """Index of the tier's chunks. Guarded by the Store's lock, as :attr:`pace`."""
        self.chunks.shared = place.tier.shared
        self._to_delete = deque[ChunkKey]()
        self._doubted: dict[int, dict[ChunkKey, None]] = {}
        """Owner -> chunks to drop if they are its own, which the tier has to be asked."""
        self._asking_whose = False
        self._corrupt = self._found_corrupt()
        self._silent = False
        self._room_told = self._reserved = self.tier.capacity
        """Chunks for which the tier has room reserved, which no other Store has."""
        self._following = False

    def _follow_room(self) -> None:
        """Take over the tier's capacity if it has changed: a tier that was away at the start may
        know it by now, and a disk of several may have gone or come back. Other Stores' room stays
        theirs. Under the lock."""
        if (room := self.tier.capacity) != self._room_told:
            had_all = self.chunks.capacity == self._room_told
            self._room_told = room
            self._reserved = room if had_all else min(self._reserved, room)
            self.chunks.limit(room if had_all else min(self.chunks.capacity, room), 0)

    def _follow_chunks(self) -> None:
        """Drop chunks that were lost with a part of the tier that failed, and add those found again
        when it is back. On a lane thread, one at a time."""
        with self._lock:
            if self._following:
                return
            self._following = True
        try:
            lost, found = self.tier.lost_and_found()
            for at in range(0, len(lost), PIECE_CHUNKS):
                with self._lock:
                    for key in lost[at : at + PIECE_CHUNKS]:
                        if key in self.chunks.order:
                            self.chunks.lost(key)
            for at in range(0, len(found), PIECE_CHUNKS):
                keys = found[at : at + PIECE_CHUNKS]
                owners = self.owners(keys)
                with self._lock:
                    self.found(keys, owners)
        finally:
            self._following = False

    # ---- estimates -------------------------------------------------------------------------------

    def wait(self, reads: int) -> float | None:
        """See Pace.wait. Under the lock."""
        return self.pace.wait(reads, self._clock())

    def asking(self, keys: int) -> Asking:
        """Return the costs of asking this shared tier for ``keys`` chunks. Under the lock."""
        return Asking(self.wait(1), self.wait(1 + keys), self.pace.odds)

    @property
    def away(self) -> bool:
        """Whether the tier's last read failed, or it is left alone now. Any thread."""
        return self._silent or self.tier.open_breakers > 0

    def was_read(self, entry: Entry, whole: bool | None) -> None:
        """Note the end of a read into a slot. After a failure the entry stays FILLING: another tier
        may have the chunk. Under the lock."""
        self._silent = whole is None
        if whole:
            self._counts[f"{self.tier.name}_loaded"] += 1
            self._directory.filled((entry,), self.index)
            return
        self._counts[f"{self.tier.name}_missed"] += 1
        if whole is False:
            self.chunks.lost(entry.key, self._how_lost())

    def _how_lost(self) -> Left:
        """Return why a read found nothing, by the tier's counts. Of two reads that fail at the same
        moment one may get the other's reason. Under the lock."""
        before, self._corrupt = self._corrupt, self._found_corrupt()
        return Left.CORRUPT if self._corrupt > before else Left.EVICTED

    def _found_corrupt(self) -> int:
        return self.tier.counts.get("corrupt", 0)

    # ---- questions -------------------------------------------------------------------------------

    def ask(self, question: Work) -> bool:
        """Queue a question that a request waits for. Returns whether it could. Takes the lock."""

        def begin() -> None:
            with self._lock:
                self.pace.queued -= 1
            question()

        with self._lock:
            self.pace.queued += 1
        if self.lane.submit(begin, urgent=True):
            return True
        with self._lock:
            self.pace.queued -= 1
        return False

    def find(self, keys: Sequence[ChunkKey]) -> int:
        """See :meth:`Tier.find`. On a lane thread."""
        with self._lock:
            call = self.pace.begun(self._clock())
        found = 0
        try:
            found = self.tier.find(keys)
        finally:
            with self._lock:
                self.pace.asked(call, self._clock(), found / max(1, len(keys)))
        return found

    def found(self, keys: Sequence[ChunkKey], owners: Sequence[int]) -> None:
        """Add ``keys``, coldest first, which the tier turned out to hold, with these owners. Chunks
        that leave for them are to be deleted. Under the lock."""
        self._follow_room()
        # A shared tier's chunks beyond our room are other servers', and not ours to delete.
        first = max(0, len(keys) - self.chunks.capacity) if self.tier.shared else 0
        victims = self.chunks.found(keys[first:], owners[first:])
        self._counts[f"{self.tier.name}_evicted"] += len(victims)
        self._to_delete += victims

    def owners(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Return the chunks' owners if that costs no request for each, else none until they have to
        be known. On a thread that may block."""
        return [UNOWNED] * len(keys) if self.tier.asks_for_owners else self.tier.owners(keys)

    # ---- trial reads: into memory of their own, not into slots -----------------------------------

    def measure(self) -> None:
        """Learn the tier's pace from a few chunks that it holds, at the start. A shared tier has
        not said yet what it holds. Takes the lock."""
        with self._lock:
            keys = list(islice(self.chunks.order, min(_MEASURED_CHUNKS, self.lane.threads)))
        for key in keys:
            self.lane.submit(partial(self._read_held, key))

    def _read_held(self, key: ChunkKey) -> None:
        with self._lock:
            known = self.index in self._directory.holders(key)
        if known:
            self.try_read(key)

    def probe(self, key: ChunkKey) -> None:
        """Read a chunk, if due, that nothing waits for, to learn the pace. Takes the lock."""
        with self._lock:
            due = self.pace.probe_due(self._clock())
        if due and not self.lane.submit(partial(self._probe, key)):
            self._probe_ended()

    def _probe(self, key: ChunkKey) -> None:
        try:
            self.sweep()
            with self._lock:
                known = self.index in self._directory.holders(key)
            if known or self._find_one(key):
                self.try_read(key)
        finally:
            self._probe_ended()

    def _probe_ended(self) -> None:
        with self._lock:
            self.pace.probed(self._clock())

    def _find_one(self, key: ChunkKey) -> bool:
        if not self.find([key]):
            return False
        owners = self.owners([key])
        with self._lock:
            self.found([key], owners)
        self.sweep()
        return True

    def try_read(self, key: ChunkKey) -> memoryview | None:
        """Read a chunk into page-aligned scratch memory, or return None. On a lane thread."""
        size = self._core.pool.slot_bytes
        pages = memoryview(
            mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        )
        with self._lock:
            call = self.pace.begun(self._clock())
        whole = None
        try:
            whole = self.tier.read(key, pages)
        finally:
            with self._lock:
                self.pace.read(call, self._clock(), bool(whole))
        # A chunk that was deleted and written anew during the read is missed, but held.
        if whole is False and not self.find([key]):
            with self._lock:
                self.chunks.lost(key, self._how_lost())
        return pages if whole else None

    # ---- deletions -------------------------------------------------------------------------------

    def discard(self, key: ChunkKey) -> None:
        """Delete this chunk at the next :meth:`sweep`. Under the lock."""
        self._to_delete.append(key)

    def sweep(self) -> None:
        """Delete the chunks that wait for it. A disk that hangs holds up this thread alone. On a
        lane thread."""
        self._follow_chunks()
        with self._lock:
            self._follow_room()
        while self._to_delete:
            with self._lock:
                going = [self._to_delete.popleft()] if self._to_delete else []
            self.delete(going)

    def sweep_soon(self) -> None:
        """Queue a sweep if there is anything to delete. Where refused, queued work sweeps first."""
        if self._to_delete:
            self.lane.submit(self.sweep)
        if self._doubted and not self._asking_whose:
            self._asking_whose = self.lane.submit(self._ask_whose)

    def doubt(self, keys: Sequence[ChunkKey], owner: int | None) -> None:
        """Note that ``owner`` wants these chunks dropped. After the next :meth:`sweep_soon` the
        tier is asked whose the unowned ones are, for at most 64 owners at once. Under the lock."""
        if owner is None or not self.tier.asks_for_owners:
            return
        unowned = self.chunks.unowned(keys)
        if unowned and (owner in self._doubted or len(self._doubted) < _DOUBTING_OWNERS):
            self._doubted.setdefault(owner, {}).update(dict.fromkeys(unowned))

    def _ask_whose(self) -> None:
        """Ask for the owners of a few chunks, and delete those of the owner that wants them
        dropped. Then other work may have the lane. A tier that cannot be asked now is asked after a
        later :meth:`sweep_soon`. On a lane thread."""
        with self._lock:
            owner, doubted = next(iter(self._doubted.items()), (UNOWNED, {}))
            keys = list(doubted)[:_ASKED_CHUNKS]
        try:
            whose = self.tier.owners(keys)
            if self.tier.open_breakers:
                return
            asked = zip(keys, whose, strict=True)
            with self._lock:
                own = [key for key, one in asked if may(owner, one, shared=True)]
                going = self.chunks.leave_all(own)
                for key in keys:
                    doubted.pop(key, None)
                if not doubted:
                    self._doubted.pop(owner, None)
            self.delete(going)
        finally:
            self._asking_whose = False
        self.sweep_soon()

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete chunks that the Directory has given up. On a thread that may block."""
        for key in keys:
            self.tier.delete(key)
            with self._lock:
                self.chunks.deleted([key])

    def purge_unseen(self, owner: int | None) -> Future[tuple[int, bool]]:
        """Delete the chunks of ``owner`` that a shared tier, or a disk that is left alone, has and
        this Store does not know. Returns how many, and whether all was searched. On the lane, where
        it takes seconds. A chunk that is being written is left to its writer."""
        future: Future[tuple[int, bool]] = Future()
        there = self.tier.capacity == self._room_told
        if there and not (self.tier.open_breakers or self.tier.owed) and not self.tier.shared:
            future.set_result((0, True))
        elif not self.lane.submit(partial(self._purge_unseen, owner, future)):
            future.set_result((0, False))
        return future

    def _purge_unseen(self, owner: int | None, future: Future[tuple[int, bool]]) -> None:
        going, whole = list[ChunkKey](), False
        try:
            self._follow_chunks()
            keys, whole = self.tier.held_of(owner)
            with self._lock:
                going = self.chunks.leave_all(keys)
            self.delete(going)
        finally:
            future.set_result((len(going), whole))

    def close(self, run: Sequence[ChunkKey]) -> None:
        """Close the tier, which keeps the chunks and their order if it can. ``run`` was written
        last, the hottest first. The lane is closed already. Takes the lock."""
        with self._lock:
            self.chunks.order.ordered(run)
            order = list(self.chunks.order)
        self.tier.close(order)

    # ---- its part of a budget that several Stores divide -----------------------------------------

    def lend(self) -> None:
        """Begin with room for what is held only: other Stores have the rest. Under the lock."""
        if self.tier.chunk_room:
            self._reserved = len(self.chunks.order)
            self.chunks.limit(self._reserved, 0)

    def room(self, ages: Ages) -> Room | None:
        """Return the tier's part of a divided budget, or None without one. Under the lock."""
        tier, chunks = self.tier, self.chunks
        if not tier.chunk_room:
            return None
        self._follow_room()
        used = len(chunks) + len(chunks.leaving)
        return Room(
            unit=tier.chunk_room,
            fixed=tier.fixed_room,
            most=tier.capacity,
            limit=chunks.capacity,
            used=used,
            occupied=max(self._reserved, used),
            wanted=self._directory.crowded[1 + self.index],
            coldest=ages.coldest(chunks.order),
        )

    def limit(self, capacity: int) -> Steps[None]:
        """Set the number of chunks that the tier may hold here. Room beyond it is given back, and
        missing room is reserved again. Nothing is held in room that cannot be reserved. On a thread
        that may block."""
        while True:
            with self._lock:
                smaller = min(capacity, self.chunks.capacity)
                victims = self.chunks.limit(smaller, PIECE_CHUNKS)
                self._counts[f"{self.tier.name}_evicted"] += len(victims)
            if not victims:
                break
            self.delete(victims)
            yield 0.0
        self._reserved = self.tier.resize(capacity)
        with self._lock:
            self.chunks.limit(min(capacity, self._reserved), 0)
