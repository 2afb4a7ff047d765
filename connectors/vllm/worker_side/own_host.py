"""OwnHost: a worker's part of a step's metadata where the engine has several hosts: the pool and
the slots of its own host. Everything else of a worker is as on one host."""

from __future__ import annotations

from dataclasses import replace

from kvtier.client.attachment import SharedPool
from kvtier.client.connect import Address, join, read_token
from kvtier.client.hosts import slot_of
from kvtier.config.keys import ServerSection
from kvtier.connectors.vllm.metadata import HostPools, Job, Move, PoolAddress, StepMetadata
from kvtier.core.errors import KVTierError, TierError


class OwnHost:
    """Server of a worker's host, by its number. The first address of the configuration is that
    server's. Raises ConfigError for a token that cannot be read."""

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
