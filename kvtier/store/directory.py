"""Directory: every state of every chunk, and every transition.

It is pure: no I/O, no lock, no thread, no clock and no log.

A chunk's states in RAM, all of them::

    ABSENT --reserve--> FILLING --filled--> READY --evicted in reserve, or invalidate--> ABSENT
                           `------fill_failed------> ABSENT

An :class:`~kvtier.store.entry.Entry` is one stay of a chunk in RAM, from reserve until its slot is
free again. A chunk may become ABSENT while a pin on it is left (a reader, a waiter or a spill in
progress). Then the entry is GONE: it can no longer be found, and its slot returns to the
free list with the last pin. So a slot is never reused under a reader.

The Directory also knows which tiers hold a chunk. Each tier has one order, whose keys are what the
tier holds or is being given.

Rules (``check`` asserts them):

1. A slot is free, or is given back (:mod:`kvtier.store.slots`), or belongs to exactly one entry.
2. The READY entries, and no others, are in the RAM policy. An entry with a pin keeps its place
   there, and evictions pass over it. A spill makes no chunk hotter. A chunk whose last reader
   leaves becomes the hottest of its kind.
3. No tier is asked to hold more than its capacity.
4. At rest no entry is FILLING, pinned or GONE.
5. No owner has more than its quota of slots, or more than its quota of a tier's room
   (:mod:`kvtier.store.quota`). No owner keeps more than its part of a place.

An owner is the number of a tenant (:mod:`kvtier.core.tenant`). The number 0 means that the chunk
has no owner. A chunk belongs to the tenant that saved it, and keeps that owner when it is promoted
to RAM. A chunk in a tier without an owner counts against no quota and leaves like every other one.
When it is promoted, it belongs to the tenant that asked for it.

Observers are told what comes, leaves and is used (:mod:`kvtier.store.observer`).

Not thread-safe: the Store's lock guards every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import StateError
from kvtier.core.lookup import RAM_PLACE
from kvtier.core.tenant import may
from kvtier.eviction.kept import KEEP_PART, Kept
from kvtier.eviction.order import Owned, PolicyOf, Segments
from kvtier.store.entry import FILLING, GONE, READY, Entry, State
from kvtier.store.observer import Left, Observers
from kvtier.store.quota import Quota
from kvtier.store.slots import RamSlots
from kvtier.store.tier_index import TierIndex

_AHEAD_CHUNKS = 512
"""Most slots looked through for chunks that leave soon, within 0.1 ms under the lock."""
_CHECKED_SLOTS = 512
"""Slots in one piece of :meth:`Directory.checking`."""


_STATE = attrgetter("state")


class Directory:
    """Index of which chunk is where, and in which state.

    Args:
        slots: the number of RAM slots.
        capacities: the capacity of each lower tier, in chunks.
        policy: makes the eviction order of RAM, and of the tiers where ``lower`` is not given.
        share: the part of RAM and of every tier that one owner may have, above 0 and up to 1. None:
            there are no quotas.
        lower: makes the eviction order of each lower tier.
        keep: the part of RAM and of every tier, or of its quota there, that one owner may keep by
            hints.
    """

    def __init__(
        self,
        slots: int,
        capacities: Sequence[int] = (),
        policy: PolicyOf = Segments,
        share: float | None = None,
        *,
        lower: Sequence[PolicyOf] = (),
        keep: float = KEEP_PART,
    ) -> None:
        self.slots = RamSlots(slots)
        self._used: Counter[int] = Counter()
        """Owner -> its slots. Owner 0 is not counted, and an owner without a slot is not listed."""
        self._quota = Quota(share, slots, self._used.__getitem__)
        self._in_slot: list[Entry | None] = [None] * slots
        self._entries: dict[ChunkKey, Entry] = {}
        self._gone: set[Entry] = set()
        self._filling = self._pinned = 0
        """Entries that are FILLING, and entries with a pin."""
        self.evicted_unoffered = 0
        """Chunks evicted from RAM before :meth:`next_out` named them."""
        self.evicted = 0
        """Chunks that left RAM to make room."""
        self.crowded = [0] * (1 + len(capacities))
        """Chunks that found no free room: in RAM, then in each tier."""
        self._idle = 0
        self._idle_of: Counter[int] = Counter()
        """READY entries without a pin, which can be evicted. ``_idle_of``: by owner, only where
        owners have quotas."""
        self._over: set[ChunkKey] = set()
        """READY chunks of sessions that ended. They are not written to lower tiers when they
        leave."""
        self.observers = Observers()
        self.order = Owned(policy(slots), share is not None, Kept(slots, keep, share))
        self.tiers = [
            TierIndex(place, capacity, order, share, self.observers, keep)
            for place, (capacity, order) in enumerate(
                zip(capacities, lower or [policy] * len(capacities), strict=True), RAM_PLACE + 1
            )
        ]
        self._orders = (self.order, *(tier.order for tier in self.tiers))

    # ---- queries: they change nothing ------------------------------------------------------------

    def get(self, key: ChunkKey) -> Entry | None:
        """Return the chunk's entry, FILLING or READY, or None when ABSENT."""
        return self._entries.get(key)

    def absent(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        entries = self._entries
        return [key for key in keys if key not in entries]

    def holders(self, key: ChunkKey) -> Iterator[int]:
        """Return the indexes of the tiers that hold the chunk, fastest first."""
        if not self.tiers:
            return iter(())
        return (index for index, tier in enumerate(self.tiers) if key in tier.order)

    def ready_run(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading chunks that are READY."""
        entries = self._entries
        for index, key in enumerate(keys):
            entry = entries.get(key)
            if entry is None or entry.state is not READY:
                return index
        return len(keys)

    def held_run(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """Return the number of leading chunks, from ``start`` on, that need no engine: READY, being
        promoted, or held by a tier."""
        entries, tiers = self._entries, self.tiers
        for index in range(start, len(keys)):
            key = keys[index]
            entry = entries.get(key)
            if entry is not None and (entry.state is READY or entry.origin is not None):
                continue
            if entry is not None or not any(key in tier.order for tier in tiers):
                return index
        return len(keys)

    # ---- RAM -------------------------------------------------------------------------------------

    def reserve(
        self, key: ChunkKey, keep: Container[ChunkKey], origin: int | None = None, owner: int = 0
    ) -> Entry | None:
        """ABSENT -> FILLING: take a slot for ``key``.

        Without a free slot the coldest unpinned chunk is evicted. When the owner's quota is used
        up, the owner's own coldest chunk is evicted.

        Returns None when every slot is filling or pinned, or when only chunks of ``keep`` (the run
        that the slot is for) could leave.
        """
        if key in self._entries:
            raise StateError(
                f"reserve of a chunk that is {self._entries[key].state.value}: {key.hex()[:16]}"
            )
        owner = owner if origin is None else self.tiers[origin].order.owner(key) or owner
        quota, free = self._quota, self.slots.free
        spent = quota.spent(owner)
        if spent or not free:
            self.crowded[0] += not spent
            has_quotas = quota.whole is not None
            victim = quota.victim(owner, spent, self._coldest) if has_quotas else self._coldest()
            if victim is None or victim.key in keep:
                return None
            self._evict((victim,))
            if not free:  # the slot that became free had to be given back
                return None
        (entry,) = self._begin((key,), origin, owner)
        return entry

    def reserve_run(
        self, keys: Sequence[ChunkKey], keep: Container[ChunkKey], owner: int = 0
    ) -> list[Entry]:
        """:meth:`reserve` these different chunks, one after the other, as long as there is room.
        Returns the entries of the leading ones, which have a slot now."""
        wanted = frozenset(keys)
        if len(wanted) < len(keys) or not self._entries.keys().isdisjoint(wanted):
            raise StateError("reserve of a run of which a chunk is filling, ready or named twice")
        if self._quota.whole is not None:
            made = list[Entry]()
            for key in keys:
                entry = self.reserve(key, keep, None, owner)
                if entry is None:
                    break
                made.append(entry)
            return made
        made = self._begin(keys, None, owner)
        while len(made) < len(keys):
            # A slot that becomes free where too many are in use has to be given back.
            most = 1 if self.slots.surplus > 0 else len(keys) - len(made)
            victims = self._leaving(self.order, min(most, self._idle), keep)
            self.crowded[0] += len(victims) or 1
            self._evict(victims)
            if not self.slots.free:
                break
            made += self._begin(keys[len(made) :], None, owner)
        return made

    def _begin(self, keys: Sequence[ChunkKey], origin: int | None, owner: int) -> list[Entry]:
        """Take free slots for the leading keys, as many as there are."""
        entries, in_slot, free, made = self._entries, self._in_slot, self.slots.free, list[Entry]()
        count = min(len(keys), len(free))
        slots = free[len(free) - count :]
        del free[len(free) - count :]
        for key, slot in zip(keys, reversed(slots), strict=False):
            entry = entries[key] = in_slot[slot] = Entry(key, slot, origin, owner)
            made.append(entry)
        self._filling += count
        if owner and count:
            self._used[owner] += count
            self._quota.got(owner)
        return made

    def filled(self, entries: Sequence[Entry], source: int | None = None) -> None:
        """FILLING -> READY, by an engine or from tier ``source``. All entries have one owner. No
        effect on entries that became GONE in the meantime."""
        copies = 0 if source is None else 1 << source
        keys, idle = list[ChunkKey](), list[Entry]()
        for entry in entries:
            if entry.state is GONE:
                continue
            if entry.state is not FILLING:
                self._expect(entry, FILLING)
            entry.state, entry.copies = READY, copies
            keys.append(entry.key)
            if not entry.pins:
                idle.append(entry)
        self._filling -= len(keys)
        if keys:
            self.order.add(keys, entries[0].owner)
        for tell in self.observers.came:
            for key in keys:
                tell(RAM_PLACE, key)
        self._count_idle(idle, 1)
        if source is not None:
            for key in keys:
                self.order.keep_as(self.tiers[source].order, key)

    def fill_failed(self, entry: Entry) -> None:
        """FILLING -> ABSENT. No effect on an entry that became GONE in the meantime."""
        if entry.state is GONE:
            return
        self._expect(entry, FILLING)
        self._remove(entry)

    def pin(self, entry: Entry) -> None:
        """Keep the entry's slot from reuse until the matching :meth:`unpin`."""
        if entry.state is GONE:
            raise StateError("pin of a chunk that is gone")
        self._pin(entry)

    def pin_ready(self, keys: Sequence[ChunkKey]) -> list[Entry]:
        """:meth:`pin` the leading chunks that are READY, and return their entries."""
        pinned, idle, entries = list[Entry](), list[Entry](), self._entries
        for key in keys:
            entry = entries.get(key)
            if entry is None or entry.state is not READY:
                break
            if not entry.pins:
                idle.append(entry)
            entry.pins += 1
            pinned.append(entry)
        self._pinned += len(idle)
        self._count_idle(idle, -1)
        return pinned

    def pin_all(self, keys: Sequence[ChunkKey]) -> list[Entry] | None:
        """:meth:`pin` all of these different chunks, or none if one of them is not READY."""
        if keys and keys[-1] not in self._entries:
            return None
        try:
            pinned = list(map(self._entries.__getitem__, keys))
        except KeyError:
            return None
        if list(map(_STATE, pinned)).count(READY) < len(pinned):
            return None
        idle = [entry for entry in pinned if not entry.pins]
        for entry in pinned:
            entry.pins += 1
        self._pinned += len(idle)
        self._count_idle(idle, -1)
        return pinned

    def unpin(self, run: Sequence[Entry]) -> None:
        """Drop a pin of each entry. READY ones without pins become hot, the first the hottest."""
        self._unpin(run)
        idle = [entry.key for entry in run if self._is_idle(entry)]
        if idle:
            if self._over:
                self._over.difference_update(idle)
            self.order.ordered(idle)

    def used(self, run: Sequence[ChunkKey]) -> None:
        """Note that a prompt asked for this run: it becomes hot in RAM and in every tier, its first
        chunk the hottest."""
        if self._over:
            self._over.difference_update(run)
        for order in self._orders:
            order.used(run)
        for tell in self.observers.used:
            tell(run)

    def ordered(self, run: Sequence[ChunkKey]) -> None:
        """Make a prompt's run hot in RAM and in every tier, because it is being stored. That does
        not count as a use of the chunks that are held already."""
        if self._over:
            self._over.difference_update(run)
        for order in self._orders:
            order.ordered(run)
        for tell in self.observers.stored:
            tell(run)

    def over(self, run: Sequence[ChunkKey]) -> None:
        """Make the run the coldest everywhere, its end first, until it is used or saved again.
        Chunks that are being read or filled stay as they are."""
        entries = self._entries
        idle = [key for key in run if (entry := entries.get(key)) is None or self._is_idle(entry)]
        self._over.update(key for key in idle if key in entries)
        for order in self._orders:
            order.cool(idle)

    def keep(self, run: Sequence[ChunkKey], seconds: float, salt: str = "") -> None:
        """Keep the run for ``seconds`` after its last use, for a client with this salt
        (:mod:`kvtier.eviction.kept`)."""
        self._over.difference_update(run)
        for order in self._orders:
            order.keep(run, seconds, salt)

    def tick(self, now: float) -> None:
        """Release chunks whose time to be kept is over at ``now``."""
        for order in self._orders:
            order.tick(now)

    @staticmethod
    def _is_idle(entry: Entry) -> bool:
        return entry.state is READY and entry.pins == entry.writes

    def invalidate(self, key: ChunkKey, owner: int | None = None) -> list[int]:
        """Make a bad or unwanted chunk ABSENT everywhere. Returns the tiers that must delete it and
        then call :meth:`TierIndex.deleted`.

        With ``owner``, only copies that it may drop are (:func:`kvtier.core.tenant.may`). A FILLING
        chunk stays, because it is being made anew. :meth:`spill_ended` catches a write that is in
        progress."""
        entry = self._entries.get(key)
        if entry is not None and entry.state is READY and may(owner, entry.owner):
            self.order.discard(key)
            self._remove(entry)
            for tell in self.observers.left:
                tell(RAM_PLACE, key, Left.FORGOTTEN)
        holders = [index for index in self.holders(key) if self.tiers[index].may_drop(key, owner)]
        for index in holders:
            self.tiers[index].leave(key)
        if self._entries.get(key) is None and next(self.holders(key), None) is None:
            for dropped in self.observers.missing:
                dropped(key, Left.FORGOTTEN)
        return holders

    def next_out(self, owner: int | None = 0) -> list[Entry]:
        """Return chunks that will leave RAM soon, coldest first. Each is named once in its stay.

        They are the chunks that leave when ``owner`` wants half of RAM, or half of its quota. At
        most :data:`_AHEAD_CHUNKS` slots are looked through. With ``owner=None`` all of RAM
        leaves."""
        if owner is None:
            return self._offer(self._unread(self.order))
        wanted = min(_AHEAD_CHUNKS, -(-self.slots.limit // 2)) - len(self.slots.free)
        unread = self._unread(self.order) if self._pinned else self._all_of(self.order)
        entries = list(islice(unread, max(0, wanted)))
        if self._quota.part is not None and owner:
            left = self._quota.left(owner, len(self.slots.free))
            wanted = min(_AHEAD_CHUNKS, -(-self._quota.part // 2)) - left
            entries += islice(self._unread(self.order.part(owner)), max(0, wanted))
        return self._offer(entries)

    def _all_of(self, keys: Iterable[ChunkKey]) -> Iterator[Entry]:
        return map(self._entries.__getitem__, keys)

    def _unread(self, keys: Iterable[ChunkKey]) -> Iterator[Entry]:
        entries = self._entries
        return (entry for key in keys if (entry := entries[key]).pins == entry.writes)

    def _offer(self, entries: Iterable[Entry]) -> list[Entry]:
        over = self._over
        named = [entry for entry in entries if not entry.offered and entry.key not in over]
        new = list(dict.fromkeys(named))  # an owner's own may be among the coldest of all
        for entry in new:
            entry.offered = True
        return new

    # ---- lower tiers -----------------------------------------------------------------------------

    def spill_begun(self, entry: Entry, index: int) -> list[ChunkKey] | None:
        """Pin a READY chunk that tier ``index`` shall take, and make room for it there.

        Returns the keys that the tier must delete first (then :meth:`TierIndex.deleted`), or None
        when the tier has the chunk, is getting it already, or has no room."""
        self._expect(entry, READY)
        tier = self.tiers[index]
        if not tier.takes(entry.key):
            return None
        self.crowded[1 + index] += len(tier) >= tier.capacity and not tier.quota.spent(entry.owner)
        victims = tier.make_room(entry.owner)
        if victims is None:
            return None
        for key in victims:
            if self.order.keeps(key):  # which is to be written again before it leaves
                self._entries[key].offered = False
        tier.writing[entry.key] = entry.owner
        self._pin(entry)
        entry.writes += 1
        return victims

    def spill_ended(self, entry: Entry, index: int, stored: bool) -> bool:
        """End a write. ``stored`` says whether the tier holds the chunk now.

        Returns False when the chunk was invalidated in the meantime. Then the tier must delete it
        and call :meth:`TierIndex.deleted`."""
        tier = self.tiers[index]
        del tier.writing[entry.key]
        wanted = entry.state is not GONE
        if stored and wanted:
            tier.hold(entry.key, entry.owner)
            tier.order.keep_as(self.order, entry.key)
            entry.copies |= 1 << index
        elif stored:
            tier.leaving.add(entry.key)
        entry.writes -= 1
        self._unpin((entry,))
        return wanted or not stored

    # ---- the whole -------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Return the number of chunks by place and state, without a walk over them."""
        return {
            "ram_free": len(self.slots.free),
            "ram_ready": len(self._entries) - self._filling,
            "ram_filling": self._filling,
            "ram_pinned": self._pinned,
        }

    def keys(self) -> list[ChunkKey]:
        """Return every chunk in RAM or in a tier, some of them twice. Takes 20 ns a chunk."""
        every = [*self._entries]
        for tier in self.tiers:
            every += tier.order.keys()
        return every

    def check(self, idle: bool = False) -> None:
        """Raise StateError when a rule of this module is broken. ``idle`` adds rule 4. Walks over
        all chunks."""
        problems = [problem for part in self.checking(idle) for problem in part]
        entries = [*self._entries.values(), *self._gone]
        slots = sorted([*self.slots.unused, *(entry.slot for entry in entries)])
        if slots != list(range(len(self._in_slot))):
            problems.append(
                f"slots lost or shared: {len(self.slots.free)} free, {len(entries)} used of "
                f"{self.slots.limit}"
            )
        counted = (sum(e.state is FILLING for e in entries), sum(e.pins > 0 for e in entries))
        if counted != (self._filling, self._pinned):
            problems.append(
                f"{counted} chunks filling and pinned, booked {(self._filling, self._pinned)}"
            )
        if not set(self.order) <= self._entries.keys():
            problems.append("the eviction order names chunks that are not in RAM")
        for order in self._orders:
            problems += order.kept.check()
        if any(key not in self.order for key in self._over):
            problems.append("chunks that are over are not in RAM")
        unpinned = [entry for entry in entries if entry.state is READY and not entry.pins]
        owned = Counter(
            entry.owner for entry in unpinned if entry.owner and self._quota.whole is not None
        )
        if (len(unpinned), owned) != (self._idle, self._idle_of):
            problems.append(
                f"{len(unpinned)} chunks without a pin, booked {self._idle}, {dict(self._idle_of)}"
            )
        used = Counter(entry.owner for entry in entries if entry.owner)
        if used != self._used:
            problems.append(
                f"owners have {dict(used)} slots, booked {dict(self._used)}, quota "
                f"{self._quota.whole}"
            )
        if problems:
            raise StateError("; ".join(problems))

    def checking(self, idle: bool = False) -> Iterator[list[str]]:
        """Yield the broken rules in words, a few slots at a time (rules 1 and 2), then by the
        counts. Each piece is true when it is made."""
        for first in range(0, len(self._in_slot), _CHECKED_SLOTS):
            yield self._check_slots(first, _CHECKED_SLOTS)
        yield self._check_counts(idle)

    def _check_slots(self, first: int, count: int) -> list[str]:
        problems = []
        for slot, entry in enumerate(self._in_slot[first : first + count], start=first):
            if entry is None:
                continue
            known = (
                entry in self._gone
                if entry.state is GONE
                else self._entries.get(entry.key) is entry
            )
            if entry.slot != slot or not known:
                problems.append(
                    f"slot {slot} belongs to a chunk that is {entry.state.value} and not there"
                )
            if (entry.state is READY) != (entry.state is not GONE and entry.key in self.order):
                problems.append("the eviction order differs from the READY chunks")
        return problems

    def _check_counts(self, idle: bool) -> list[str]:
        problems = []
        used = len(self._entries) + len(self._gone)
        if used + len(self.slots) != len(self._in_slot):
            problems.append(
                f"slots lost or shared: {len(self.slots.free)} free, {used} used of "
                f"{self.slots.limit}"
            )
        if any(self._quota.spent(owner, 1) for owner in self._used):
            problems.append(f"an owner has more than its {self._quota.whole} slots")
        for index, tier in enumerate(self.tiers):
            if idle and len(tier) > tier.capacity:  # else it may shrink, step by step
                problems.append(f"tier {index} holds more than its {tier.capacity} chunks")
            if any(tier.quota.spent(owner, 1) for owner in tier.order.owners()):
                whole = tier.quota.whole
                problems.append(f"an owner has more than its {whole} chunks of tier {index}")
            if idle and (tier.writing or tier.leaving):
                problems.append(
                    f"tier {index} still writes {len(tier.writing)}, deletes "
                    f"{len(tier.leaving)} chunks"
                )
        if idle and (self._gone or self._filling or self._pinned):
            problems.append(f"not at rest: {self.usage()}")
        return problems

    # ---- room that another Store has -------------------------------------------------------------

    def resize(self, slots: int, most: int = 0) -> bool:
        """Let at most ``slots`` be in use. If they become more, slots that were given back become
        free again. If fewer, free slots leave first, then up to ``most`` chunks, coldest first, and
        a slot with a pin when its last pin ends. Returns whether to call again."""
        more = slots > self.slots.limit
        self.slots.limit = slots
        self._quota.resize(slots, self._used)
        self.order.resize(slots)
        if more:
            self.slots.refill()
            return False
        for _ in range(most):
            if self.slots.surplus <= 0:
                return False
            if self.slots.free:
                self.slots.withdraw()
                continue
            victim = self._coldest()
            if victim is None:
                return False
            self._evict((victim,))
        return self.slots.surplus > 0

    # ---- steps -----------------------------------------------------------------------------------

    def _coldest(self, owner: int = 0) -> Entry | None:
        """Return the coldest entry that may leave, of one owner's or of all, or None. Entries with
        a reader that come before it become hot at once, as they will when the reader leaves:
        otherwise every eviction would walk over the chunks of a long read."""
        if not (self._idle_of[owner] if owner else self._idle):
            return None
        first = None if owner else self.order.coldest()
        if first is not None and not (entry := self._entries[first]).pins:
            return entry
        found = self._leaving(self.order.part(owner) if owner else self.order, 1)
        return found[0] if found else None

    def _leaving(
        self, order: Iterable[ChunkKey], most: int, keep: Container[ChunkKey] = ()
    ) -> list[Entry]:
        """Return the first ``most`` entries of this order that may leave, cut before the first one
        of ``keep``. There must be as many. Entries with a reader become hot, see :meth:`_coldest`.
        Chunks kept by hints leave one at a time, because the owner that keeps most gives next."""
        entries, found, read = self._entries, list[Entry](), list[ChunkKey]()
        stays = self.order.kept.stays
        for key in order if most else ():
            entry = entries[key]
            if not entry.pins:
                if key in keep or (found and key in stays):
                    break
                found.append(entry)
                if len(found) == most:
                    break
            elif entry.pins != entry.writes:
                read.append(key)
        if read:
            self.order.ordered(read[::-1])
        return found

    def _evict(self, entries: Sequence[Entry]) -> None:
        keys, over = [entry.key for entry in entries], self._over
        self.evicted += len(keys)
        self.order.evicted(keys)
        for entry in entries:
            self.evicted_unoffered += not entry.offered and entry.key not in over
            entry.state = GONE
            del self._entries[entry.key]
        self._free_slots(entries)
        self._count_idle(entries, -1)
        over.difference_update(keys)
        for tell in self.observers.left:
            for key in keys:
                tell(RAM_PLACE, key, Left.EVICTED)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._over.discard(entry.key)
        self._filling -= entry.state is FILLING
        if entry.pins:
            self._gone.add(entry)
        else:
            if entry.state is READY:
                self._count_idle((entry,), -1)
            self._free_slots((entry,))
        entry.state = GONE

    def _pin(self, entry: Entry) -> None:
        if not entry.pins:
            self._pinned += 1
            if entry.state is READY:
                self._count_idle((entry,), -1)
        entry.pins += 1

    def _unpin(self, entries: Sequence[Entry]) -> None:
        left = list[Entry]()
        for entry in entries:
            if entry.pins < 1:
                raise StateError("unpin without a pin")
            entry.pins -= 1
            if not entry.pins:
                left.append(entry)
        self._pinned -= len(left)
        self._count_idle([entry for entry in left if entry.state is READY], 1)
        if self._gone:
            gone = [entry for entry in left if entry.state is GONE]
            self._gone.difference_update(gone)
            self._free_slots(gone)

    def _count_idle(self, entries: Sequence[Entry], by: int) -> None:
        self._idle += by * len(entries)
        if self._quota.whole is None:
            return
        for entry in entries:
            if entry.owner:
                self._idle_of[entry.owner] += by
                if not self._idle_of[entry.owner]:
                    del self._idle_of[entry.owner]

    def _free_slots(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._in_slot[entry.slot] = None
            if entry.owner:
                self._used[entry.owner] -= 1
                if not self._used[entry.owner]:
                    del self._used[entry.owner]
        self.slots.put_back([entry.slot for entry in entries])

    @staticmethod
    def _expect(entry: Entry, state: State) -> None:
        if entry.state is not state:
            raise StateError(f"chunk is {entry.state.value}, expected {state.value}")
