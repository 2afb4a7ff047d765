"""RedisServers: wires to the servers that one ``redis_url`` stands for, which of them holds a name
(the only server, a cluster's node by its map of slots, or the primary that Sentinel names), and
which are left alone.

The answers of a cluster or a Sentinel are believed: who can answer in its place can send the tier
anywhere, with its login. TLS with a verified certificate closes that."""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from kvtier.core.errors import ConfigError
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.redis.connections import (
    ConnectionFactory,
    ConnectionPool,
    ProvidedLogins,
    provided_logins,
)
from kvtier.tiers.redis.errors import (
    FAULTS,
    MovedError,
    MovingError,
    ProtocolError,
    RedisError,
    RefusedError,
    SetupError,
)
from kvtier.tiers.redis.url import Address, Kind, Login, RedisUrl, address_text, parse
from kvtier.tiers.redis.wire import SLOTS, Bounds, Reply, Wire

MOST_NODES = 1000
_MAP = Bounds(8 << 20, 400_000, 5)
_PRIMARY = Bounds(4096, 2, 1)
_REDRAW_S = 0.2


class Nodes:
    def every(self) -> Sequence[Address | None]:
        """Return the servers that take writes; None: the Unix socket. May ask. Raises FAULTS."""
        raise NotImplementedError

    def known(self) -> Sequence[Address | None]:
        """Return :meth:`every`, as far as known now. Sends no request."""
        raise NotImplementedError

    def of(self, name: bytes) -> Address | None:
        """Return the server that holds ``name``. May ask servers. Raises FAULTS."""
        return self.every()[0]

    def guess(self, name: bytes) -> Address | None:
        """Return :meth:`of` where a cluster's map is known, else None. Sends no request."""
        return None

    def suspect(self) -> None:
        """Ask anew at the next call: a server failed, or is no primary any more."""

    def moved(self, slot: int, to: Address | None) -> None:
        """Learn a slot's new node from a node's reply. Only clusters give one."""


class OneServer(Nodes):
    def __init__(self, address: Address | None) -> None:
        self._address = address

    def every(self) -> Sequence[Address | None]:
        return [self._address]

    known = every


class _Asked(Nodes):
    """Nodes as told by one of several servers, which is asked anew after a fault.

    ``_lock`` is held while they are asked. Waiting for it, and asking all of them, takes at most
    one timeout. A server that fails is asked last from then on, so that a seed that is down costs
    one call."""

    def __init__(
        self, url: RedisUrl, factory: ConnectionFactory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url, self._candidates = url, list(url.seeds)
        self._factory, self._clock = factory, clock
        self._lock = threading.Lock()
        self._stale, self._again_at = True, clock()

    def suspect(self) -> None:
        self._stale = True

    def _renew(self, learn: Callable[[Wire, Address], None], *, known: bool) -> None:
        """Ask anew if the answer is stale. With ``known``, not too often, and a fault keeps it."""
        if not self._stale or (known and self._clock() < self._again_at):
            return
        if not self._lock.acquire(timeout=0 if known else self._factory.timeout_s):
            if known:
                return
            raise TimeoutError("another call asks where the nodes are")
        try:
            if self._stale:
                self._ask(learn)
                self._stale = False
        except FAULTS:
            if not known:
                raise
        finally:
            self._again_at = self._clock() + _REDRAW_S
            self._lock.release()

    def _ask(self, learn: Callable[[Wire, Address], None]) -> None:
        until = time.monotonic() + self._factory.timeout_s
        last: Exception = RedisError("there is no node to ask")
        for rest in range(len(self._candidates), 0, -1):
            left = until - time.monotonic()
            if left <= 0:
                break
            candidate, within_s = self._candidates[0], left / min(rest, 2)
            answered_at = time.monotonic() + within_s
            try:
                with closing(self._factory.connect(candidate, within_s)) as connection:
                    within_s = answered_at - time.monotonic()
                    return learn(Wire(connection, within_s, self._factory.secrets), candidate)
            except FAULTS as error:
                last = last if isinstance(last, SetupError) else error
                self._candidates.append(self._candidates.pop(0))
        raise last


class ClusterNodes(_Asked):
    _primaries: tuple[Address, ...] = ()

    def __init__(
        self, url: RedisUrl, factory: ConnectionFactory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(url, factory, clock)
        self._map: list[Address | None] = []

    def every(self) -> Sequence[Address]:
        self._renew(self._draw, known=bool(self._map))
        return self._primaries

    def known(self) -> Sequence[Address]:
        return self._primaries

    def of(self, name: bytes) -> Address:
        self._renew(self._draw, known=bool(self._map))
        if (found := self._map[slot_of(name)]) is None:
            self._stale = True
            raise RedisError("no node of the cluster has this slot now")
        return found

    def guess(self, name: bytes) -> Address | None:
        return self._map[slot_of(name)] if self._map else None

    def moved(self, slot: int, to: Address | None) -> None:
        if to in self._primaries:
            self._map[slot] = to
        else:
            self._stale, self._again_at = True, self._clock()

    def _draw(self, wire: Wire, asked: Address) -> None:
        (reply,) = wire.ask([("CLUSTER", "SLOTS")], _MAP)
        if isinstance(reply, RefusedError):
            if "cluster support disabled" in str(reply):
                raise SetupError(
                    "this server is no Redis Cluster; write redis:// or rediss:// in redis_url"
                )
            if reply.code == "NOPERM":
                raise SetupError(f"the user lacks a right ({reply}); allow +cluster|slots")
            raise RedisError(str(reply))
        drawn = cluster_map(reply, asked[0])
        self._primaries = tuple(dict.fromkeys(address for address in drawn if address is not None))
        self._map = drawn
        self._candidates = list(dict.fromkeys((asked, *self._primaries, *self._url.seeds)))


class SentinelNodes(_Asked):
    """Primary of one service, as Sentinel names it. A failover is noticed when the old primary
    fails, or refuses writes as a replica."""

    _primary: Address | None = None

    def every(self) -> Sequence[Address]:
        self._renew(self._name, known=self._primary is not None)
        assert self._primary is not None
        return [self._primary]

    def known(self) -> Sequence[Address]:
        return [] if self._primary is None else [self._primary]

    def _name(self, wire: Wire, asked: Address) -> None:
        (reply,) = wire.ask([("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.service)], _PRIMARY)
        if isinstance(reply, RefusedError):
            raise SetupError(
                f"{address_text(asked)} is no Sentinel, or may not answer us ({reply}); correct "
                "redis_url"
            )
        if reply is None:
            raise SetupError(
                f"Sentinel {address_text(asked)} knows no service {self._url.service!r}; correct "
                "redis_url"
            )
        self._primary = _address(reply, asked[0])


def slot_of(name: bytes) -> int:
    begin = name.find(b"{")
    end = name.find(b"}", begin + 1)
    tag = name[begin + 1 : end] if begin >= 0 and end > begin + 1 else name
    return crc_hqx(tag, 0) % SLOTS


def cluster_map(reply: Reply, asked: str) -> list[Address | None]:
    """Return the primary of each slot, or None, from a reply to CLUSTER SLOTS.

    ``asked``: the host that answered, for nodes that do not know their own. Raises
    ProtocolError."""
    drawn: list[Address | None] = [None] * SLOTS
    if not isinstance(reply, list) or len(reply) > SLOTS:
        raise ProtocolError("the cluster's map is none")
    for part in reply:
        match part:
            case [int(first), int(last), [*node], *_] if 0 <= first <= last < SLOTS:
                drawn[first : last + 1] = [_address(node, asked)] * (last + 1 - first)
            case _:
                raise ProtocolError("the cluster's map has a line that cannot be read")
    if len(set(drawn)) > MOST_NODES + 1:
        raise ProtocolError(f"the cluster's map names more than {MOST_NODES} nodes")
    return drawn


def _address(node: Any, asked: str) -> Address:
    match node:
        case [None | bytes() as host, int() | bytes() as port, *_]:
            text = (host or b"").decode(errors="replace") or asked
            if text == "?" or len(text) > 253 or not text.isprintable():
                text = asked
            number = int(port) if isinstance(port, int) or port.isdigit() else 0
            if 0 < number < 65536:
                return text, number
    raise ProtocolError("a node's address is none")


class RedisServers:
    """Redis's servers, and how to reach them. Connects when first used, and again by itself after a
    fault. ``connections``: the most to each node: as many as threads call.

    ``timeout_s``: longest wait for one reply, one send or one connect. A call that moves a chunk
    ends within twice that. A call that must connect first has three times, and one that must first
    ask a cluster or Sentinel where the nodes are has five times. Looking up a host's name is the
    system's affair.

    Raises ConfigError for a URL that cannot be read, and a provider that cannot be used. Threads:
    any. ``_lock`` guards the pools and is never held during I/O."""

    def __init__(
        self,
        url: str,
        *,
        credential_provider: str | None = None,
        connections: int = 4,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            given = parse(url)
        except ConfigError as error:
            raise ConfigError(f"redis_url: {error}") from None
        self.timeout_s, self._connections = timeout_s, connections
        self.kind: Kind = given.kind
        self.label = given.label
        """Address for logs: no user, no password."""
        login: Login | ProvidedLogins = given.login
        if credential_provider is not None:
            if given.login.password is not None:
                raise ConfigError(
                    "redis_credential_provider and redis_url have a password each: remove one"
                )
            login = provided_logins(credential_provider)
        self._factory = ConnectionFactory(given, login, given.database, timeout_s)
        self._nodes = _nodes(given, self._factory, timeout_s, clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._pools: dict[Address | None, ConnectionPool] = {}
        self._closed = False

    def node_of(self, name: bytes) -> str:
        """Return the label of the node that holds ``name``, as far as known. Sends no request."""
        address = self._nodes.guess(name)
        return self.label if address is None else address_text(address)

    def nodes(self) -> list[str]:
        """Return labels that :meth:`node_of` may give now, or gave before a cluster answered."""
        known = [address_text(address) for address in self._nodes.known() if address is not None]
        return [self.label, *(known if self.kind == "cluster" else [])]

    @contextmanager
    def wire(self, name: bytes) -> Iterator[Wire]:
        """Lend a wire to the node that holds ``name``. Raises FAULTS. A failed wire is closed."""
        with self._watched(), self._pool(self._nodes.of(name)).wire() as wire:
            yield wire

    def wires(self, within_s: float) -> Generator[Wire]:
        """Yield a wire to every node that takes writes, one after the other. Raises FAULTS, also
        when ``within_s`` is over before the last node: a map may name a thousand slow ones. Close
        the generator when you stop early."""
        until = self._clock() + within_s
        with self._watched():
            addresses = self._nodes.every()
        for count, address in enumerate(addresses):
            if count and self._clock() > until:
                raise RedisError(
                    f"{count} of {len(addresses)} nodes were asked in {within_s:.0f} s, and there "
                    "is no time for the others"
                )
            with self._watched(), self._pool(address).wire() as wire:
                yield wire

    def suspect(self) -> None:
        """Ask again, at the next call, where the primaries are: one refuses writes."""
        self._nodes.suspect()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Mark the known nodes as old after a moved slot or a failed node."""
        try:
            yield
        except MovedError as error:
            self._nodes.moved(error.slot, error.address)
            raise
        except MovingError:
            raise
        except FAULTS:
            self._nodes.suspect()
            raise

    def _pool(self, address: Address | None) -> ConnectionPool:
        """Return the server's pool. Closes pools of servers that are no longer ours."""
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            if (pool := self._pools.get(address)) is not None:
                return pool
            known = {*self._nodes.known(), address}
            gone = [self._pools.pop(one) for one in list(self._pools) if one not in known]
            pool = self._pools[address] = ConnectionPool(self._factory, address, self._connections)
        for one in gone:
            one.close()
        return pool


def _nodes(
    url: RedisUrl, factory: ConnectionFactory, timeout_s: float, clock: Callable[[], float]
) -> Nodes:
    if url.kind == "cluster":
        return ClusterNodes(url, factory, clock)
    if url.kind == "sentinel":
        return SentinelNodes(url, ConnectionFactory(url, url.sentinel_login, 0, timeout_s), clock)
    return OneServer(None if url.path else url.seeds[0])


_FULL_WAIT_S, _LONGEST_FULL_WAIT_S = 0.25, 8.0


@dataclass(frozen=True, slots=True)
class Node:
    away: Breaker
    """Breaker of every call."""
    full: Breaker
    """Breaker of writes, beside ``away``: a full node still serves reads."""


class NodeHealth:
    """Breakers of the nodes. Threads: any. No I/O under ``_lock``."""

    def __init__(self, servers: RedisServers, clock: Callable[[], float]) -> None:
        self._servers, self._clock = servers, clock
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}

    def of(self, name: bytes) -> Node:
        """Return the breakers of the node of ``name``. Those of nodes that left the cluster are
        dropped when a new node comes."""
        place = self._servers.node_of(name)
        with self._lock:
            if place not in self._nodes:
                self._nodes = dict(self._present())
                full = Breaker(self._clock, 1, _FULL_WAIT_S, _LONGEST_FULL_WAIT_S)
                self._nodes[place] = Node(Breaker(self._clock), full)
            return self._nodes[place]

    @property
    def away(self) -> list[str]:
        return [name for name, node in self._present() if node.away.open]

    @property
    def full(self) -> bool:
        return any(node.full.open for _, node in self._present())

    def _present(self) -> list[tuple[str, Node]]:
        known = set(self._servers.nodes())
        return [(name, node) for name, node in list(self._nodes.items()) if name in known]
