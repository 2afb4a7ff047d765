"""Jobs of the workers: their numbers, where they map pools, and jobs that some worker
has not confirmed. One thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from kvtier.api import LoadLease, SaveLease
from kvtier.client.attachment import FarPool
from kvtier.client.hosts import HostsPool
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.core.pool import Pool

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import Parts, PoolAddress

_REPORTS_S = 10.0
"""Time after the last job for which an engine without work steps for the workers' reports."""
ARRIVALS, ARRIVAL_S = 3, 0.002
"""Chunks that an engine without work waits for, and the wait for each, before vLLM asks again or
plans a step. Otherwise vLLM's loop would take the CPU, and Python's lock, from the threads that
read."""


class Jobs:
    """``parts``: places of worker ranks' parts in a slot. ``clock``: monotonic seconds."""

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        self._parts, self._clock = parts, clock
        self._lent: WeakKeyDictionary[Pool, PoolAddress] = WeakKeyDictionary()
        """Pool of a server -> its address."""
        self.lends = False
        """Whether a pool was a server's."""
        self._last: tuple[Pool, PoolAddress] | None = None
        """Pool of the last call, and its address."""
        self._next = 0
        self._reports_until = 0.0
        self.pending: dict[int, Pending] = {}
        """Jobs that some worker has not confirmed, by number."""
        self.under_way = dict[str | ChunkKey, int]()
        """Request or piece -> number of its jobs, or loads."""
        self.begun: list[BegunLoad] = []
        """Loads that workers get in the step to come."""

    @property
    def ranks(self) -> int:
        return len(self._parts)

    def begin(self, pending: Pending) -> None:
        self.pending[pending.number] = pending
        under_way = self.under_way
        for one in pending.about:
            under_way[one] = under_way.get(one, 0) + 1

    def end(self, pending: Pending) -> list[str]:
        """Note that every worker has confirmed it. Return its requests that have no other job."""
        del self.pending[pending.number]
        under_way = self.under_way
        for one in pending.about:
            left = under_way[one] - 1
            if left:
                under_way[one] = left
            else:
                del under_way[one]
        return [one for one in pending.request_ids if one not in under_way]

    def number(self) -> int:
        self._reports_until = self._clock() + _REPORTS_S
        self._next += 1
        return self._next

    @property
    def reports_come(self) -> bool:
        """Whether the last job is recent: a report that is lost never comes."""
        return self._clock() < self._reports_until

    def address(self, pool: Pool | None) -> PoolAddress:
        if self._last is not None and pool is self._last[0]:
            return self._last[1]
        from kvtier.connectors.vllm.metadata import HostPools, PoolAddress

        assert pool is not None, "a lease with slots has a pool"
        address = self._lent.get(pool)
        if address is None:
            named = pool.path, pool.witness_path, pool.slots, pool.slot_bytes, self._parts
            if isinstance(pool, HostsPool):
                hosts = tuple(self.address(one) for one in pool.pools)
                address = HostPools(*named, hosts=hosts)
            else:
                ticket = pool.ticket if isinstance(pool, FarPool) else b""
                address = PoolAddress(*named, pool.inode, ticket)
            if address.is_lent:
                self._lent[pool], self.lends = address, True
        self._last = pool, address
        return address

    def renewed(self) -> Iterator[tuple[PoolAddress, list[int]]]:
        """Yield, by their pool's address, slots that have other memory than at the last call."""
        for pool, where in self._lent.items():
            if slots := pool.take_renewed():
                yield where, slots


@dataclass(slots=True)
class Pending:
    """Owner of the lease of a save or a load, until every worker has confirmed it."""

    number: int
    request_ids: Sequence[str]
    """Names of the requests, of which a save may have several."""
    keys: Sequence[ChunkKey]
    save: SaveLease | None = None
    load: LoadLease | None = None
    tokens: int = 0
    """Tokens of a load."""
    done: int = 0
    """Ranks that have copied their part."""
    failed: int = 0
    dropped: bool = False
    """Whether chunks were cleared since it began."""

    @property
    def about(self) -> Sequence[str | ChunkKey]:
        return self.request_ids if self.save is not None else [*self.request_ids, *self.keys]


class BegunLoad(NamedTuple):
    number: int
    prompt: Prompt
    size: int
    """Bytes of the load."""
