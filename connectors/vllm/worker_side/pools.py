"""Pools that one rank maps, and the server that lends them where the engine has several hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from kvtier.client.attachment import SharedPool
from kvtier.client.connect import Address, join, read_token
from kvtier.client.hosts import slot_of
from kvtier.config.keys import ServerSection
from kvtier.connectors.vllm.metadata import (
    HostPools,
    Job,
    Move,
    Parts,
    PoolAddress,
    StepMetadata,
)
from kvtier.core.errors import KVTierError, TierError
from kvtier.core.pool import Pool
from kvtier.gpu import Pinning, slot_tensor

logger = logging.getLogger("kvtier.connectors.vllm")


class Pools:
    """Pools that one rank maps. Only the worker's thread calls it.

    Args:
        part_bytes: bytes of this rank's part of a piece, by group.
        pinning: page-locks what a GPU copies from and to. None on a CPU.
        join: maps a pool that the server on this host lends to an engine whose scheduler is on
            another one.
    """

    def __init__(
        self,
        rank: int,
        part_bytes: Sequence[int],
        pinning: Pinning | None,
        join: Callable[[PoolAddress], Pool] | None,
    ) -> None:
        self._rank, self._part_bytes, self._pinning, self._join = rank, part_bytes, pinning, join
        self.mapped: dict[PoolAddress, MappedPool] = {}
        self._unmapped: dict[PoolAddress, UnmappedError] = {}
        """Pools that cannot be mapped, with why: to try one again could wait again."""
        self._named: PoolAddress | None = None
        """Last pool that was mapped early, or that could not be."""

    def of(self, address: PoolAddress) -> MappedPool:
        """Return a pool, mapped at its first job. Raises TierError when it cannot be mapped."""
        if address not in self.mapped:
            pool = self._joined(address) if address.ticket else _attached(address)
            self.mapped[address] = MappedPool(
                pool, address, self._rank, self._part_bytes, self._pinning
            )
        return self.mapped[address]

    def _joined(self, address: PoolAddress) -> Pool:
        """Map a pool of another host's scheduler. Raises UnmappedError, and logs why the first
        time."""
        assert self._join is not None, "such a pool is named where there are several hosts"
        if address in self._unmapped:
            raise self._unmapped[address]
        try:
            return self._join(address)
        except KVTierError as error:
            logger.warning("rank %d: %s; misses until there is another pool", self._rank, error)
            self._unmapped[address] = UnmappedError(str(error))
            raise self._unmapped[address] from error

    def map_early(self, address: PoolAddress | None) -> str:
        """Map the engine's own pool in the first step. What prevents that (another host, or other
        process ids) prevents it for ever, so why is returned, for the scheduler's half. A server's
        pool may only be away for a time.

        On a GPU a server's pool is also mapped when a step first names it, because it takes a while
        to lock its pages. Workers hear of a pool no earlier than that: vLLM's handshake tells them
        nothing. The scheduler's half asks for that step when the handshake has ended. By then vLLM
        has captured its graphs.
        """
        if address is None or address in self.mapped or address == self._named:
            return ""
        if address.is_lent and self._pinning is None:
            return ""
        self._named = address
        try:
            self.of(address)
        except KVTierError as error:
            return "" if address.is_lent else f"rank {self._rank}: {error}"
        return ""

    def renew(self, renewed: Mapping[PoolAddress, Sequence[int]]) -> None:
        """Lock the memory anew of slots for which a server has other memory now."""
        for address, slots in renewed.items():
            if address in self.mapped:
                self.mapped[address].renew(slots)

    def keep(self, needed: Iterable[PoolAddress | None]) -> None:
        """Unmap the pools that no job needs any more, because a server waits for that."""
        needed = set(needed)
        for address in self.mapped.keys() - needed:
            self.mapped.pop(address).close()
        self._unmapped = {one: why for one, why in self._unmapped.items() if one in needed}

    def look(self) -> None:
        """Let page-locking go on: a step begins, and has queued nothing."""
        if self._pinning is not None:
            self._pinning.look()

    def close(self) -> None:
        """Unmap all pools. No copy may be running."""
        self.keep(())
        if self._pinning is not None:
            self._pinning.close()


class UnmappedError(TierError):
    """Pool that cannot be mapped, which was logged."""


def _attached(address: PoolAddress) -> Pool:
    """Map the pool of an engine on this host. Raises TierError when it cannot (any more)."""
    if address.witness_path is None:
        return Pool.attach(address.path, address.slots, address.slot_bytes)
    pool = SharedPool.join(address.path, address.witness_path, address.slots, address.slot_bytes)
    if pool.inode != address.inode:
        pool.close()
        raise TierError(f"the pool at {address.path} is another one: its server was lost meanwhile")
    return pool


def is_followed(parts: Parts, rank: int, place: int) -> bool:
    """Return whether another rank writes behind this one's part of a slot, or this one writes none.
    Each host's first rank begins at 0."""
    start, writes = parts[rank][place]
    after = next((begin for begin, also in (row[place] for row in parts[rank + 1 :]) if also), 0)
    return not writes or after > start


class MappedPool:
    """Mapped pool. Its owner makes the pages present, because a worker shares its cores with the
    model. Here they are mapped: by the driver that page-locks them, or at a slot's first use."""

    def __init__(
        self,
        pool: Pool,
        address: PoolAddress,
        rank: int,
        part_bytes: Sequence[int],
        pinning: Pinning | None,
    ) -> None:
        self.pool = pool
        self.writes = [writes for _, writes in address.parts[rank]]
        self._spans = [
            (start, start + size)
            for (start, _), size in zip(address.parts[rank], part_bytes, strict=True)
        ]
        self._span = min(start for start, _ in self._spans), max(end for _, end in self._spans)
        self._behind = [
            address.slot_bytes if is_followed(address.parts, rank, place) else end
            for place, (_, end) in enumerate(self._spans)
        ]
        """For each group, the byte of a slot from which on no rank writes. The last rank that
        writes clears it."""
        self._slots = slot_tensor(self.pool.buffer[:]).view(address.slots, address.slot_bytes)
        self._parts = dict[tuple[int, int], torch.Tensor]()
        """Bytes by slot and group, made when first needed."""
        self._untouched = set(range(address.slots) if pinning is None else ())
        self._pinning = pinning
        if pinning is not None:
            is_lent = address.is_lent
            pinning.begin(self.pool.buffer, address.slot_bytes, self._span, is_lent=is_lent)

    def part(self, slot: int, place: int) -> torch.Tensor:
        """Return this rank's bytes of a slot that holds a piece of this group."""
        part = self._parts.get((slot, place))
        if part is None:
            if slot in self._untouched:
                self._untouched.remove(slot)
                self.pool.touch(slot, *self._span)
            part = self._parts[slot, place] = self._slots[slot, slice(*self._spans[place])]
        return part

    def clear_behind(self, slots: Sequence[int], place: int) -> None:
        """Clear saved slots behind pieces of this group: other tenants' bytes that lay there must
        not become part of them."""
        begin = self._behind[place]
        if begin < self.pool.slot_bytes:
            self._slots.numpy()[slots, begin:] = 0

    def renew(self, slots: Sequence[int]) -> None:
        if self._pinning is not None:
            for slot in slots:
                self._pinning.renew(self._slots[slot, slice(*self._span)])

    def close(self) -> None:
        """Unmap the pool. No copy from it or to it may be running."""
        self._parts.clear()
        del self._slots
        if self._pinning is not None:
            self._pinning.end(self.pool.buffer)
        self.pool.close()


class OwnHost:
    """Server of a worker's host, by its number, where the engine has several: :meth:`part` is what
    a worker does of a step. The first address of the configuration is that server's. Raises
    ConfigError for a token that cannot be read."""

    def __init__(self, server: ServerSection, host: int) -> None:
        self._host = host
        self._address = Address.parse(server.addresses[0])
        self._token = read_token(server.token_file) if server.token_file else None
        self._within_s = server.timeout_ms / 1000

    def server(self) -> bytes:
        """Return the server's name, or empty if it is not there, or does not let us in."""
        try:
            welcomed = join(self._address, self._token, b"", self._within_s)
        except KVTierError:
            return b""
        welcomed.socket.close()
        return welcomed.welcome.server

    def map(self, address: PoolAddress) -> SharedPool:
        """Map a pool of the server here, for an engine whose scheduler is on another host.
        Raises KVTierError when the server does not let us."""
        welcomed = join(self._address, self._token, address.ticket, self._within_s)
        welcomed.socket.close()
        welcome = welcomed.welcome
        pool = SharedPool(welcome.slots, welcome.slot_bytes, *welcomed.descriptors)
        if (pool.slots, pool.slot_bytes) != (address.slots, address.slot_bytes):
            pool.close()
            raise TierError(
                f"the server at {self._address} has {welcome.slots} slots of {welcome.slot_bytes} "
                f"bytes, expected {address.slots} of {address.slot_bytes}"
            )
        return pool

    def part(self, metadata: StepMetadata) -> StepMetadata:
        pool = metadata.pool
        return replace(
            metadata,
            pool=pool.hosts[self._host] if isinstance(pool, HostPools) else pool,
            loads=[self._job(job) for job in metadata.loads],
            saves=[self._job(job) for job in metadata.saves],
            ended_saves=[self._job(job) for job in metadata.ended_saves],
        )

    def _job(self, job: Job) -> Job:
        if not isinstance(job.pool, HostPools):
            return job
        counts = [pool.slots for pool in job.pool.hosts]
        moves = [self._move(move, counts) for move in job.moves]
        return replace(job, pool=job.pool.hosts[self._host], moves=moves)

    def _move(self, move: Move, counts: list[int]) -> Move:
        """Return this host's part of a move. A save leaves out pieces that this host has."""
        slots = [slot_of(counts, number, self._host) for number in move.slots]
        found = [slot for slot in slots if slot is not None]
        if len(found) == len(slots):
            return move._replace(slots=found)
        each = len(move.blocks) // len(slots)
        blocks = [
            block
            for at, slot in enumerate(slots)
            if slot is not None
            for block in move.blocks[each * at : each * (at + 1)]
        ]
        return move._replace(slots=found, blocks=blocks)
