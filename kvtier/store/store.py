"""Store: one lock + Directory + lanes: the claims and leases; each lower tier's own part is a
Below.

Decide under the lock, act outside it: the Directory is changed with the lock held (memory only,
    microseconds), tiers
and copies run without it. Everything here is safe to call from any thread; no call waits for a
tier.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial

from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Executor
from kvtier.core.lookup import LookupResult, Progress
from kvtier.core.pool import Pool
from kvtier.core.steps import AT_ONCE, Steps, pieces, whole
from kvtier.store.adaptive import Adaptive
from kvtier.store.audit import Audit
from kvtier.store.changes import Change, Changes
from kvtier.store.directory import FILLING, GONE, READY, Directory, Entry
from kvtier.store.eviction import LRU, PolicyOf
from kvtier.store.follower import Follower
from kvtier.store.hints import Hint
from kvtier.store.lease import LoadLease, SaveLease
from kvtier.store.lookup import lookup_run
from kvtier.store.lower_tier import Core, LowerTier, Place
from kvtier.store.promotion import Promotions
from kvtier.store.room import Room
from kvtier.store.timings import RAM, Timings
from kvtier.store.what_if import Point
from kvtier.tiers.base import Tier

_POPULATE_BYTES = 32 << 20
_POPULATE_S = 5.0
_SLOTS_CHECKED = 512
_PROBLEMS = 20


class Store:
    """A pool of RAM slots over lower tiers (fastest first), each with its own lane.

    ``recovered()`` of every tier is read here, once. :meth:`close` closes lanes, tiers and the
    pool. ``share`` and
    every ``owner``: see :mod:`kvtier.store.directory`; for servers. ``spare`` is a lane without a
      tier: it makes the
    pool's pages present while nobody waits. ``clock``: monotonic seconds, for forecasts. An
    Adaptive ``policy`` is RAM's and learns on the spare lane; the tiers' is LRU then.
    """

    def __init__(
        self,
        pool: Pool,
        tiers: Sequence[Place | tuple[Tier, Executor]] = (),
        policy: PolicyOf | Adaptive = LRU,
        share: float | None = None,
        spare: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        places = [Place(*each) for each in tiers]
        self.tiers = [place.tier for place in places]
        self.counts: Counter[str] = Counter()
        """Events in chunks since the start; see :meth:`stats`."""
        self._spare = spare
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._arrivals = 0
        self._closed = False
        self.touched: Future[None] = (
            Future()
        )  # done when ``spare`` has made every page; cancelled by a close before
        self.on_arrival: Callable[[], None] = _nothing
        """Called on a lane thread, without the lock, whenever :meth:`wait` would return."""
        self._adaptive = policy if isinstance(policy, Adaptive) else None
        capacities = [tier.capacity for tier in self.tiers]
        self._directory = Directory(
            pool.slots, capacities, policy, share, lower=LRU if self._adaptive else policy
        )
        self._changes: Changes | None = None
        self.timings = Timings([tier.name for tier in self.tiers])
        self._clock = clock
        core = Core(self._lock, self._directory, pool, self.counts, self.timings)
        rooms = {"ram": pool.slots, **{tier.name: tier.capacity for tier in self.tiers}}
        self._follower = Follower(self._directory, self._lock, self._adaptive, clock, rooms)
        self._below = [LowerTier(core, index, place, clock) for index, place in enumerate(places)]
        self._on_save = [below for below in self._below if not below.on_evict]
        self._on_evict = [below for below in self._below if below.on_evict]
        self._looking: set[int] = set()
        """Owners for whom a :meth:`_look_ahead` is queued."""
        self._promotions = Promotions(core, self._below, self._note_arrival, clock)
        self.audit = Audit(core, self._below, self.invalidate)
        self._waits = [below.timed.wait for below in self._below]
        for below in self._below:
            keys = below.tier.recovered()
            below.found(keys, below.timed.owners(keys))
            below.sweep_soon()
        if spare is not None:
            spare.submit(partial(self._populate, 0))

    # ---- the five verbs --------------------------------------------------------------------------

    def save(self, keys: Sequence[ChunkKey], owner: int = 0) -> SaveLease:
        """Reserve slots for the chunks of ``keys`` (the whole run so far) that are not in RAM.

        The lease names them; fewer when there is no room, none for what is held. Its owner fills
        the slots, then commits.
        """
        return whole(self.saving(keys, owner))

    def saving(
        self, keys: Sequence[ChunkKey], owner: int = 0, most: int | None = None
    ) -> Steps[SaveLease]:
        """:meth:`save` in pieces, of at most ``most`` slots. What is reserved goes back when it is
        left unfinished."""
        lease = SaveLease(self, keys, [], self._clock())
        keep, wanted, missing = frozenset(keys), len(keys) if most is None else most, 0
        try:
            yield from self._ordering(keys[AT_ONCE:])
            for number, part in enumerate(pieces(keys)):
                if number:
                    yield 0.0
                with self._lock:
                    if not number:
                        self._directory.ordered(part)
                    absent = [key for key in part if self._directory.get(key) is None]
                    missing += len(absent)
                    for key in absent[: wanted - len(lease.entries)]:
                        entry = self._directory.reserve(key, keep, None, owner)
                        if entry is None:
                            wanted = len(lease.entries)
                            break
                        lease.entries.append(entry)
        except BaseException:
            lease.close()
            raise
        with self._lock:
            self.counts["save_refused"] += missing - len(lease.entries)
        return lease

    def load(
        self,
        keys: Sequence[ChunkKey],
        start: int = 0,
        owner: int = 0,
        most: int | None = None,
        session: str = "",
    ) -> LoadLease:
        """Pin what can be served of ``keys[start:]`` without a gap, at most ``most`` chunks, and
        start promoting what lower tiers hold. The lease pins each chunk from now (or its arrival)
        until it is closed: poll, copy, close.
        ``session``: the name of the conversation; without one it is told from the chunks.
        """
        return whole(self.loading(keys, start, owner, most, session))

    def loading(
        self,
        keys: Sequence[ChunkKey],
        start: int = 0,
        owner: int = 0,
        most: int | None = None,
        session: str = "",
    ) -> Steps[LoadLease]:
        """:meth:`load` in pieces. What it pinned is let go when it is left unfinished."""
        rest = keys[start:]
        lease = LoadLease(self, rest[:most], owner, self._clock())
        try:
            yield from self._in_order(self._directory.used, keys)
            while self._load_piece(lease, AT_ONCE, owner):
                yield 0.0
        except BaseException:
            lease.close()
            raise
        with self._lock:
            self.counts["load_asked"] += len(rest)
            promotions = self._claim(lease, AT_ONCE)
            unknown = lease.keys[len(lease.entries) :]
            asked = self._ask(unknown) if unknown else None
            lease.asking = asked is not None
            if asked is None:
                self._miss(rest, len(lease.entries), most)
        self._promotions.begin(promotions)
        self._follow_soon(self._follower.prompt(keys, session))
        if promotions:
            self._look_ahead_soon(owner)
        if asked is not None and not self._below[asked].timed.submit(
            partial(self._find, lease, asked)
        ):
            with self._lock:
                lease.asking = False
        return lease

    def _load_piece(self, lease: LoadLease, count: int, owner: int) -> bool:
        """Claim one piece of a run, but for the last one. False: the rest is the last, or the run
        has a gap."""
        known = len(lease.entries)
        if len(lease.keys) - known <= count:
            return False
        with self._lock:
            promotions = self._claim(lease, count)
        self._promotions.begin(promotions)
        if promotions:
            self._look_ahead_soon(owner)
        return len(lease.entries) - known == count

    def _ordering(self, run: Sequence[ChunkKey]) -> Steps[None]:
        """A run was stored: hot again, and leaves leaf first."""
        return self._in_order(self._directory.ordered, run)

    def _in_order(
        self, note: Callable[[Sequence[ChunkKey]], None], run: Sequence[ChunkKey]
    ) -> Steps[None]:
        """Tell the directory of a run in pieces; its end first, so that its beginning is
        hottest."""
        parts = list(pieces(run))
        for part in reversed(parts):
            with self._lock:
                note(part)
            if part is not parts[0]:
                yield 0.0

    def check(self, idle: bool = False) -> None:
        """Raise StateError when an internal rule is broken; ``idle``: also when something is in
        progress."""
        with self._lock:
            self._directory.check(idle)

    def checking(self, idle: bool = False) -> Steps[str]:
        """What is broken in words, "" if nothing is: :meth:`check` in pieces, each slot by itself
        and then the counts, so without what only a look at all slots at one moment can see."""
        problems: list[str] = []
        for first in range(0, self.pool.slots, _SLOTS_CHECKED):
            with self._lock:
                problems += self._directory.check_slots(first, _SLOTS_CHECKED)[:1]
            yield 0.0
        with self._lock:
            problems += self._directory.check_counts(idle)
        return "; ".join(problems[:_PROBLEMS])

    def close(self, timeout_s: float = 5.0) -> bool:
        """Run queued writes for up to ``timeout_s`` seconds, then close lanes, tiers and pool.

        Returns False when something was dropped or hangs. Safe to call twice.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            left = self._directory.all_out() if self._on_evict else []
        for below, capacity in zip(self._below, self.capacities, strict=True):
            if below.on_evict:
                below.offer(left[:capacity], ())
        clean = True
        for lane in [*self.lanes, *([self._spare] if self._spare else [])]:
            clean &= lane.close(timeout_s)
        self.touched.cancel()
        for below in self._below:
            below.close([entry.key for entry in left])
        if clean:
            self.pool.close()
        return clean

    # ---- the rest of the surface -----------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupResult:
        """How far :meth:`load` would get with the run, and when. No effect; memory only."""
        return whole(self.looking_up(keys))

    def looking_up(self, keys: Sequence[ChunkKey]) -> Steps[LookupResult]:
        """:meth:`lookup` in pieces."""
        begun, looking = self._clock(), lookup_run(self._directory, self._waits, keys)
        while True:
            with self._lock:
                try:
                    next(looking)
                except StopIteration as done:
                    result: LookupResult = done.value
                    break
            yield 0.0
        with self._lock:
            asked = self._ask(keys[result.known :]) if result.known < len(keys) else None
            result = result._replace(why=self._end_of(keys, result.ready, result.known)[1])
            self.timings.lookup.add(self._clock() - begun)
        if asked is None:
            return result
        return result._replace(asking=self._below[asked].timed.asking(len(keys) - result.known))

    def decline(self, keys: Sequence[ChunkKey], reason: str) -> None:
        """These chunks could be had and are computed instead; why. Counted, and now and then one of
        them is read in the background, so that a tier that has become fast is found out."""
        with self._lock:
            self.counts[f"declined_{reason}"] += len(keys)
            index = next(self._directory.holders(keys[0]), self._ask(keys)) if keys else None
        if index is not None:
            self._below[index].probe(keys[0])

    def invalidate(self, keys: Sequence[ChunkKey], owner: int | None = None) -> None:
        """Drop these chunks everywhere: they are bad, or nobody may have them any more."""
        whole(self.invalidating(keys, owner))

    def invalidating(self, keys: Sequence[ChunkKey], owner: int | None = None) -> Steps[None]:
        """:meth:`invalidate` in pieces."""
        for part in pieces(keys):
            with self._lock:
                for key in part:
                    for index in self._directory.invalidate(key, owner):
                        self._below[index].discard(key)
            yield 0.0
        for below in self._below:
            below.sweep_soon()

    def invalidate_all(self, owner: int | None = None) -> None:
        """Drop every chunk everywhere (those being filled right now excepted); of one owner: its
        own and nobody's."""
        self.invalidate(self.every_key(), owner)

    def every_key(self) -> list[ChunkKey]:
        """Every chunk in RAM or in a tier, some of them twice. Holds the lock for 20 ns a chunk:
        see :class:`kvtier.server.shares.Pace`."""
        with self._lock:
            return self._directory.keys()

    def keys(self, owner: int | None = None) -> set[ChunkKey]:
        """Every chunk in RAM or in a tier; of one owner: its own and nobody's. What :meth:`clear`
        drops."""
        return whole(self.finding(owner))

    def finding(self, owner: int | None = None) -> Steps[set[ChunkKey]]:
        """:meth:`keys` in pieces."""
        found = set[ChunkKey]()
        for part in pieces(self.every_key()):
            with self._lock:
                found.update(self._directory.of(part, owner))
            yield 0.0
        return found

    def purge_unseen(self, owner: int | None) -> list[Future[tuple[int, bool]]]:
        """For every tier: see :meth:`kvtier.store.lower_tier.LowerTier.purge_unseen`."""
        return [below.purge_unseen(owner) for below in self._below]

    def unfinished(self, keys: Sequence[ChunkKey], owner: int | None = None) -> int:
        """How many of these chunks, forgotten before, are being filled, or not yet deleted
        below."""
        return whole(self.outliving(keys, owner))

    def outliving(self, keys: Sequence[ChunkKey], owner: int | None = None) -> Steps[int]:
        """:meth:`unfinished` in pieces."""
        left = 0
        for part in pieces(keys):
            with self._lock:
                left += self._directory.unfinished(part, owner)
            yield 0.0
        return left

    @property
    def slots(self) -> int:
        """Slots that may be in use now; fewer than the pool has while another Store has the room of
        the others."""
        return self._directory.slots

    @property
    def capacities(self) -> list[int]:
        """Chunks that each of :attr:`tiers` may hold now."""
        return [self._directory.capacity(index) for index in range(len(self.tiers))]

    @property
    def occupied(self) -> int:
        """Slots of the pool that have memory, or may get some at any time."""
        with self._lock:
            return self._directory.occupied

    def rooms(self, turn: int) -> dict[str, Room]:
        """What it has of ``ram``, and of every tier, by its name, with a budget that can be
        divided. ``turn``: how often that was looked at by whoever divides, 0: nobody else shares;
        see :mod:`kvtier.store.ages`."""
        with self._lock:
            directory, most = self._directory, self.pool.slots
            directory.ages.begin(turn)
            wanted = (
                directory.crowded[0] + self.counts["save_refused"] + self.counts["load_refused"]
            )
            slots, used, occupied = directory.slots, directory.in_use, directory.occupied
            ram = Room(
                self.pool.slot_bytes, 0, most, slots, used, occupied, wanted, directory.coldest()
            )
            lower = [(below.tier.name, below.room()) for below in self._below]
            return {"ram": ram, **{name: room for name, room in lower if room is not None}}

    def lend(self, spare: Executor | None = None) -> None:
        """Before anybody uses it, and without ``spare`` until now: other Stores have the room of
        all that was not found in the tiers."""
        with self._lock:
            self._directory.shrink(0, self.pool.slots)
            self._directory.gave_back(self._directory.leaving(self.pool.slots)[::-1])
            for below in self._below:
                below.lend()
        self._spare = spare
        self.touched.set_result(None)

    def sharing(self, limits: Mapping[str, int]) -> Steps[None]:
        """Hold at most so many chunks in these of :meth:`rooms` from now on; the memory and blocks
        of the others go back to the host. On a thread that may block. Slots that somebody holds now
        go back when this is called again.
        """
        if "ram" in limits:
            yield from self._use(limits["ram"])
        for below in self._below:
            if below.tier.name in limits:
                yield from below.limit(limits[below.tier.name])

    def _use(self, slots: int) -> Steps[None]:
        while True:
            with self._lock:
                more = slots <= self._directory.slots and self._directory.shrink(slots, AT_ONCE)
            if not more:
                break
            yield 0.0
        while True:
            with self._lock:
                leaving = self._directory.leaving(AT_ONCE)
            if not leaving:
                break
            self._end_populating()
            for slot in leaving:
                self.pool.give_back(slot)
            with self._lock:
                self._directory.gave_back(leaving)
            yield 0.0
        while (now := self._directory.slots) < slots:
            growing = min(slots, now + AT_ONCE)
            if self._spare is not None:
                with self._lock:
                    given = self._directory.given(growing - now)
                for slot in given:
                    self.pool.populate(slot, 1)
            with self._lock:
                self._directory.grow(growing)
            yield 0.0

    def watch(self) -> bool:
        """Note from now on what comes to a place and what leaves it, for :meth:`changes`. True: it
        is done here."""
        with self._lock:
            self._changes = self._directory.watch()
        return True

    def changes(self) -> list[Change] | None:
        """What came and what left since the last call, in order; see
        :mod:`kvtier.store.changes`. Empty where nobody watches."""
        if self._changes is None or not self._changes.waits:
            return []
        with self._lock:
            return self._changes.take()

    @property
    def has_changes(self) -> bool:
        return self._changes is not None and self._changes.waits

    def places(self, keys: Sequence[ChunkKey]) -> list[list[int]]:
        """For each chunk, the places that it can be served from now. No effect; memory only."""
        with self._lock:
            return [self._directory.places(key) for key in keys]

    def lookup_by_tier(self, keys: Sequence[ChunkKey]) -> list[int]:
        """How many leading chunks of a run each place holds by itself: RAM, then every tier. No
        effect."""
        with self._lock:
            lower = [self._directory.held_first(index, keys) for index in range(len(self.tiers))]
            return [self._directory.ready_run(keys), *lower]

    @property
    def lanes(self) -> Sequence[Executor]:
        """The tiers' lanes, in the order of :attr:`tiers`."""
        return [below.lane for below in self._below]

    def wait(self, timeout_s: float) -> None:
        """Return when a promotion has ended since the last wait, or after ``timeout_s``. For one
        waiting thread."""
        with self._arrived:
            if not self._arrivals:
                self._arrived.wait(timeout_s)
            self._arrivals = 0

    def stats(self) -> dict[str, int]:
        """Chunks by place and state now, and events since the start (all in chunks)."""
        with self._lock:
            held = {
                f"{tier.name}_held": self._directory.held(index)
                for index, tier in enumerate(self.tiers)
            }
            stats = Counter({**self._directory.usage(), **held, **self.counts})
            stats.update(self._follower.counts)
            if self._adaptive is not None:
                stats.update(self._adaptive.counts())
            stats["ram_evicted"] = self._directory.evicted
            for below in self._on_evict:
                stats[f"{below.tier.name}_spill_late"] += self._directory.evicted_unoffered
            return stats

    def _populate(self, first: int) -> None:
        """On the spare lane: some slots' pages, then the next ones as new work, so that a close
        comes in between."""
        count = min(max(1, _POPULATE_BYTES // self.pool.slot_bytes), self.pool.slots - first)
        self.pool.populate(first, count)
        if first + count < self.slots == self.pool.slots and self._spare is not None:
            self._spare.submit(partial(self._populate, first + count))
        elif self.touched.set_running_or_notify_cancel():
            self.touched.set_result(None)

    def _end_populating(self) -> None:
        """The pool has fewer slots: what :meth:`_populate` makes present later would stay so,
        although it is given back."""
        if self._spare is not None:
            with suppress(CancelledError, TimeoutError):
                self.touched.result(_POPULATE_S)

    # ---- what is done about prompts and hints afterwards -----------------------------------------

    def hint(self, keys: Sequence[ChunkKey], hint: Hint, session: str = "") -> None:
        """Something is known of the run ``keys``, a prompt's, or (an empty one) of the last prompt
        of the session with this name. Soft; followed in the background, after the prompts that came
        before it."""
        self._follow_soon(self._follower.hint(keys, session, hint))

    def what_if(self) -> dict[str, list[Point]]:
        """What an LRU of other sizes than RAM's, or a tier's, would have hit since the start."""
        return {place: curve.points() for place, curve in self._follower.curves.items()}

    def _follow_soon(self, waiting: bool) -> None:
        """On the spare lane, once the pool's pages are there."""
        if waiting and self._spare is not None and self.touched.done():
            self._spare.submit(self._follow)

    def _follow(self) -> None:
        """On the spare lane."""
        if self._follower.work(_yield) and self._spare is not None:
            self._spare.submit(self._follow)

    # ---- promotion: lower tier -> slot -----------------------------------------------------------

    def _claim(self, lease: LoadLease, most: int | None = None) -> list[tuple[Entry, int]]:
        """Under the lock: extend the lease as far as chunks are in RAM, on their way, or held
        lower, by at most ``most``. Of a run that is longer than RAM the end leaves for the
        beginning, after all else."""
        directory, promotions, known = (
            self._directory,
            list[tuple[Entry, int]](),
            len(lease.entries),
        )
        for key in lease.keys[known : None if most is None else known + most]:
            entry = directory.get(key)
            if entry is None:
                holder = next(
                    (index for index in directory.holders(key) if self._below[index].may_read(key)),
                    None,
                )
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

    def _note_arrival(self) -> None:
        """A promotion has ended, or a question was answered."""
        with self._arrived:
            self._arrivals += 1
            self._arrived.notify_all()
        self.on_arrival()

    def _ask(self, unknown: Sequence[ChunkKey]) -> int | None:
        """Under the lock: the shared tier that may know more of a run than we do."""
        if (
            self._directory.get(unknown[0]) is not None
            or next(self._directory.holders(unknown[0]), None) is not None
        ):
            return None
        return next((index for index, tier in enumerate(self.tiers) if tier.shared), None)

    def _find(self, lease: LoadLease, index: int) -> None:
        """On a lane thread: learn what a shared tier holds of the rest of the lease's run, and
        claim it."""
        with self._lock:
            unknown = lease.keys[len(lease.entries) :]
        below = self._below[index]
        found = unknown[: below.timed.find(unknown)][::-1]
        for slower in self._below[index + 1 :]:
            if not found and slower.tier.shared:
                below = slower
                found = unknown[: below.timed.find(unknown)][::-1]
        owners = below.timed.owners(found)
        with self._arrived:
            below.found(found, owners)
            promotions = [] if lease.closed else self._claim(lease)
            self._miss(lease.keys, len(lease.entries))
            lease.asking = False
            self._arrivals += 1
            self._arrived.notify_all()
        self._promotions.begin(promotions)
        self.on_arrival()
        below.sweep()

    # ---- misses ----------------------------------------------------------------------------------

    def _end_of(self, keys: Sequence[ChunkKey], ready: int, known: int) -> tuple[int, str]:
        """Under the lock: how many leading chunks of a run can be had, of which ``ready`` are here
        and ``known`` here or below; and the reason why no more, "" when that is all."""
        directory, below = self._directory, self._below
        if ready < len(keys) and directory.get(keys[ready]) is None:
            holders = list(directory.holders(keys[ready]))
            if holders and all(below[index].away for index in holders):
                return ready, "tier_down"
        if known == len(keys):
            return known, ""
        why = directory.why(keys[known])
        unsure = why in {"cold", "evicted"} and any(one.away and one.tier.shared for one in below)
        return known, "tier_down" if unsure else why

    def _miss(self, keys: Sequence[ChunkKey], ready: int, most: int | None = None) -> None:
        """Under the lock: count by reason what a load is short of, but for what was declined,
        beyond ``most``."""
        end, why = self._end_of(keys, ready, self._directory.held_run(keys, ready))
        if why and (most is None or most >= end):
            self.counts[f"missed_{why}"] += len(keys) - end

    # ---- for leases ------------------------------------------------------------------------------

    def end_save(self, lease: SaveLease, commit: bool) -> Steps[None]:
        """See :class:`kvtier.store.lease.Keeper`. Committed chunks are READY, and offered to every
        lower tier's lane."""
        for part in pieces(lease.entries):
            with self._lock:
                for entry in part:
                    if commit:
                        self._directory.filled(entry)
                    else:
                        self._directory.fill_failed(entry)
                self.counts["saved"] += commit * len(part)
            yield 0.0
        if not commit:
            return
        if lease.entries:
            with self._lock:
                self.timings.save.add(self._clock() - lease.begun)
        yield from self._ordering(lease.run)
        for below in self._on_save:
            for part in pieces(lease.entries):
                below.offer(part, lease.run)
                yield 0.0
        if lease.entries:
            self._look_ahead_soon(lease.entries[0].owner)

    def _look_ahead_soon(self, owner: int) -> None:
        """``owner`` has taken slots: tiers that write on eviction shall have what leaves next
        before it leaves."""
        if self._on_evict and owner not in self._looking:
            self._looking.add(owner)
            if not self._on_evict[0].lane.submit(partial(self._look_ahead, owner)):
                self._looking.discard(owner)

    def _look_ahead(self, owner: int) -> None:
        """On a lane thread."""
        self._on_evict[0].sweep()
        with self._lock:
            self._looking.discard(owner)
            entries = self._directory.next_out(owner)
        for below in self._on_evict:
            below.offer(entries, ())

    def poll_load(self, lease: LoadLease) -> Progress:
        """See :meth:`LoadLease.poll`."""
        with self._lock:
            entries, ready = lease.entries, lease.ready
            while ready < len(entries) and entries[ready].state is READY:
                ready += 1
            whole = next(
                (at for at in range(ready, len(entries)) if entries[at].state is GONE), len(entries)
            )
            if whole < len(entries):
                self._unpin(entries[whole:])
                del entries[whole:]
                lease.asking = False
            lease.ready = ready
            coming = whole - ready + lease.asking
            if lease.waits and not coming:
                lease.waits = False
                self.timings.wait.add(self._clock() - lease.begun)
            return Progress(ready, coming)

    def end_load(self, lease: LoadLease) -> Steps[None]:
        """See :class:`kvtier.store.lease.Keeper`. The run's end first, so that its beginning ends
        up hottest."""
        with self._lock:
            lease.closed = True
            if lease.ready:
                self._load_ended(lease)
            drawn = self.audit.drawn(lease.entries[: lease.ready])
            entries, lease.entries, lease.ready = lease.entries, [], 0
        for part in reversed(list(pieces(entries))):
            with self._lock:
                self._unpin(part)
            yield 0.0
        self.audit.begin(drawn)

    def _load_ended(self, lease: LoadLease) -> None:
        """Under the lock."""
        slowest = max(
            (origin for origin in lease.origins[: lease.ready] if origin is not None), default=None
        )
        place = RAM if slowest is None else self.tiers[slowest].name
        self.timings.load[place].add(self._clock() - lease.begun)

    def _unpin(self, entries: Sequence[Entry]) -> None:
        """Last first, so that the beginning of the run ends up hottest."""
        for entry in reversed(entries):
            self._directory.unpin(entry)
            self._promotions.unpinned(entry)


def _yield() -> None:
    """Whoever waits for the interpreter goes first."""
    time.sleep(0)


def _nothing() -> None:
    """Nobody listens."""
