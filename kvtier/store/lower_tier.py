"""Below: one lower tier as its Store uses it: reads and questions that somebody waits for, spills,
trials, deletions.

Decided under the Store's lock, done outside it on the tier's lane. The Store keeps the claims and
leases.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Executor
from kvtier.core.pool import Pool
from kvtier.core.steps import AT_ONCE, Steps
from kvtier.store.directory import GONE, READY, Directory, Entry
from kvtier.store.miss_reasons import Left
from kvtier.store.room import Room
from kvtier.store.timed_tier import TimedTier
from kvtier.store.timings import Timings
from kvtier.store.write_budget import WriteBudget
from kvtier.tiers.base import RoomGiver, SharedKeeper, Tier, machine_of
from kvtier.tiers.breaker import Breaker

_AWAY_READS, _AWAY_S, _LONGEST_AWAY_S = 3, 0.5, 30.0
"""A machine that could not be asked this often in a row is left alone for this long, then tried by
one read; at most so long: every read that is begun takes a slot from somebody."""
_MOST_MACHINES = 2000


class Place(NamedTuple):
    """A lower tier as a Store is given it."""

    tier: Tier
    lane: Executor
    budget: WriteBudget | None = None
    """What may be written there; None: all."""
    on_evict: bool = False
    """Chunks are written when RAM is about to evict them, and not when they were saved.

    What is forgotten before costs no write, and no hit is lost: the Mooncake conversation trace
    (room for 2.5 % of it in RAM, 20 % below) has 35.0 % for 34.5 % of its chunks hit, with 2 %
    fewer writes. But a crash loses what only RAM had; a clean close writes it. When saves come
    faster than writes, the coldest chunk leaves unwritten and is counted as late: the newest is
    likelier to be asked for again, and a refused save would cut its run."""


class Core(NamedTuple):
    """What a Store and its lower tiers share; ``lock`` guards all of it but the pool's bytes."""

    lock: AbstractContextManager[object]
    directory: Directory
    pool: Pool
    counts: Counter[str]
    timings: Timings


class LowerTier:
    """Tier number ``index``, its lane, how fast both are, and what it has yet to delete.

    Methods say whether they run under the Store's lock, take it themselves, or run on a lane
    thread.
    """

    def __init__(self, core: Core, index: int, place: Place, clock: Callable[[], float]) -> None:
        self.tier, self.lane, self._budget, self.on_evict = place
        self.timed = TimedTier(self.tier, self.lane, clock)
        self._clock = clock
        self._chunk_bytes = getattr(self.tier, "chunk_room", 0) or core.pool.slot_bytes
        if self._budget is not None:
            self._budget.fit(self._chunk_bytes)
        self._core, self._index = core, index
        self._lock, self._directory, self._counts = core.lock, core.directory, core.counts
        self._trash: list[ChunkKey] = []
        self._corrupt = _corrupt(self.tier)
        self._silent = False
        self._away: dict[str, Breaker] = {}
        self._has = self.tier.capacity
        """Chunks for which the tier has room reserved: of a :class:`RoomGiver`, what it gives to
        nobody else now."""

    # ---- promotion: lower tier -> slot -----------------------------------------------------------

    @property
    def away(self) -> bool:
        """The tier does not answer: its last read failed, or it is left alone now. Any thread."""
        return self._silent or bool(getattr(self.tier, "open_breakers", 0))

    def may_read(self, key: ChunkKey) -> bool:
        """Under the lock: may a read begin? Not while the machine that has the chunk is away: what
        it holds is known, and is a miss. A tier of several machines goes on with the others."""
        return self._machine(key).allows()

    def _machine(self, key: ChunkKey) -> Breaker:
        """Under the lock. Those that left a cluster are forgotten, with all others, when there are
        very many."""
        name = machine_of(self.tier, key)
        if name not in self._away:
            if len(self._away) >= _MOST_MACHINES:
                self._away.clear()
            self._away[name] = Breaker(_AWAY_READS, _AWAY_S, _LONGEST_AWAY_S, self._clock)
        return self._away[name]

    def read(self, entry: Entry) -> bool | None:
        """On a lane thread: fill the entry's slot. :meth:`was_read` must follow."""
        return self.timed.read(entry.key, self._core.pool.view(entry.slot))

    def was_read(self, entry: Entry, whole: bool | None) -> None:
        """Under the lock: a read ended. One that failed leaves the entry FILLING: another tier may
        have the chunk."""
        self._silent = whole is None
        if self._silent:
            self._machine(entry.key).fault()
        else:
            self._machine(entry.key).ok()
        if whole:
            self._counts[f"{self.tier.name}_loaded"] += 1
            self._directory.filled(entry, self._index)
            return
        self._counts[f"{self.tier.name}_missed"] += 1
        if whole is False:
            self._directory.lost(self._index, entry.key, self._how_lost())

    def _how_lost(self) -> Left:
        """Under the lock: what became of a chunk that a read did not find, by what the tier counts.
        Of two reads that fail at the same moment one may get the other's reason."""
        before, self._corrupt = self._corrupt, _corrupt(self.tier)
        return Left.CORRUPT if self._corrupt > before else Left.EVICTED

    def found(self, keys: Sequence[ChunkKey], owners: Sequence[int]) -> None:
        """Under the lock: it turned out to hold ``keys``, coldest first, and whose they are; what
        leaves for them is trash from now on."""
        victims = self._directory.found(self._index, keys, owners)
        self._counts[f"{self.tier.name}_evicted"] += len(victims)
        self._trash += victims

    def probe(self, key: ChunkKey) -> None:
        """If it is time to: read one chunk that nobody waits for, only to learn how fast the tier
        is."""
        self.timed.probe(partial(self._probe, key))

    def _probe(self, key: ChunkKey) -> None:
        """On a lane thread."""
        self.sweep()
        with self._lock:
            known = self._index in self._directory.holders(key)
        if not known:
            if not self.timed.find([key]):
                return
            owners = self.timed.owners([key])
            with self._lock:
                self.found([key], owners)
            self.sweep()
        self.try_read(key)

    def try_read(self, key: ChunkKey) -> memoryview | None:
        """On a lane thread: a chunk in scratch memory of its own, page-aligned; None when it is not
        there."""
        size = self._core.pool.slot_bytes
        pages = memoryview(
            mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        )
        whole = self.timed.read(key, pages)
        # What was deleted and written anew while it was read is missed, and held.
        if whole is False and not self.timed.find([key]):
            with self._lock:
                self._directory.lost(self._index, key, self._how_lost())
        return pages if whole else None

    # ---- spill: slot -> lower tier ---------------------------------------------------------------

    def offer(self, entries: Sequence[Entry], run: Sequence[ChunkKey]) -> None:
        """Takes the lock: queue a spill of each of these chunks of ``run``; what the lane refuses
        is counted."""
        taken = sum(self.lane.submit(partial(self._spill, entry, run)) for entry in entries)
        with self._lock:
            self._counts[f"{self.tier.name}_spill_refused"] += len(entries) - taken

    def _spill(self, entry: Entry, run: Sequence[ChunkKey]) -> None:
        """On a lane thread. The chunk is pinned only from here on: a long queue holds no slots, and
        what was evicted before its turn is simply not written. Afterwards its ``run`` is hottest
        below as it is above, leaf last."""
        self.sweep()
        name = self.tier.name
        with self._lock:
            takes = entry.state is READY and self._affords(entry.key)
            victims = self._directory.spill_begun(entry, self._index) if takes else None
            if victims is not None and self._budget is not None:
                self._budget.spend(self._chunk_bytes)
            if entry.state is GONE:
                self._counts[f"{name}_spill_late"] += 1
        if victims is None:
            return
        self._delete(victims)
        begun = self._clock()
        stored = self.timed.write(entry.key, self._core.pool.view(entry.slot), entry.owner)
        with self._lock:
            if stored:
                self._core.timings.spill[name].add(self._clock() - begun)
            self._counts[f"{name}_evicted"] += len(victims)
            self._counts[f"{name}_stored" if stored else f"{name}_store_failed"] += 1
            if not self._directory.spill_ended(entry, self._index, stored):
                self._trash.append(entry.key)
            self._directory.stored_with(self._index, run)
        self.sweep()

    def _affords(self, key: ChunkKey) -> bool:
        """Under the lock, before anything leaves for it. Over its budget the tier refuses, and
        nobody waits."""
        if self._budget is None or self._budget.allows(self._chunk_bytes, self._clock()):
            return True
        self._counts[f"{self.tier.name}_write_over_budget"] += self._directory.takes(
            self._index, key
        )
        return False

    # ---- deletions -------------------------------------------------------------------------------

    def discard(self, key: ChunkKey) -> None:
        """Under the lock: the tier shall delete this chunk, at the next :meth:`sweep`."""
        self._trash.append(key)

    def purge_unseen(self, owner: int | None) -> Future[tuple[int, bool]]:
        """Delete what a shared tier has of ``owner``'s and nobody here knows of: how many chunks,
        and whether it was searched to the end. On the lane, where it takes seconds; what is being
        written is left to who knows of it."""
        future: Future[tuple[int, bool]] = Future()
        if not isinstance(self.tier, SharedKeeper) or not self.tier.shared:
            future.set_result((0, not self.tier.shared))
        elif not self.lane.submit(partial(self._purge_unseen, owner, future)):
            future.set_result((0, False))
        return future

    def _purge_unseen(self, owner: int | None, future: Future[tuple[int, bool]]) -> None:
        """On a lane thread."""
        assert isinstance(self.tier, SharedKeeper)
        going, whole = list[ChunkKey](), False
        try:
            keys, whole = self.tier.held_of(owner)
            with self._lock:
                going = self._directory.unwanted(self._index, keys)
            self._delete(going)
        finally:
            future.set_result((len(going), whole))

    def lend(self) -> None:
        """Under the lock, at the start: other Stores have the room of all that is not held."""
        if isinstance(self.tier, RoomGiver) and self.tier.chunk_room:
            self._has = self._directory.held(self._index)
            self._directory.limit(self._index, self._has, 0)

    def room(self) -> Room | None:
        """Under the lock; None where no budget is divided."""
        tier, directory, index = self.tier, self._directory, self._index
        if not isinstance(tier, RoomGiver) or not tier.chunk_room:
            return None
        limit, used = directory.capacity(index), directory.taken(index)
        occupied, wanted = max(self._has, used), directory.crowded[1 + index]
        unit, fixed = tier.chunk_room, tier.fixed_room
        return Room(
            unit, fixed, tier.capacity, limit, used, occupied, wanted, directory.coldest(index)
        )

    def limit(self, capacity: int) -> Steps[None]:
        """On a thread that may block: hold at most so many chunks from now on. The tier gives the
        room of the others back, or reserves it again; of what it cannot reserve nothing is held. Of
        a shared tier, which others write to, only what is known here."""
        assert isinstance(self.tier, RoomGiver)
        while True:
            with self._lock:
                smaller = min(capacity, self._directory.capacity(self._index))
                victims = self._directory.limit(self._index, smaller, AT_ONCE)
                self._counts[f"{self.tier.name}_evicted"] += len(victims)
            if not victims:
                break
            self._delete(victims)
            yield 0.0
        self._has = self.tier.resize(capacity)
        with self._lock:
            self._directory.limit(self._index, min(capacity, self._has), 0)

    def sweep(self) -> None:
        """On a lane thread: delete what is trash."""
        with self._lock:
            keys, self._trash = self._trash, []
        self._delete(keys)

    def sweep_soon(self) -> None:
        """Queue a sweep if there is anything to delete. Refused: what is queued there sweeps before
        it begins."""
        if self._trash:
            self.lane.submit(self.sweep)

    def _delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.tier.delete(key)
        if keys:
            with self._lock:
                self._directory.deleted(self._index, keys)

    def close(self, run: Sequence[ChunkKey]) -> None:
        """Takes the lock; the lane is closed: the tier shall let go, and keep its chunks and their
        order if it can. ``run`` was written last, the hottest first."""
        with self._lock:
            self._directory.stored_with(self._index, run)
            order = list(self._directory.order(self._index))
        self.tier.close(order)


def _corrupt(tier: Tier) -> int:
    """Chunks this tier has found corrupt so far; 0 where it does not count them."""
    counts: Mapping[str, int] = getattr(tier, "counts", {})
    return counts.get("corrupt", 0)
