"""Nodes: which server holds a name: the only server, a cluster's node by its map of slots, or the
primary that Sentinel names.

The answers of a cluster or a Sentinel are believed: who can answer in its place can send the tier
anywhere, with its login. TLS with a verified certificate closes that."""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from kvtier.tiers.redis.connections import ConnectionFactory
from kvtier.tiers.redis.errors import FAULTS, ProtocolError, RedisError, RefusedError, SetupError
from kvtier.tiers.redis.url import Address, RedisUrl, address_text
from kvtier.tiers.redis.wire import Bounds, Reply, Wire

SLOTS = 16384
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
            raise _refused_map(reply)
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


def _refused_map(refusal: RefusedError) -> RedisError:
    if "cluster support disabled" in str(refusal):
        return SetupError(
            "this server is no Redis Cluster; write redis:// or rediss:// in redis_url"
        )
    if refusal.code == "NOPERM":
        return SetupError(f"the user lacks a right ({refusal}); allow +cluster|slots")
    return RedisError(str(refusal))


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
