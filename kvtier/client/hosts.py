"""Hosts: a KVStore for one engine whose workers are on several hosts. Each host has a server with
the parts of its own workers, and KV bytes never cross hosts.

All hosts are asked at once, and each answer has to come within the same time. What one of them
does not have cannot be loaded, so the shortest answer counts. A host that is lost, slow or empty,
or that has other chunks, makes misses and nothing else.

*Names.* A chunk has the same tokens on every host and other bytes, and hosts may share a lower
tier. So its key is another one on each host: the fingerprint of the host's layout decides it.

*Slots.* A chunk lies in a slot on each host. One number stands for all of them
(:class:`HostsPool`), so that leases and jobs are what they are on one host.

*Saves.* A slot is reserved on each host that lacks the chunk. What a host lost is thus saved again
there although the others have it still. When a host does not answer, nothing is saved on any.

Each host's server evicts by itself. All see the same saves and uses, so they drift little, and a
chunk that is not on all hosts is a miss that costs room until it leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvtier.client.attachment import FarPool
from kvtier.client.client import AtServer, Client
from kvtier.client.heard import Heard
from kvtier.core.chunk import ChunkKey, PieceMask, renamed
from kvtier.core.lookup import ANONYMOUS, RAM, Asker, Asking, Ended, LookupResult, Progress, Served
from kvtier.core.pool import Pool
from kvtier.core.steps import Steps, whole
from kvtier.eviction.hints import Hint
from kvtier.protocol.wire import Reason
from kvtier.store.lease import LoadLease, SaveLease

T = TypeVar("T")


class HostsPool(FarPool):
    """The pools of all hosts, first host first. Each process maps that of its own host.

    A slot's number here is the slot on the first host, then that on the next one in units of the
    first host's, and so on. On each host there is one number more, which stands for no slot."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.pools = tuple(pools)
        slots = math.prod(pool.slots + 1 for pool in pools)
        super().__init__(slots, sum(pool.slot_bytes for pool in pools))

    def joined(self, slots: Sequence[int | None]) -> int:
        number = 0
        for pool, slot in zip(reversed(self.pools), reversed(slots), strict=True):
            number = number * (pool.slots + 1) + (pool.slots if slot is None else slot)
        return number


def slot_of(slots: Sequence[int], number: int, host: int) -> int | None:
    """Return the slot on this host, or None if ``number`` stands for no slot there. ``slots``:
    number of slots of each host."""
    for count in slots[:host]:
        number //= count + 1
    found = number % (slots[host] + 1)
    return None if found == slots[host] else found


class Hosts(AtServer):
    """A :class:`~kvtier.api.KVStore` over one for each host, the engine's own first.
    ``fingerprints``: of the hosts' layouts. Keys are those of the first."""

    def __init__(self, stores: Sequence[Client], fingerprints: Sequence[bytes]) -> None:
        self._stores = stores
        self._masks = [
            None if own == fingerprints[0] else PieceMask(f"host {own.hex()}")
            for own in fingerprints
        ]
        self._pool: HostsPool | None = None

    @property
    def counts(self) -> Counter[str]:
        return sum((store.counts for store in self._stores), Counter[str]())

    @property
    def pool(self) -> HostsPool | None:
        return self._joined([store.pool for store in self._stores])

    @property
    def most_held(self) -> int:
        return min(store.most_held for store in self._stores)

    def _joined(self, pools: Sequence[Pool | None]) -> HostsPool | None:
        """Join the hosts' pools: the same object while the pools are. None if one is missing."""
        there = [pool for pool in pools if pool is not None]
        if len(there) < len(pools):
            return None
        if self._pool is None or any(
            one is not other for one, other in zip(self._pool.pools, there, strict=True)
        ):
            self._pool = HostsPool(there)
        return self._pool

    def _named(self, keys: Sequence[ChunkKey]) -> Iterable[tuple[Client, Sequence[ChunkKey]]]:
        """Yield each host's Client with its own keys of these chunks."""
        for store, mask in zip(self._stores, self._masks, strict=True):
            yield store, keys if mask is None else renamed(mask, keys)

    # ---- KVStore ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> LookupResult:
        return shortest(together(store.lookup.steps(own) for store, own in self._named(keys)))

    def known(self, keys: Sequence[ChunkKey]) -> list[bool]:
        told = together(store.known.steps(own) for store, own in self._named(keys))
        return [all(each) for each in zip(*told, strict=True)]

    def save(self, keys: Sequence[ChunkKey]) -> SaveLease:
        named = list(self._named(keys))
        leases = together(store.save.steps(own) for store, own in named)
        pool = self._joined([lease.pool for lease in leases])
        if pool is None:
            for lease in leases:
                lease.close()
            return SaveLease(self, None, keys, [])
        taken = [dict(zip(lease.keys, lease.slots, strict=True)) for lease in leases]
        lease = SaveLease(self, pool, keys, leases)
        for at, key in enumerate(keys):
            slots = [
                slot_by_key.get(own[at]) for slot_by_key, (_, own) in zip(taken, named, strict=True)
            ]
            if any(slot is not None for slot in slots):
                lease.keys.append(key)
                lease.slots.append(pool.joined(slots))
        return lease

    def load(
        self,
        keys: Sequence[ChunkKey],
        start: int = 0,
        *,
        most: int | None = None,
        asker: Asker = ANONYMOUS,
    ) -> LoadLease:
        leases = together(
            store.load.steps(own, start, most=most, asker=asker) for store, own in self._named(keys)
        )
        pool, claimed = self._joined([one.pool for one in leases]), keys[start:][:most]
        lease = LoadLease(self, pool, claimed, leases)
        if pool is None:  # some host has nothing of it
            for one in leases:
                one.close()
        return lease

    def decline(self, keys: Sequence[ChunkKey], reason: Reason) -> None:
        for store, own in self._named(keys):
            store.decline(own, reason)

    def served(self, served: Served) -> None:
        for store, own in self._named(served.rest):
            store.served(served._replace(rest=own))

    def ended(self, ended: Ended) -> None:
        for store in self._stores:
            store.ended(ended)

    def hint(self, keys: Sequence[ChunkKey], hint: Hint, session: str = "") -> None:
        for store, own in self._named(keys):
            store.hint(own, hint, session)

    def invalidate(self, keys: Sequence[ChunkKey]) -> None:
        for store, own in self._named(keys):
            store.invalidate(own)

    def invalidate_all(self) -> None:
        for store in self._stores:
            store.invalidate_all()

    def wait(self, timeout_s: float) -> None:
        """See KVStore.wait. Each host gets its part of the time."""
        for store in self._stores:
            store.wait(timeout_s / len(self._stores))

    def check(self, idle: bool = False) -> None:
        for store in self._stores:
            store.check(idle)

    def stats(self) -> dict[str, int]:
        """See KVStore.stats. A chunk counts once on each host."""
        return dict(sum((Counter(store.stats()) for store in self._stores), Counter[str]()))

    def watch(self) -> Heard:
        """See KVStore.watch. Of the first host: a chunk that another one lost is a miss later."""
        return self._stores[0].watch()

    def close(self, timeout_s: float = 5.0) -> bool:
        ended = [store.close(timeout_s) for store in self._stores]
        return all(ended)

    # ---- for leases ------------------------------------------------------------------------------

    def end_save(self, lease: SaveLease, *, commit: bool) -> Steps[None]:
        one: SaveLease
        for one in lease.held:
            yield from one.committing() if commit else one.closing()

    def poll_load(self, lease: LoadLease) -> Steps[Progress]:
        """Return the progress of the slowest host: a chunk is ready when it is on all."""
        yield from ()  # in one piece
        leases: list[LoadLease] = lease.held
        progress = together(one.polling() for one in leases)
        ready = min(one.ready for one in progress)
        known = min(one.ready + one.coming for one in progress)
        pool = lease.pool
        if not isinstance(pool, HostsPool):
            return Progress(0, 0)
        for at in range(lease.ready, ready):
            lease.slots.append(pool.joined([one.slots[at] for one in leases]))
            places = (one.sources[at] for one in leases)
            lease.sources.append(next((place for place in places if place != RAM), RAM))
        lease.asking = any(one.asking for one in leases)
        return Progress(ready, known - ready)

    def end_load(self, lease: LoadLease) -> Steps[None]:
        one: LoadLease
        for one in lease.held:
            yield from one.closing()


def together(asked: Iterable[Steps[T]]) -> list[T]:
    """Do the first piece of each, and then the rest of each. Questions over a network are sent in
    the first piece, so all answers are waited for at once."""
    begun: list[tuple[Steps[T], list[T]]] = []
    for steps in asked:
        found: list[T] = []
        begun.append((steps, found))
        try:
            next(steps)
        except StopIteration as done:
            found.append(done.value)
    return [found[0] if found else whole(steps) for steps, found in begun]


def shortest(results: Sequence[LookupResult]) -> LookupResult:
    """Return how much of a run all hosts can serve, and when: a chunk comes with its last part."""
    known = min(result.known for result in results)
    ready = min(result.ready for result in results)
    counts = {min(count, known) for one in results for count, _ in one.steps}
    ends = sorted(count for count in counts if count > ready)
    steps = [(ready, 0.0), *((end, _slowest(_when(one, end) for one in results)) for end in ends)]
    last = [result for result in results if result.known == known]
    why = next((result.why for result in last if result.why), "")
    asking = [one.asking for one in last if one.asking is not None]
    return LookupResult(steps, _asked(asking) if len(asking) == len(last) else None, why)


def _when(result: LookupResult, end: int) -> float | None:
    return next(seconds for count, seconds in result.steps if count >= end)


def _slowest(seconds: Iterable[float | None]) -> float | None:
    found = list(seconds)
    known = [one for one in found if one is not None]
    return max(known) if len(known) == len(found) else None


def _asked(asking: Sequence[Asking]) -> Asking:
    answer = _slowest(one.answer_s for one in asking)
    arrive = _slowest(one.arrive_s for one in asking)
    return Asking(answer, arrive, math.prod(one.odds for one in asking))
