"""Store: a KVStore in this process, with one lock, the Directory, and the lanes of the lower tiers.

Decide under the lock, act outside it. The Directory is changed with the lock held, which needs
memory only, and microseconds. Tiers and copies run without the lock. Any thread may call any method
here, and no call waits for a tier."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.lanes import Lane
from kvtier.core.lookup import (
    ANONYMOUS,
    NO_LOOKUP,
    RAM,
    Asker,
    Ended,
    LookupResult,
    Progress,
    Served,
)
from kvtier.core.pool import Pool
from kvtier.core.steps import PIECE_CHUNKS, Steps, in_pieces, pieces
from kvtier.core.tenant import UNOWNED
from kvtier.eviction.adaptive import ALL_LRU, Orders
from kvtier.eviction.hints import Hint
from kvtier.load_policy.latency import Pace
from kvtier.store.directory import Directory
from kvtier.store.entry import FILLING, GONE, READY, Entry
from kvtier.store.lease import LoadLease, SaveLease
from kvtier.store.lookup import is_known, lookup_run
from kvtier.store.lower.lower_tier import Core, LowerTier, TierSpec
from kvtier.store.lower.promotion import Promotions
from kvtier.store.lower.spill import Spills
from kvtier.store.observer import Observer
from kvtier.store.observers.audit import Audit
from kvtier.store.observers.changes import Changes
from kvtier.store.observers.follower import Follower
from kvtier.store.observers.timings import ComputeCounts, Timings
from kvtier.store.purge import Purge
from kvtier.store.reports.miss_reasons import Past
from kvtier.store.sharing import Sharing, SpareLane
from kvtier.tiers.base import Tier

if TYPE_CHECKING:
    from kvtier.core.report import SizeClassStatus

_READY_CHUNKS = 512
"""Chunks in RAM that are pinned in one piece, at 0.1 us each. A new slot takes 3 us."""
_WHOLE_CHUNKS = 2048
"""Longest run of :meth:`Store.load_ready`, which holds the lock for half a millisecond."""
_PROBLEMS = 20


@dataclass(slots=True)
class _Filling:
    begun: float
    entries: list[Entry] = field(default_factory=list)


@dataclass(slots=True)
class _Claim:
    begun: float
    owner: int
    entries: list[Entry] = field(default_factory=list)
    """Pinned entries, in the order of the lease's keys."""
    sources: list[str] = field(default_factory=list)
    """For each entry, the tier that it had to come from, or RAM."""
    waits: bool = True


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """Chunks of a run that no lower tier holds. Read under the lock."""

    run: frozenset[ChunkKey]
    directory: Directory

    def __contains__(self, key: Any) -> bool:
        return key in self.run and next(self.directory.holders(key), None) is None


class Store:
    """A :class:`~kvtier.api.KVStore`: a pool of RAM slots over lower tiers, each with its own lane.

    Its calls have more parameters than KVStore's, for servers. ``owner`` says whose the chunks are,
    see :mod:`kvtier.store.directory`. ``store.save.steps(...)`` does ``store.save(...)`` in pieces,
    see :mod:`kvtier.core.steps`, as the others do that are ``in_pieces``.

    Args:
        pool: the slots. :meth:`close` closes it, the lanes and the tiers.
        tiers: the lower tiers, fastest first. ``recovered()`` of each is read here, once.
        orders: in which order chunks leave RAM and the tiers. An adaptive one learns on the spare
            lane.
        share: the part of each place that one owner may have, see :mod:`kvtier.store.directory`.
        spare: a lane without a tier. It makes the pool's pages present in the background.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: Pool,
        tiers: Sequence[TierSpec | tuple[Tier, Lane]] = (),
        orders: Orders = ALL_LRU,
        share: float | None = None,
        spare: Lane | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        places = [TierSpec(*each) for each in tiers]
        self.tiers = [place.tier for place in places]
        self._shared = next((at for at, tier in enumerate(self.tiers) if tier.shared), None)
        self._names: dict[int | None, str] = {
            index: tier.name for index, tier in enumerate(self.tiers)
        }
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._arrivals, self._closed = 0, False
        self.on_arrival: Callable[[], None] = lambda: None
        """Called on a lane thread, without the lock, whenever :meth:`wait` would return."""
        capacities = [tier.capacity for tier in self.tiers]
        below = [orders.on_evict if place.on_evict else orders.lower for place in places]
        self._directory = Directory(
            pool.slots, capacities, orders.ram, share, lower=below, keep=orders.keep
        )
        self.clock, self.begun = clock, clock()
        core = Core(self._lock, self._directory, pool, self.counts, clock)
        self._took = core.took
        self._spare = SpareLane(self._directory, pool, spare)
        self.touched = self._spare.touched
        """Future of the presence of the pool's pages. Cancelled by an earlier close."""
        self.lower = [LowerTier(core, index, place) for index, place in enumerate(places)]
        self._on_save, self._on_evict = list[Spills](), list[Spills]()
        for place, lower in zip(places, self.lower, strict=True):
            (self._on_evict if place.on_evict else self._on_save).append(Spills(core, lower))
        self._looking: set[int] = set()
        self._promotions = Promotions(core, self.lower, self._note_arrival)
        self._observe_itself(core, orders)
        self.sharing = Sharing(core, self.lower, self._spare)
        self.purge = Purge(core, self.lower, self.every_key)
        self._waits = [lower.wait for lower in self.lower]
        for lower in self.lower:
            keys = lower.tier.recovered()
            lower.found(keys, lower.owners(keys))
            lower.sweep_soon()
        self._spare.begin()

    def _observe_itself(self, core: Core, orders: Orders) -> None:
        """Add the observers that answer this Store's own questions."""
        rooms = dict(zip(self.place_names, [self.pool.slots, *self.capacities], strict=True))
        adaptive = orders.adaptive
        compute = ComputeCounts() if adaptive is None else ComputeCounts(adaptive.compute.s0)
        self._past = Past(core.directory)
        self.timings = Timings([tier.name for tier in self.tiers])
        self.follower = Follower(core.directory, core.lock, orders.adaptive, self.clock, rooms)
        self.follower.on_note, self._will_follow = self._follow_soon, False
        self._spare.on_touched = self._follow_soon
        self.audit = Audit(core, self.lower, self.invalidate)
        for observer in (self._past, self.timings, self.follower, self.audit, compute):
            core.directory.observers.add(observer)

    # ---- save and load, in whole and in pieces ---------------------------------------------------

    @in_pieces
    def save(
        self, keys: Sequence[ChunkKey], owner: int = 0, most: int | None = None
    ) -> Steps[SaveLease]:
        """See KVStore.save. At most ``most`` slots, which are given back if the work is left
        unfinished. Of a run that is longer than RAM, chunks that a lower tier holds leave RAM for
        those that none holds yet."""
        filling = _Filling(self.clock())
        lease, entries = SaveLease(self, self.pool, keys, filling), filling.entries
        wanted, missing = len(keys) if most is None else most, 0
        own = frozenset(keys)
        is_long = len(keys) > self.most_held
        keep: Container[ChunkKey] = _Unwritten(own, self._directory) if is_long else own
        try:
            if len(keys) > PIECE_CHUNKS:
                yield from self._in_order(self._directory.ordered, keys[PIECE_CHUNKS:])
            for number, part in enumerate(pieces(keys)):
                if number:
                    yield 0.0
                with self._lock:
                    if not number:
                        self._directory.ordered(part)
                    absent = self._directory.absent(part)
                    if is_long:
                        absent = [key for key in absent if key in keep]
                    missing += len(absent)
                    absent = absent[: wanted - len(entries)]
                    new = self._directory.reserve_run(absent, keep, owner)
                    entries += new
                    if len(new) < len(absent):
                        wanted = len(entries)
        except BaseException:
            lease.close()
            raise
        if missing > len(entries):
            with self._lock:
                self.counts["save_refused"] += missing - len(entries)
        lease.keys = [entry.key for entry in entries]
        lease.slots = [entry.slot for entry in entries]
        return lease

    @in_pieces
    def load(
        self,
        keys: Sequence[ChunkKey],
        start: int = 0,
        owner: int = 0,
        most: int | None = None,
        asker: Asker = ANONYMOUS,
    ) -> Steps[LoadLease]:
        """See KVStore.load. Pins are dropped if the work is left unfinished."""
        rest = keys[start:]
        claim = _Claim(self.clock(), owner)
        lease = LoadLease(self, self.pool, rest[:most], claim)
        try:
            if behind := keys[PIECE_CHUNKS:]:
                yield from self._in_order(self._directory.used, behind, _READY_CHUNKS)
            while True:
                with self._lock:
                    known = len(claim.entries)
                    if not known:
                        self._directory.used(keys[:PIECE_CHUNKS])
                    promotions = self._claim(lease, PIECE_CHUNKS)
                    got = len(claim.entries)
                    is_over = got == len(lease.keys) or got < known + PIECE_CHUNKS
                    asked = self._end_claim(lease, rest, most) if is_over else None
                self._promotions.begin(promotions)
                if promotions:
                    self._look_ahead_soon(owner)
                if is_over:
                    break
                yield 0.0
        except BaseException:
            lease.close()
            raise
        self._note_prompt(keys, asker)
        if asked is not None and not self.lower[asked].ask(partial(self._find, lease, asked)):
            with self._lock:
                lease.asking = False
        return lease

    def load_ready(
        self, keys: Sequence[ChunkKey], start: int = 0, *, asker: Asker = ANONYMOUS
    ) -> LoadLease | None:
        if len(keys) > _WHOLE_CHUNKS:
            return None
        begun, rest = self.clock(), keys[start:]
        with self._lock:
            entries = self._directory.pin_all(rest)
            if entries is None:
                return None
            self._directory.used(keys)
            self.counts["load_asked"] += len(rest)
            self.counts["ram_loaded"] += len(rest)
            for what in ("lookup", "load_wait"):
                self._took(what, "", self.clock() - begun)
        lease = LoadLease(self, self.pool, rest, _Claim(begun, 0, entries))
        lease.slots, lease.sources = [entry.slot for entry in entries], [RAM] * len(rest)
        self._note_prompt(keys, asker)
        return lease

    def load_unknown(
        self, keys: Sequence[ChunkKey], start: int = 0, *, asker: Asker = ANONYMOUS
    ) -> tuple[LookupResult, LoadLease] | None:
        begun, rest = self.clock(), keys[start:]
        if not rest or len(keys) > _READY_CHUNKS:
            return None
        with self._lock:
            if is_known(self._directory, rest[0]) or self._ask(rest) is not None:
                return None
            why = self._why_missing(rest[0], UNOWNED)
            self._took("lookup", "", self.clock() - begun)
            self._directory.used(keys)
            self.counts["load_asked"] += len(rest)
            self.counts[f"missed_{why}"] += len(rest)
        self._note_prompt(keys, asker)
        lease = LoadLease(self, self.pool, [], None)
        lease.open = False
        return LookupResult(NO_LOOKUP.steps, None, why), lease

    def _note_prompt(self, keys: Sequence[ChunkKey], asker: Asker) -> None:
        if not asker.again:
            for tell in self._directory.observers.prompt:
                tell(keys, asker)

    def _in_order(
        self,
        note: Callable[[Sequence[ChunkKey]], None],
        run: Sequence[ChunkKey],
        size: int = PIECE_CHUNKS,
    ) -> Steps[None]:
        """Call ``note`` with pieces of a run, the end first: the beginning is hottest."""
        parts = list(pieces(run, size)) if run else []
        while parts:
            with self._lock:
                note(parts.pop())
            if parts:
                yield 0.0

    def check(self, idle: bool = False) -> None:
        with self._lock:
            self._directory.check(idle)
        if idle and (busy := self._busy()):
            raise StateError(busy)

    def checking(self, idle: bool = False) -> Steps[str]:
        """:meth:`check` in pieces, slot by slot and then the counts, without what only a look at
        all slots at one moment can see. Returns the broken rules in words."""
        problems: list[str] = []
        checking = self._directory.checking(idle)
        while True:
            with self._lock:
                found = next(checking, None)
            if found is None:
                break
            problems += found
            yield 0.0
        if idle and (busy := self._busy()):
            problems.append(busy)
        return "; ".join(problems[:_PROBLEMS])

    def _busy(self) -> str:
        names = [lower.tier.name for lower in self.lower if not lower.lane.is_idle]
        return f"not at rest: work for {', '.join(names)} waits" if names else ""

    def close(self, timeout_s: float = 5.0) -> bool:
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            left = self._directory.next_out(None)[::-1] if self._on_evict else []
        for spills in self._on_evict:
            spills.offer(left[: spills.lower.chunks.capacity], ())
        clean = True
        for lane in self.lanes:
            clean &= lane.close(timeout_s)
        clean &= self._spare.close(timeout_s)
        for observer in self._directory.observers.all:
            clean &= observer.close(timeout_s)
        for lower in self.lower:
            lower.close([entry.key for entry in left])
        if clean:
            self.pool.close()
        return clean

    # ---- the rest of KVStore, and what servers ask -----------------------------------------------

    @in_pieces
    def lookup(self, keys: Sequence[ChunkKey], owner: int = 0) -> Steps[LookupResult]:
        begun, looking = self.clock(), lookup_run(self._directory, self._waits, keys)
        while True:
            with self._lock:
                try:
                    next(looking)
                except StopIteration as done:
                    steps: list[tuple[int, float | None]] = done.value
                    ready, known = steps[0][0], steps[-1][0]
                    asked = self._ask(keys[known:]) if known < len(keys) else None
                    asking = None if asked is None else self.lower[asked].asking(len(keys) - known)
                    why = self._end_of(keys, ready, known, owner)[1]
                    self._took("lookup", "", self.clock() - begun)
                    return LookupResult(steps, asking, why)
            yield 0.0

    @in_pieces
    def known(self, keys: Sequence[ChunkKey]) -> Steps[list[bool]]:
        found = list[bool]()
        for part in pieces(keys):
            with self._lock:
                found += [is_known(self._directory, key) for key in part]
            yield 0.0
        return found

    def decline(self, keys: Sequence[ChunkKey], reason: str) -> None:
        with self._lock:
            self.counts[f"declined_{reason}"] += len(keys)
            index = next(self._directory.holders(keys[0]), self._ask(keys)) if keys else None
        if index is not None:
            self.lower[index].probe(keys[0])

    def served(self, served: Served) -> None:
        hit = sum(served.hits.values())
        with self._lock:
            once = self._past.remembered_run(served.rest) * served.chunk_tokens
            once -= served.end % max(1, served.chunk_tokens)
            self.counts["asked_tokens"] += served.asked
            self.counts["ideal_tokens"] += hit + max(0, min(served.asked - hit, once))
            for place, tokens in served.hits.items():
                self.counts[f"{place}_hit_tokens"] += tokens
            for tell in self._directory.observers.served:
                tell(served)

    @in_pieces
    def invalidate(self, keys: Sequence[ChunkKey], owner: int | None = None) -> Steps[None]:
        """See KVStore.invalidate. ``owner``: whose chunks may be dropped
        (:func:`kvtier.core.tenant.may`)."""
        for part in pieces(keys):
            with self._lock:
                for key in part:
                    for index in self._directory.invalidate(key, owner):
                        self.lower[index].discard(key)
                for lower in self.lower:
                    lower.doubt(part, owner)
            yield 0.0
        for lower in self.lower:
            lower.sweep_soon()

    def invalidate_all(self) -> None:
        self.invalidate(self.every_key())

    def every_key(self) -> list[ChunkKey]:
        """Return every chunk, in one hold of the lock: see
        :class:`kvtier.server.shares.ScanLimiter`."""
        with self._lock:
            return self._directory.keys()

    @property
    def most_held(self) -> int:
        """See KVStore.most_held. Fewer than the pool's slots while other Stores have room there."""
        return self._directory.slots.limit

    @property
    def paces(self) -> dict[str, Pace]:
        return {lower.tier.name: lower.pace for lower in self.lower}

    @property
    def capacities(self) -> list[int]:
        return [lower.chunks.capacity for lower in self.lower]

    def watch(self, *, named_only: bool = False) -> Changes:
        """See KVStore.watch. The changes are noted until their ``end``."""
        return Changes(self._directory, self._lock, self.place_names, named_only=named_only)

    def observe(self, observer: Observer) -> None:
        """Add an observer, which is closed with the Store."""
        with self._lock:
            self._directory.observers.add(observer)

    @property
    def place_names(self) -> list[str]:
        return [RAM, *(tier.name for tier in self.tiers)]

    def lookup_by_tier(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the number of leading chunks that RAM, and then each tier, holds by itself."""
        with self._lock:
            lower = [tier.chunks.held_first(keys) for tier in self.lower]
            return [self._directory.ready_run(keys), *lower]

    @property
    def lanes(self) -> Sequence[Lane]:
        return [lower.lane for lower in self.lower]

    def wait(self, timeout_s: float) -> None:
        with self._arrived:
            if not self._arrivals:
                self._arrived.wait(timeout_s)
            self._arrivals = 0

    def stats(self) -> dict[str, int]:
        with self._lock:
            held = {f"{lower.tier.name}_held": len(lower.chunks.order) for lower in self.lower}
            stats = Counter({**self._directory.usage(), **held, **self.counts})
            stats["queued"] = sum(sum(lane.queued) for lane in self.lanes)
            for observer in self._directory.observers.all:
                stats.update(observer.counted())
            stats["ram_evicted"] = self._directory.evicted
            for spills in self._on_evict:
                stats[f"{spills.lower.tier.name}_spill_late"] += self._directory.evicted_unoffered
            return stats

    def status(self) -> SizeClassStatus:
        # imported here: it brings msgspec, which nothing else in a Store needs
        from kvtier.store.reports.status import read

        return read(self)

    # ---- what is done about prompts and hints afterwards -----------------------------------------

    def hint(self, keys: Sequence[ChunkKey], hint: Hint, session: str = "") -> None:
        for tell in self._directory.observers.hint:
            tell(keys, session, hint)

    def ended(self, ended: Ended) -> None:
        for tell in self._directory.observers.finished:
            tell(ended)

    def _follow_soon(self) -> None:
        if not self._will_follow:
            self._will_follow = True
            if not self._spare.submit(self._follow):
                self._will_follow = False

    def _follow(self) -> None:
        """Let the follower work, on the spare lane. Other threads run Python in between."""
        self._will_follow = False
        if self.follower.work(partial(time.sleep, 0)):
            self._follow_soon()

    # ---- promotion: lower tier -> slot -----------------------------------------------------------

    def _claim(self, lease: LoadLease, most: int | None = None) -> list[tuple[Entry, int]]:
        """Extend the lease as far as the chunks are in RAM, on their way, or in a lower tier.
        ``most``: only the next chunks in RAM, and this many others. Returns each entry that has to
        be read, with its tier. For a run longer than RAM, its own end leaves last. Under the
        lock."""
        claim: _Claim = lease.held
        directory, promotions, names = self._directory, list[tuple[Entry, int]](), self._names
        known = len(claim.entries)
        keys = lease.keys[known:]
        ready = directory.pin_ready(keys if most is None else keys[:_READY_CHUNKS])
        claim.entries += ready
        claim.sources += [RAM] * len(ready)
        for key in keys[len(ready) : None if most is None else len(ready) + most]:
            entry = directory.get(key)
            if entry is None:
                holder = next(
                    (index for index in directory.holders(key) if self.tiers[index].may_read(key)),
                    None,
                )
                if holder is None:
                    break
                entry = directory.reserve(key, (), holder, claim.owner)
                if entry is None:
                    self.counts["load_refused"] += 1
                    break
                promotions.append((entry, holder))
            elif entry.state is FILLING and entry.origin is None:
                break
            directory.pin(entry)
            claim.entries.append(entry)
            claim.sources.append(names[entry.origin] if entry.state is FILLING else RAM)
        self.counts["ram_loaded"] += len(claim.entries) - known - len(promotions)
        return promotions

    def _end_claim(
        self, lease: LoadLease, rest: Sequence[ChunkKey], most: int | None
    ) -> int | None:
        """Under the lock, when a lease for ``rest`` names what it can: count what it is short of.
        Returns the shared tier that has to be asked first."""
        claim: _Claim = lease.held
        self.counts["load_asked"] += len(rest)
        unknown = lease.keys[len(claim.entries) :]
        asked = self._ask(unknown) if unknown else None
        lease.asking = asked is not None
        if asked is None:
            self._miss(rest, len(claim.entries), claim.owner, most)
        return asked

    def _note_arrival(self) -> None:
        """Wake :meth:`wait`: a promotion has ended, or a shared tier has answered."""
        with self._arrived:
            self._arrivals += 1
            self._arrived.notify_all()
        self.on_arrival()

    def _ask(self, unknown: Sequence[ChunkKey]) -> int | None:
        """Return the shared tier (by index) that may hold more of a run. Under the lock."""
        if (
            self._shared is None
            or self._directory.get(unknown[0]) is not None
            or next(self._directory.holders(unknown[0]), None) is not None
        ):
            return None
        return self._shared

    def _find(self, lease: LoadLease, index: int) -> None:
        """Ask a shared tier for the rest of the run, and claim what it holds. On a lane thread."""
        claim: _Claim = lease.held
        with self._lock:
            unknown = lease.keys[len(claim.entries) :]
        lower = self.lower[index]
        found = unknown[: lower.find(unknown)][::-1]
        for slower in self.lower[index + 1 :]:
            if not found and slower.tier.shared:
                lower = slower
                found = unknown[: lower.find(unknown)][::-1]
        owners = lower.owners(found)
        with self._arrived:
            lower.found(found, owners)
            promotions = self._claim(lease) if lease.open else []
            self._miss(lease.keys, len(claim.entries), claim.owner)
            lease.asking = False
            self._arrivals += 1
            self._arrived.notify_all()
        self._promotions.begin(promotions)
        self.on_arrival()
        lower.sweep()

    # ---- misses ----------------------------------------------------------------------------------

    def _end_of(
        self, keys: Sequence[ChunkKey], ready: int, known: int, owner: int
    ) -> tuple[int, str]:
        """Return how many leading chunks this owner can have, and why not more ("" if all).
        ``ready``: number in RAM, ``known``: in RAM or in a lower tier. Under the lock."""
        directory, lower = self._directory, self.lower
        if ready < len(keys) and directory.get(keys[ready]) is None:
            holders = list(directory.holders(keys[ready]))
            if holders and all(lower[index].away for index in holders):
                return ready, "tier_down"
        return known, "" if known == len(keys) else self._why_missing(keys[known], owner)

    def _why_missing(self, key: ChunkKey, owner: int) -> str:
        lower, why = self.lower, self._past.why(key)
        unsure = why in {"cold", "evicted"} and any(one.away and one.tier.shared for one in lower)
        apart = self.sharing.is_elsewhere(owner) or any(one.tier.is_apart for one in lower)
        if why == "cold" and apart:
            return "other_chunk_size"
        return "tier_down" if unsure else why

    def _miss(
        self, keys: Sequence[ChunkKey], ready: int, owner: int, most: int | None = None
    ) -> None:
        """Count, by reason, the chunks that a load lacks. Chunks beyond ``most`` were declined.
        Under the lock."""
        if ready == len(keys):
            return
        end, why = self._end_of(keys, ready, self._directory.held_run(keys, ready), owner)
        if why and (most is None or most >= end):
            self.counts[f"missed_{why}"] += len(keys) - end

    # ---- for leases ------------------------------------------------------------------------------

    def end_save(self, lease: SaveLease, *, commit: bool) -> Steps[None]:
        """See :class:`kvtier.store.lease.Keeper`. Committed chunks are offered to every lane."""
        filling: _Filling = lease.held
        entries = filling.entries
        for part in pieces(entries):
            with self._lock:
                if commit:
                    self._directory.filled(part)
                else:
                    for entry in part:
                        self._directory.fill_failed(entry)
                self.counts["saved"] += commit * len(part)
            yield 0.0
        if not commit:
            return
        if entries:
            with self._lock:
                self._took("save", "", self.clock() - filling.begun)
        yield from self._in_order(self._directory.ordered, lease.run)
        for spills in self._on_save:
            for part in pieces(entries):
                spills.offer(part, lease.run)
                yield 0.0
        if entries:
            self._look_ahead_soon(entries[0].owner)

    def _look_ahead_soon(self, owner: int) -> None:
        """Schedule early writes of the chunks that ``owner``'s new slots will evict next."""
        if self._on_evict and owner not in self._looking:
            self._looking.add(owner)
            if not self._on_evict[0].lower.lane.submit(partial(self._look_ahead, owner)):
                self._looking.discard(owner)

    def _look_ahead(self, owner: int) -> None:
        self._on_evict[0].lower.sweep()
        with self._lock:
            self._looking.discard(owner)
            entries = self._directory.next_out(owner)
        for spills in self._on_evict:
            spills.offer(entries, ())

    def poll_load(self, lease: LoadLease) -> Steps[Progress]:
        yield from ()  # in one piece
        claim: _Claim = lease.held
        if not lease.keys:
            return Progress(0, 0)
        with self._lock:
            entries, before = claim.entries, len(lease.slots)
            ready = before
            while ready < len(entries) and entries[ready].state is READY:
                ready += 1
            whole = next(
                (at for at in range(ready, len(entries)) if entries[at].state is GONE), len(entries)
            )
            if whole < len(entries):
                self._unpin(entries[whole:])
                del entries[whole:], claim.sources[whole:]
                lease.asking = False
            if ready > before:
                lease.slots += [entry.slot for entry in entries[before:ready]]
                lease.sources += claim.sources[before:ready]
            coming = whole - ready + lease.asking
            if claim.waits and not coming:
                claim.waits = False
                self._took("load_wait", "", self.clock() - claim.begun)
            return Progress(ready, coming)

    def end_load(self, lease: LoadLease) -> Steps[None]:
        """See :class:`kvtier.store.lease.Keeper`. Unpins the run's end before its beginning."""
        claim: _Claim = lease.held
        with self._lock:
            entries, claim.entries = claim.entries, []
            self._load_ended(claim, entries[: lease.ready], lease.sources)
            parts = [*pieces(entries)]
            self._unpin(parts.pop())
        for part in reversed(parts):
            yield 0.0
            with self._lock:
                self._unpin(part)

    def _load_ended(self, claim: _Claim, ready: Sequence[Entry], sources: Sequence[str]) -> None:
        """Note a load's time, under the slowest tier that it came from. Under the lock."""
        if sources:
            slowest_first = (tier.name for tier in reversed(self.tiers))
            place = next((name for name in slowest_first if name in sources), RAM)
            self._took("load", place, self.clock() - claim.begun)
        for tell in self._directory.observers.loaded:
            tell(ready)

    def _unpin(self, entries: Sequence[Entry]) -> None:
        """Unpin entries, and tell promotions of it. Under the lock."""
        self._directory.unpin(entries)
        self._promotions.unpinned(entries)
