"""Store: one lock + Directory + lanes; the only file that joins them.

Decide under the lock, act outside it: the Directory is changed with the lock held (memory only, microseconds), tiers
and copies run without it. Everything here is safe to call from any thread; no call waits for a tier.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvtier.chunk import ChunkKey
from kvtier.directory import FILLING, GONE, READY, Directory, Entry
from kvtier.forecast import Outlook, look
from kvtier.lanes import Executor
from kvtier.lease import LoadLease, Match, SaveLease
from kvtier.policy import LRU, Policy
from kvtier.pool import Pool
from kvtier.tiers.base import Tier
from kvtier.timed import TimedTier

_POPULATE_BYTES = 32 << 20


class Store:
    """A pool of RAM slots over lower tiers (fastest first), each with its own lane.

    ``recovered()`` of every tier is read here, once. :meth:`close` closes lanes, tiers and the pool. ``share`` and
    every ``owner``: see :mod:`kvtier.directory`; for servers. ``spare`` is a lane without a tier: it makes the pool's
    pages present while nobody waits. ``clock``: monotonic seconds, for forecasts.
    """

    def __init__(
        self,
        pool: Pool,
        tiers: Sequence[tuple[Tier, Executor]] = (),
        policy: Callable[[], Policy] = LRU,
        share: float | None = None,
        spare: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.tiers = [tier for tier, _ in tiers]
        self.counts: Counter[str] = Counter()
        """Events in chunks since the start; see :meth:`stats`."""
        self._lanes = [lane for _, lane in tiers]
        self._spare = spare
        self._timed = [TimedTier(tier, lane, clock) for tier, lane in tiers]
        self._waits = [tier.wait for tier in self._timed]
        self._trash: list[list[ChunkKey]] = [[] for _ in tiers]
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._arrivals = 0
        self._closed = False
        self.on_arrival: Callable[[], None] = _nothing
        """Called on a lane thread, without the lock, whenever :meth:`wait` would return."""
        self._directory = Directory(pool.slots, [tier.capacity for tier in self.tiers], policy, share)
        for index, tier in enumerate(self.tiers):
            self._trash[index] += self._directory.found(index, tier.recovered())
            self._sweep_soon(index)
        if spare is not None:
            spare.submit(partial(self._populate, 0))

    # ---- the five verbs ------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[ChunkKey]) -> Match:
        """How far the run ``keys`` (first chunk first) can be served. No effect; memory only.

        Chunks that only a shared tier knows of are not seen here: :meth:`load` asks it.
        """
        with self._lock:
            ready = self._directory.ready_run(keys)
            return Match(ready, self._directory.held_run(keys, ready) - ready)

    def save(self, keys: Sequence[ChunkKey], owner: int = 0) -> SaveLease:
        """Reserve slots for the chunks of ``keys`` (the whole run so far) that are not in RAM.

        The lease names them; fewer when there is no room, none for what is held. Its owner fills the slots, then
        commits.
        """
        with self._lock:
            directory = self._directory
            directory.touch(keys)
            absent = [key for key in keys if directory.get(key) is None]
            keep = frozenset(keys) if absent else frozenset()
            entries: list[Entry] = []
            for key in absent:
                entry = directory.reserve(key, keep, None, owner)
                if entry is None:
                    break
                entries.append(entry)
            self.counts["save_refused"] += len(absent) - len(entries)
        return SaveLease(self, keys, entries)

    def load(self, keys: Sequence[ChunkKey], start: int = 0, owner: int = 0, most: int | None = None) -> LoadLease:
        """Pin what can be served of ``keys[start:]`` without a gap, at most ``most`` chunks, and start promoting what
        lower tiers hold. The lease pins each chunk from now (or its arrival) until it is closed: poll, copy, close."""
        rest = keys[start:]
        lease = LoadLease(self, rest[:most], owner)
        with self._lock:
            self._directory.touch(keys)
            self.counts["load_asked"] += len(rest)
            promotions = self._claim(lease)
            unknown = lease.keys[len(lease.entries) :]
            asked = self._ask(unknown) if unknown else None
            lease.asking = asked is not None
        self._promote_all(promotions)
        if asked is not None and not self._timed[asked].submit(partial(self._find, lease, asked)):
            with self._lock:
                lease.asking = False
        return lease

    def check(self, idle: bool = False) -> None:
        """Raise StateError when an internal rule is broken; ``idle``: also when something is in progress."""
        with self._lock:
            self._directory.check(idle)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Run queued writes for up to ``timeout_s`` seconds, then close lanes, tiers and pool.

        Returns False when something was dropped or hangs. Safe to call twice.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        clean = True
        for lane in [*self._lanes, *([self._spare] if self._spare else [])]:
            clean &= lane.close(timeout_s)
        for index, tier in enumerate(self.tiers):
            with self._lock:
                order = list(self._directory.order(index))
            tier.close(order)
        if clean:
            self.pool.close()
        return clean

    # ---- the rest of the surface ---------------------------------------------------------------------------------

    def forecast(self, keys: Sequence[ChunkKey]) -> Outlook:
        """How far :meth:`load` would get with the run, and when. No effect; memory only."""
        with self._lock:
            outlook = look(self._directory, self._waits, keys)
            asked = self._ask(keys[outlook.known :]) if outlook.known < len(keys) else None
        if asked is None:
            return outlook
        return outlook._replace(asking=self._timed[asked].asking(len(keys) - outlook.known))

    def decline(self, keys: Sequence[ChunkKey], reason: str) -> None:
        """These chunks could be had and are computed instead; why. Counted, and now and then one of them is read in the
        background, so that a tier that has become fast is found out."""
        with self._lock:
            self.counts[f"declined_{reason}"] += len(keys)
            index = next(self._directory.holders(keys[0]), self._ask(keys)) if keys else None
        if index is not None:
            self._timed[index].probe(partial(self._probe, keys[0], index))

    def forget(self, keys: Iterable[ChunkKey], owner: int | None = None) -> None:
        """Drop these chunks everywhere: they are bad, or nobody may have them any more."""
        with self._lock:
            for key in keys:
                for index in self._directory.forget(key, owner):
                    self._trash[index].append(key)
        for index in range(len(self._trash)):
            self._sweep_soon(index)

    def clear(self, owner: int | None = None) -> None:
        """Drop every chunk everywhere (those being filled right now excepted); of one owner: its own and nobody's."""
        with self._lock:
            keys = self._directory.keys(owner)
        self.forget(keys, owner)

    def keys(self, owner: int | None = None) -> set[ChunkKey]:
        """Every chunk in RAM or in a tier; of one owner: its own and nobody's. What :meth:`clear` drops."""
        with self._lock:
            return self._directory.keys(owner)

    def unfinished(self, keys: set[ChunkKey], owner: int | None = None) -> int:
        """How many of these chunks, forgotten before, are being filled, or not yet deleted below."""
        with self._lock:
            return self._directory.unfinished(keys, owner)

    def reach(self, keys: Sequence[ChunkKey]) -> list[int]:
        """How many leading chunks of a run each place holds by itself: RAM, then every tier. No effect."""
        with self._lock:
            lower = [self._directory.held_first(index, keys) for index in range(len(self.tiers))]
            return [self._directory.ready_run(keys), *lower]

    @property
    def lanes(self) -> Sequence[Executor]:
        """The tiers' lanes, in the order of :attr:`tiers`."""
        return self._lanes

    def wait(self, timeout_s: float) -> None:
        """Return when a promotion has ended since the last wait, or after ``timeout_s``. For one waiting thread."""
        with self._arrived:
            if not self._arrivals:
                self._arrived.wait(timeout_s)
            self._arrivals = 0

    def stats(self) -> dict[str, int]:
        """Chunks by place and state now, and events since the start (all in chunks)."""
        with self._lock:
            held = {f"{tier.name}_held": self._directory.held(index) for index, tier in enumerate(self.tiers)}
            return {**self._directory.usage(), **held, **self.counts}

    def _populate(self, first: int) -> None:
        """On the spare lane: some slots' pages, then the next ones as new work, so that a close comes in between."""
        count = min(max(1, _POPULATE_BYTES // self.pool.slot_bytes), self.pool.slots - first)
        self.pool.populate(first, count)
        if first + count < self.pool.slots and self._spare is not None:
            self._spare.submit(partial(self._populate, first + count))

    # ---- promotion: lower tier -> slot ---------------------------------------------------------------------------

    def _claim(self, lease: LoadLease) -> list[tuple[Entry, int]]:
        """Under the lock: extend the lease as far as chunks are in RAM, on their way, or held lower. Of a run that is
        longer than RAM the end leaves for the beginning, after all else."""
        directory, promotions, known = self._directory, list[tuple[Entry, int]](), len(lease.entries)
        for key in lease.keys[len(lease.entries) :]:
            entry = directory.get(key)
            if entry is None:
                holder = next(directory.holders(key), None)
                if holder is None:
                    break
                entry = directory.reserve(key, (), holder, lease.owner)
                if entry is None:
                    self.counts["load_refused"] += 1
                    break
                promotions.append((entry, holder))
            elif entry.state is FILLING and entry.origin is None:
                break
            directory.pin(entry)
            lease.entries.append(entry)
            lease.origins.append(entry.origin if entry.state is FILLING else None)
        self.counts["ram_loaded"] += len(lease.entries) - known - len(promotions)
        return promotions

    def _promote_all(self, promotions: Sequence[tuple[Entry, int]]) -> None:
        for entry, index in promotions:
            if not self._timed[index].submit(partial(self._promote, entry, index)):
                with self._lock:
                    self.counts["promotion_refused"] += 1
                    self._directory.fill_failed(entry)

    def _promote(self, entry: Entry, index: int) -> None:
        """On a lane thread. A failed read tries the next tier that holds the chunk; then it is a miss. A chunk that
        nobody waits for any more is not read."""
        with self._lock:
            if not entry.pins:
                self._directory.fill_failed(entry)
                return
        arrived = self._timed[index].read(entry.key, self.pool.view(entry.slot))
        with self._arrived:
            again = None
            if arrived:
                self.counts[f"{self.tiers[index].name}_loaded"] += 1
                self._directory.filled(entry)
            else:
                self.counts[f"{self.tiers[index].name}_missed"] += 1
                self._directory.lost(index, entry.key)
                again = next(self._directory.holders(entry.key), None)
                if again is None:
                    self._directory.fill_failed(entry)
            self._arrivals += 1
            self._arrived.notify_all()
        if again is not None:
            self._promote_all([(entry, again)])
        self.on_arrival()

    def _ask(self, unknown: Sequence[ChunkKey]) -> int | None:
        """Under the lock: the shared tier that may know more of a run than we do."""
        if self._directory.get(unknown[0]) is not None or next(self._directory.holders(unknown[0]), None) is not None:
            return None
        return next((index for index, tier in enumerate(self.tiers) if tier.shared), None)

    def _find(self, lease: LoadLease, index: int) -> None:
        """On a lane thread: learn what a shared tier holds of the rest of the lease's run, and claim it."""
        with self._lock:
            unknown = lease.keys[len(lease.entries) :]
        found = unknown[: self._timed[index].find(unknown)]
        with self._arrived:
            self._trash[index] += self._directory.found(index, found[::-1])
            promotions = [] if lease.closed else self._claim(lease)
            lease.asking = False
            self._arrivals += 1
            self._arrived.notify_all()
        self._promote_all(promotions)
        self.on_arrival()
        self._sweep(index)

    def _probe(self, key: ChunkKey, index: int) -> None:
        """On a lane thread: read one chunk into scratch memory, only to learn how fast the tier is."""
        tier = self._timed[index]
        with self._lock:
            known = index in self._directory.holders(key)
        if not known:
            if not tier.find([key]):
                return
            with self._lock:
                self._trash[index] += self._directory.found(index, [key])
            self._sweep(index)
        pages = mmap.mmap(-1, self.pool.slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        # What was deleted and written anew while it was read is missed, and held.
        if not tier.read(key, memoryview(pages)) and not tier.find([key]):
            with self._lock:
                self._directory.lost(index, key)

    # ---- spill: slot -> lower tier -------------------------------------------------------------------------------

    def end_save(self, lease: SaveLease, commit: bool) -> None:
        """See :class:`kvtier.lease.Keeper`. Committed chunks are READY, and offered to every lower tier's lane."""
        with self._lock:
            for entry in lease.entries:
                if commit:
                    self._directory.filled(entry)
                else:
                    self._directory.fill_failed(entry)
            if not commit:
                return
            self._directory.touch(lease.run)
            self.counts["saved"] += len(lease.entries)
        for index, lane in enumerate(self._lanes):
            taken = sum(lane.submit(partial(self._spill, entry, index, lease.run)) for entry in lease.entries)
            with self._lock:
                self.counts[f"{self.tiers[index].name}_spill_refused"] += len(lease.entries) - taken

    def _spill(self, entry: Entry, index: int, run: Sequence[ChunkKey]) -> None:
        """On a lane thread. The chunk is pinned only from here on: a long queue holds no slots, and what was evicted
        before its turn is simply not written. Afterwards its ``run`` is hottest below as it is above, leaf last."""
        self._sweep(index)
        tier = self.tiers[index]
        with self._lock:
            victims = self._directory.spill_begun(entry, index) if entry.state is READY else None
            if entry.state is GONE:
                self.counts[f"{tier.name}_spill_late"] += 1
        if victims is None:
            return
        self._delete(index, victims)
        stored = self._timed[index].write(entry.key, self.pool.view(entry.slot))
        with self._lock:
            self.counts[f"{tier.name}_stored" if stored else f"{tier.name}_store_failed"] += 1
            if not self._directory.spill_ended(entry, index, stored):
                self._trash[index].append(entry.key)
            self._directory.stored_with(index, run)
        self._sweep(index)

    def _sweep(self, index: int) -> None:
        with self._lock:
            keys, self._trash[index] = self._trash[index], []
        self._delete(index, keys)

    def _delete(self, index: int, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.tiers[index].delete(key)
        if keys:
            with self._lock:
                self._directory.deleted(index, keys)

    def _sweep_soon(self, index: int) -> None:
        """Queue the tier's deletions if there are any. Refused: the lane's next write does them."""
        if self._trash[index]:
            self._lanes[index].submit(partial(self._sweep, index))

    # ---- for leases ----------------------------------------------------------------------------------------------

    def poll_load(self, lease: LoadLease) -> Match:
        """See :meth:`LoadLease.poll`."""
        with self._lock:
            entries, ready = lease.entries, lease.ready
            while ready < len(entries) and entries[ready].state is READY:
                ready += 1
            whole = next((at for at in range(ready, len(entries)) if entries[at].state is GONE), len(entries))
            if whole < len(entries):
                self._unpin(entries[whole:])
                del entries[whole:]
                lease.asking = False
            lease.ready = ready
            return Match(ready, whole - ready + lease.asking)

    def end_load(self, lease: LoadLease) -> None:
        """See :meth:`LoadLease.close`."""
        with self._lock:
            lease.closed = True
            self._unpin(lease.entries)
            lease.entries = []
            lease.ready = 0

    def _unpin(self, entries: Sequence[Entry]) -> None:
        """Last first, so that the beginning of the run ends up hottest."""
        for entry in reversed(entries):
            self._directory.unpin(entry)


def _nothing() -> None:
    """Nobody listens."""
