"""RedisServers: wires to the servers that one ``redis_url`` stands for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from kvtier.core.errors import ConfigError
from kvtier.tiers.redis.connections import (
    ConnectionFactory,
    ConnectionPool,
    ProvidedLogins,
    provided_logins,
)
from kvtier.tiers.redis.errors import FAULTS, MovedError, MovingError, RedisError
from kvtier.tiers.redis.nodes import ClusterNodes, Nodes, OneServer, SentinelNodes
from kvtier.tiers.redis.url import Address, Kind, Login, RedisUrl, address_text, parse
from kvtier.tiers.redis.wire import Wire


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
