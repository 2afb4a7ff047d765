"""Sharing: a Store's part of RAM and of disks that several Stores divide
(:mod:`kvtier.server.shares`), and the lane that touches the pool's pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial

from kvtier.core.lanes import Lane, Work
from kvtier.core.lookup import RAM
from kvtier.core.pool import Pool
from kvtier.core.steps import PIECE_CHUNKS, Steps
from kvtier.core.tenant import UNOWNED
from kvtier.store.directory import Directory
from kvtier.store.lower.lower_tier import Core, LowerTier
from kvtier.store.observers.ages import Ages, Room

_POPULATE_BYTES = 32 << 20
_POPULATE_S = 5.0


class SpareLane:
    """Lane without a tier that makes the pool's pages present, and then does what is not urgent.
    ``lane``: None where there is none, so nothing of this is done. Any thread may call."""

    def __init__(self, directory: Directory, pool: Pool, lane: Lane | None) -> None:
        self._directory, self._pool, self._lane = directory, pool, lane
        self.touched: Future[None] = Future()
        self.on_touched: Callable[[], object] = lambda: None
        """Called on the lane when every page is present."""

    def begin(self) -> None:
        if self._lane is not None:
            self._lane.submit(partial(self._populate, 0))

    def lend(self, lane: Lane | None) -> None:
        """Set the lane of a Store made without one. Pages are made when the slots get room."""
        self._lane = lane
        self.touched.set_result(None)

    def submit(self, work: Work) -> bool:
        """Queue this work if the pages are present already. Returns whether it was."""
        return self._lane is not None and self.touched.done() and self._lane.submit(work)

    def populate(self, slot: int) -> None:
        """Make the pages of one more slot present, on a thread that may block."""
        if self._lane is not None:
            self._pool.populate(slot, 1)

    def end_populating(self) -> None:
        """Wait, before the pool gets fewer slots, until :meth:`_populate` is done: pages that it
        makes present afterwards would stay, although their slots were given back."""
        if self._lane is not None:
            with suppress(CancelledError, TimeoutError):
                self.touched.result(_POPULATE_S)

    def close(self, timeout_s: float) -> bool:
        clean = self._lane is None or self._lane.close(timeout_s)
        self.touched.cancel()
        return clean

    def _populate(self, first: int) -> None:
        """Make the next pages present, on the lane. A close can come before the rest."""
        pool = self._pool
        count = min(max(1, _POPULATE_BYTES // pool.slot_bytes), pool.slots - first)
        pool.populate(first, count)
        if first + count < self._directory.slots.limit == pool.slots and self._lane is not None:
            self._lane.submit(partial(self._populate, first + count))
        elif self.touched.set_running_or_notify_cancel():
            self.touched.set_result(None)
            self.on_touched()


class Sharing:
    """A Store's part of each place, for the divider's one thread, which may block."""

    def __init__(self, core: Core, lower: Sequence[LowerTier], spare: SpareLane) -> None:
        self._lock, self._directory, self._pool = core.lock, core.directory, core.pool
        self._counts, self._lower, self._spare = core.counts, lower, spare
        self._ages = Ages(core.pool.slots + sum(tier.chunks.capacity for tier in lower))
        core.directory.observers.add(self._ages)
        self.others: Callable[[], Iterable[Sharing]] = tuple
        """Function that returns the Stores with chunks of other sizes."""
        self.renewals: dict[int, int] = {}
        """Slot -> how often its memory went back to the host. A device that locked a slot's pages
        before that has pages that belong to no slot."""

    def has_seen(self, owner: int) -> bool:
        """Return whether the owner is remembered to have or have had chunks. Needs no lock."""
        orders = (self._directory.order, *(tier.order for tier in self._directory.tiers))
        return any(order.has_seen(owner) for order in orders)

    def is_elsewhere(self, owner: int) -> bool:
        """Return whether this owner's chunks are kept in another size too. Needs no lock."""
        return owner != UNOWNED and any(other.has_seen(owner) for other in self.others())

    @property
    def occupied(self) -> int:
        with self._lock:
            return self._directory.slots.occupied

    def rooms(self, turn: int) -> dict[str, Room]:
        """Return the Store's part of ``ram`` and of every tier with a budget that can be divided,
        by name. ``turn``: number of the divider's looks, 0 if no other Store shares
        (:mod:`kvtier.store.observers.ages`)."""
        with self._lock:
            directory, counts = self._directory, self._counts
            self._ages.begin(turn)
            ram = Room(
                unit=self._pool.slot_bytes,
                fixed=0,
                most=self._pool.slots,
                limit=directory.slots.limit,
                used=self._pool.slots - len(directory.slots),
                occupied=directory.slots.occupied,
                wanted=directory.crowded[0] + counts["save_refused"] + counts["load_refused"],
                coldest=self._ages.coldest(directory.order),
            )
            rooms = [(lower.tier.name, lower.room(self._ages)) for lower in self._lower]
            return {RAM: ram, **{name: room for name, room in rooms if room is not None}}

    def lend(self, spare: Lane | None = None) -> None:
        """Begin with no room but for what was found in the tiers: other Stores have the rest.
        Called before the Store is used. ``spare``: its lane, where it has none yet."""
        with self._lock:
            self._directory.resize(0, self._pool.slots)
            self._directory.slots.gave_back(self._directory.slots.leaving(self._pool.slots)[::-1])
            for lower in self._lower:
                lower.lend()
        self._spare.lend(spare)

    def limit(self, limits: Mapping[str, int]) -> Steps[None]:
        """Set how many chunks each named place may hold. The memory and blocks of the rest go back
        to the host, those of slots that are held now when this is called again."""
        if RAM in limits:
            yield from self._use(limits[RAM])
        for lower in self._lower:
            if lower.tier.name in limits:
                yield from lower.limit(limits[lower.tier.name])

    def _use(self, slots: int) -> Steps[None]:
        while True:
            with self._lock:
                fewer = slots <= self._directory.slots.limit
                more = fewer and self._directory.resize(slots, PIECE_CHUNKS)
            if not more:
                break
            yield 0.0
        while True:
            with self._lock:
                leaving = self._directory.slots.leaving(PIECE_CHUNKS)
                for slot in leaving:
                    self.renewals[slot] = self.renewals.get(slot, 0) + 1
            if not leaving:
                break
            self._spare.end_populating()
            for slot in leaving:
                self._pool.give_back(slot)
            with self._lock:
                self._directory.slots.gave_back(leaving)
            yield 0.0
        while (now := self._directory.slots.limit) < slots:
            growing = min(slots, now + PIECE_CHUNKS)
            with self._lock:
                given = self._directory.slots.next_given(growing - now)
            for slot in given:
                self._spare.populate(slot)
            with self._lock:
                self._directory.resize(growing)
            yield 0.0
