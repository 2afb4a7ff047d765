"""RedisTier: chunks on a Redis or a Redis Cluster that several servers share and that outlives
them.

A chunk counts as held when its header is there, which is written last. A node that fails is left
alone for a while, and one that takes no writes is sent none for a while: each node for itself.
Names that move between nodes of a cluster are "not now", never a miss.

Several servers on one Redis each have a budget, and find each other's chunks by asking (``find``).
A chunk that one deletes is gone for all. With ``ttl_s`` forgotten chunks expire. Without it they
stay until a server of the same model starts and takes them over, as far as its budget goes, or
until Redis is full, no server of their model runs, and a write needs their room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar

from xxhash import xxh3_128

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import TierError
from kvtier.core.steps import pieces
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.away.tier import ASKED_CHUNKS, AwayTier
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.redis import startup
from kvtier.tiers.redis.errors import FAULTS, MovedError, MovingError, RefusedError, WrongSizeError
from kvtier.tiers.redis.layout import HEADER_BYTES, Form
from kvtier.tiers.redis.servers import NodeHealth, RedisServers
from kvtier.tiers.redis.upkeep import Census, Upkeep
from kvtier.tiers.redis.wire import Reply, Wire

_LOG = logging.getLogger(__name__)
TTL_GRACE_MS = 10_000
"""Longer life of parts: a chunk whose time is over is a miss, and not a torn chunk."""
T = TypeVar("T")


class RedisTier(AwayTier):
    """Chunks on Redis. ``servers`` are closed with the tier. ``bytes_``: our share of its memory,
    None for nine tenths of its ``maxmemory``. ``ttl_s``: chunks leave Redis this long after their
    last write, read or not; None for never.

    A server that cannot be reached is no error: the tier misses and refuses until it answers.
    Without ``bytes_`` its room is 0 until then. Raises TierError for what waiting does not heal: a
    refused login, a missing permission, an untrusted certificate, a URL that is wrong about a
    cluster, no room for a chunk.

    Threads: any number of lane threads, each for at most what :class:`RedisServers` promises, and
    one of its own (:mod:`.upkeep`)."""

    name = "redis"
    keeps_owners = comes_whole = True

    def __init__(
        self,
        servers: RedisServers,
        form: Form,
        bytes_: int | None,
        chunk_bytes: int,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(f"Redis tier {servers.label}", chunk_bytes, clock, "evicted")
        self._servers, self._form = servers, form
        self._ttl_ms = None if ttl_s is None else max(1, int(ttl_s * 1000))
        self._health = NodeHealth(servers, clock)
        self.chunk_room, self._bytes = form.room(chunk_bytes), bytes_
        self.capacity, self._facts = 0, list[startup.NodeFacts]()
        self._under_way = list[ChunkKey]()
        self._unsized = ""
        """Reason why the room is unknown, without an address."""
        try:
            self._settle()
        except TierError:
            servers.close()
            raise
        self._upkeep = Upkeep(servers, form, self._has_settled, chunk_bytes)

    @property
    def is_apart(self) -> bool:
        return self._upkeep.apart

    @property
    def trouble(self) -> str:
        if not self.capacity:
            return f"redis: no chunk is kept there until its room is known: {self._unsized}"
        return "redis takes no writes now (the log says why)" * self._health.full

    @property
    def nodes_away(self) -> Sequence[str]:
        return self._health.away

    def recovered(self) -> Sequence[ChunkKey]:
        """Return up to ``capacity`` keys, the most recently used, within bounds of time and number.
        :meth:`find` finds the rest. After a fault they are those found until then."""
        census = Census(self._form, self.chunk_bytes)
        self._on_every_node(
            lambda wire: census.count(wire, startup.SCAN_S, self._clock), startup.ALL_SCANNED_S
        )
        if not census.whole:
            _LOG.warning(
                "%s: only the first %d chunks were looked at in the time a start may take; the "
                "rest is found by asking",
                self._place,
                len(census.stamps),
            )
        share, ours = self.capacity * self.chunk_room, len(census.stamps) * self.chunk_room
        limit = startup.limit_of(self._facts) or share + startup.used_of(self._facts)
        self._upkeep.told(census, limit - startup.used_of(self._facts) + ours, share)
        return self._newest(census.stamps)

    def owners(self, keys: Sequence[ChunkKey]) -> list[int]:
        headers = [
            header for run in pieces(keys, ASKED_CHUNKS) for header in self._of_headers("GET", run)
        ]
        return [self._form.owner(header, key) for header, key in zip(headers, keys, strict=True)]

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        found = list[ChunkKey]()
        whole = self._on_every_node(
            lambda wire: startup.search(wire, self._form, owner, found, self._clock),
            startup.ALL_SEARCHED_S,
        )
        return found, whole

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        self._check_size(data)
        name = self._form.header_name(key)
        full = self._health.of(name).full
        if not full.allows() or not self._owed.cancel(key):
            self._events.add("refused")
            return False
        refusal = self._call(
            "failed_writes", name, lambda wire: [self._put(wire, (key, owner), data)]
        )
        if refusal is None:  # a fault: parts of it may be there
            self._owed.add([key])
            return False
        if refusal[0] is not None:
            self._refused(refusal[0], full)
            return False
        full.ok()
        self._events.add("writes")
        self._events.add("bytes_written", data.nbytes)
        return True

    def _put(
        self, wire: Wire, owned: tuple[ChunkKey, int], data: memoryview
    ) -> RefusedError | None:
        """Write a chunk. In a full Redis, make room for all writes under way and try once more."""
        self._under_way.append(owned[0])
        try:
            refusal = put_chunk(wire, self._form, owned, data, self._ttl_ms)
            if refusal is not None and refusal.code == "OOM":
                room = self._form.room(data.nbytes) * len(self._under_way)
                if self._upkeep.make_room(wire, self._form.header_name(owned[0]), room):
                    refusal = put_chunk(wire, self._form, owned, data, self._ttl_ms)
            return refusal
        finally:
            self._under_way.pop()

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        outcome = self._call(
            "failed_reads",
            self._form.header_name(key),
            lambda wire: get_chunk(wire, self._form, key, into),
        )
        if outcome is None:
            return None
        self._events.add(outcome)
        self._events.add("bytes_read", into.nbytes if outcome == "reads" else 0)
        if outcome in {"corrupt", "evicted"}:
            self._events.log_first(outcome, key.hex())
            self.delete(key)
        return outcome == "reads"

    def may_read(self, key: ChunkKey) -> bool:
        return self._health.of(self._form.header_name(key)).away.reserves()

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Close the connections. Redis keeps the order: the time of last use of every key."""
        super().close(coldest_first)
        self._upkeep.close()
        self._servers.close()

    # ---- many chunks -----------------------------------------------------------------------------

    def _held(self, run: Sequence[ChunkKey]) -> int:
        """Return how many leading chunks have a header. A missing part shows when it is read."""
        if not self.capacity:
            return 0
        replies = self._of_headers("EXISTS", run)
        return next((index for index, reply in enumerate(replies) if reply != 1), len(replies))

    def _of_headers(self, command: str, keys: Sequence[ChunkKey]) -> list[Reply]:
        names = [self._form.header_name(key) for key in keys]
        found: list[Reply] = [None] * len(keys)
        for indices in self._by_node(names):
            replies = self._ask("failed_finds", [(command, names[index]) for index in indices])
            for index, reply in zip(indices, replies or (), strict=False):
                found[index] = reply
        return found

    def _on_every_node(self, action: Callable[[Wire], bool], within_s: float) -> bool:
        """Do ``action`` on every node. Returns False when a node fails, ``action`` was False, or
        time was too short for all nodes."""
        whole = True
        try:
            with closing(self._servers.wires(within_s)) as wires:
                for wire in wires:
                    whole &= action(wire)
        except FAULTS as error:  # of a cluster it is unknown which node; its own calls tell
            breaker = None if self._servers.kind == "cluster" else self._health.of(b"").away
            self._failed(breaker, "failed_finds", error)
            return False
        return whole

    def _by_node(self, names: Sequence[bytes]) -> list[list[int]]:
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(self._servers.node_of(name), []).append(index)
        return list(groups.values())

    # ---- faults ----------------------------------------------------------------------------------

    def _call(
        self, count: str, name: bytes, action: Callable[[Wire], T], *, settle: bool = True
    ) -> T | None:
        """Return ``action``'s result at ``name``'s node; None if that fails or is left alone."""
        breaker = self._health.of(name).away
        if self._closed or not breaker.allows():
            self._events.add("refused")
            return None
        try:
            try:
                result = self._once(name, action)
            except MovedError:  # the node is well, and said where to go
                breaker.ok()
                breaker = self._health.of(name).away
                result = self._once(name, action)
        except MovingError as error:
            breaker.ok()
            self._events.add(count)
            self._events.log_first("moving", error)
            return None
        except (*FAULTS, RefusedError) as error:
            self._failed(breaker, count, error)
            return None
        self._answered(breaker, settle=settle)
        return result

    def _once(self, name: bytes, action: Callable[[Wire], T]) -> T:
        with self._servers.wire(name) as wire:
            return action(wire)

    def _ask(
        self, count: str, commands: list[tuple[Any, ...]], *, settle: bool = True
    ) -> list[Reply] | None:
        """Return replies to small commands about names of one node, or None as :meth:`_call`."""
        return self._call(count, commands[0][1], lambda wire: wire.ask(commands), settle=settle)

    def _refused(self, refusal: RefusedError, full: Breaker) -> None:
        """Count a node's refusal of a write: it is full, read-only, or its own disk fails."""
        self._events.add("failed_writes")
        self._events.log_first("refused write", refusal)
        full.fault()
        if refusal.code == "READONLY":  # a primary that became a replica
            self._servers.suspect()

    def _unlink(self, keys: Sequence[ChunkKey]) -> None:
        """Delete chunks, each in one command: no reader sees the header without the parts."""
        names = [self._form.header_name(key) for key in keys]
        for indices in self._by_node(names):
            commands = [
                ("UNLINK", *self._form.names(keys[index], self.chunk_bytes)) for index in indices
            ]
            replies = self._ask("failed_deletes", commands, settle=False)
            if replies is None or any(isinstance(reply, RefusedError) for reply in replies):
                self._owed.add([keys[index] for index in indices])

    # ---- start -----------------------------------------------------------------------------------

    def _settle(self) -> int:
        """Greet Redis, and return its room in chunks, 0 if it is away. Raises TierError."""
        try:
            self._facts = startup.greet(self._servers, self._form)
        except FAULTS as error:
            self._failed(self._health.of(self._form.probe).away, "failed_finds", error)
            self._unsized = "it does not answer, and redis_bytes does not say it"
        self.capacity = startup.room_for(
            self._servers.label,
            self.chunk_room,
            self._bytes,
            self._facts,
            ttl=self._ttl_ms is not None,
        )
        return self.capacity

    def _has_settled(self) -> bool:
        """Return whether there is room, after another try if not. On the upkeep's thread."""
        if self.capacity:
            return True
        room = 0
        try:
            room = self._settle()
        except TierError as error:
            self._unsized = str(error).partition(": ")[2]
        if room:
            _LOG.info("%s: answers now, and has room for %d chunks", self._place, room)
        return room > 0


def put_chunk(
    wire: Wire, form: Form, owned: tuple[ChunkKey, int], data: memoryview, ttl_ms: int | None
) -> RefusedError | None:
    """Write the parts, then the header. On a refusal the parts are removed."""
    key, owner = owned
    digest = xxh3_128(key)

    def parts() -> Iterator[tuple[bytes, memoryview]]:
        for name, part in zip(form.part_names(key, data.nbytes), form.split(data), strict=True):
            digest.update(part)
            yield name, part

    refusal = wire.put(parts(), None if ttl_ms is None else ttl_ms + TTL_GRACE_MS)
    if refusal is None:
        header = memoryview(form.header(key, data.nbytes, digest.digest(), owner))
        refusal = wire.put([(form.header_name(key), header)], ttl_ms)
    if refusal is not None:
        wire.ask([("UNLINK", *form.names(key, data.nbytes))])
    return refusal


def get_chunk(wire: Wire, form: Form, key: ChunkKey, into: memoryview) -> str:
    """Read header and parts. Returns the name of the event that the read counts as."""
    header = memoryview(bytearray(HEADER_BYTES))
    digest = xxh3_128(key)
    parts, checksum = form.split(into), None
    come = 0
    try:
        with closing(wire.get(form.names(key, into.nbytes), [header, *parts])) as memories:
            for memory in memories:
                if come:
                    digest.update(memory)
                elif (checksum := form.checksum(bytes(header), key, into.nbytes)) is None:
                    return "corrupt"
                come += 1
    except WrongSizeError:
        return "corrupt"
    if come == 0:
        return "misses"
    if come <= len(parts):
        return "evicted" if _is_torn(wire, form, key, into.nbytes) else "misses"
    if checksum == digest.digest():
        return "reads"
    return "corrupt" if _is_still(wire, form, key, header) else "misses"


def _is_still(wire: Wire, form: Form, key: ChunkKey, header: memoryview) -> bool:
    """Return whether the stored header is still this one. If not, the chunk was written anew during
    the read and must not be dropped: encryption gives each write other bytes."""
    (now,) = wire.ask([("GET", form.header_name(key))])
    return bool(now == header)


def _is_torn(wire: Wire, form: Form, key: ChunkKey, length: int) -> bool:
    """Return whether there is a header without one of its parts. If not, the chunk was deleted, and
    maybe written anew, during the read and must not be dropped. EXISTS counts a name as often as it
    is given, so one command, which is one moment, tells header and parts apart by the sum."""
    parts = form.part_names(key, length)
    (count,) = wire.ask([("EXISTS", *[form.header_name(key)] * (len(parts) + 1), *parts)])
    return isinstance(count, int) and len(parts) < count < 2 * len(parts) + 1
