"""Link and Wire: connections to one Redis or a Redis Cluster, and chunk-sized transfers over them.

redis-py does what it does well: URLs, TLS, login, pools, cluster discovery, and every small command. Only the payload
of parts goes past it: hiredis hands out ``bytes`` and so copies each part three times, which held reads at half of what
redis-benchmark reaches; ``recv_into`` puts them where they belong (bench/micro/redis.py, rows "library"). The two
methods of :class:`Wire` that touch the socket itself are ``_send`` and ``_fill``.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.cluster import RedisCluster
from redis.connection import BlockingConnectionPool, Connection, parse_url
from redis.exceptions import AskError, ClusterDownError, MasterDownError, RedisClusterException

from kvtier.errors import ConfigError

FAULTS = (redis.RedisError, RedisClusterException, OSError)
"""What a call over a link raises when the server, the network or the login fails."""

IN_FLIGHT = 2
"""Parts under way at once: one travels while Redis works on the other. More only fills socket buffers and caches."""

Reply = Any
"""What redis-py makes of a reply; a :class:`redis.ResponseError` where the server answered with an error."""

_POOL: Any = BlockingConnectionPool  # redis-py ships types, but not for these two
_PARSE_URL: Any = parse_url
_LINE_BYTES = 512
_CLUSTER = "+cluster"
_OURS = {"protocol", "socket_timeout", "socket_connect_timeout", "max_connections", "timeout", "decode_responses"}


class WrongSizeError(Exception):
    """A value does not have the size that was asked for; the connection is closed."""


class Link:
    """Where Redis is and how to reach it. Connects when first used, and again by itself after a fault.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://`` with user, password, database and options as redis-py
            reads them (``?ssl_ca_certs=/etc/ca.pem``); ``redis+cluster://`` or ``rediss+cluster://`` names any one
            node of a Redis Cluster. The scheme says it because a server that is down at the start cannot.
        connections: to each node, at most; as many as threads call.
        timeout_s: longest wait for one reply, one send or one connect; a call that moves a chunk ends within twice
            that, one that must connect first within three times. Looking up a host's name is the system's affair.

    Raises ConfigError for a URL that is none.

    Threads: any. ``_lock`` is held while the cluster is asked for its map, and waited for no longer than ``timeout_s``.
    """

    def __init__(self, url: str, *, connections: int = 4, timeout_s: float = 1.0) -> None:
        self.timeout_s = timeout_s
        scheme, colon, rest = url.partition("://")
        self.is_cluster = scheme.endswith(_CLUSTER)
        self._url = scheme.removesuffix(_CLUSTER) + colon + rest
        given = _parsed(self._url)
        self.label = str(given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}")
        """Where it is, for logs: no user, no password."""
        self._fixed = {**dict.fromkeys(("socket_timeout", "socket_connect_timeout"), timeout_s), "protocol": 2}
        self._lock = threading.Lock()
        self._cluster: Any = None
        self._stale = False
        self._pool: Any = None
        if not self.is_cluster:
            self._pool = _POOL(connections, timeout_s, **given, **self._fixed)
        elif given.get("path") or given.get("db"):
            raise ConfigError("redis_url: a cluster is reached over TCP and has no database numbers")

    def node_of(self, name: bytes) -> str:
        """Which node holds ``name``, as far as known; asks nobody."""
        if self._cluster is None:
            return self.label
        with suppress(*FAULTS):
            return str(self._cluster.get_node_from_key(name).name)
        return self.label

    @contextmanager
    def wire(self, name: bytes) -> Iterator[Wire]:
        """A wire to the node that holds ``name``. Raises FAULTS; a wire that failed is closed, not reused."""
        with self._borrowed(self._pool_of(name)) as wire:
            yield wire

    def wires(self) -> Generator[Wire]:
        """A wire to every node that takes writes, one after the other. Raises FAULTS; close it when you stop early."""
        nodes = self._discovered().get_primaries() if self.is_cluster else []
        for pool in [self._node_pool(node) for node in nodes] if self.is_cluster else [self._pool]:
            with self._borrowed(pool) as wire:
                yield wire

    def close(self) -> None:
        """Close every connection that nobody uses now."""
        with suppress(*FAULTS):
            if self._pool is not None:
                self._pool.disconnect()
            if self._cluster is not None:
                self._cluster.close()

    @contextmanager
    def _borrowed(self, pool: Any) -> Iterator[Wire]:
        try:
            connection = pool.get_connection()
            try:
                yield Wire(connection, self.timeout_s)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                pool.release(connection)
        except FAULTS:
            # A slot that moved or a node that went: both mean that our map of the cluster may be old.
            self._stale = True
            raise

    def _pool_of(self, name: bytes) -> Any:
        if not self.is_cluster:
            return self._pool
        return self._node_pool(self._discovered().get_node_from_key(name))

    @staticmethod
    def _node_pool(node: Any) -> Any:
        if node is None or node.redis_connection is None:
            raise redis.ConnectionError("no node of the cluster holds this slot now")
        return node.redis_connection.connection_pool

    def _discovered(self) -> Any:
        """The cluster's client, its map of slots drawn anew after a fault; one thread does it, others wait a little."""
        if self._cluster is not None and not self._stale:
            return self._cluster
        if not self._lock.acquire(timeout=self.timeout_s):
            raise redis.TimeoutError("the map of the cluster is being drawn")
        try:
            if self._cluster is None:
                self._cluster = RedisCluster.from_url(self._url, require_full_coverage=False, **self._fixed)
            elif self._stale:
                self._cluster.nodes_manager.initialize()
            self._stale = False
            return self._cluster
        finally:
            self._lock.release()


def _parsed(url: str) -> dict[str, Any]:
    """The options of a URL, each known to redis-py. Raises ConfigError."""
    try:
        _ = urlsplit(url).port
    except ValueError:  # its text would show what stands there, which may be half a password
        raise ConfigError(
            "redis_url: the port is no number; if the password contains / ? # @ or :, write %2F %3F %23 %40 or %3A"
        ) from None
    try:
        given = dict(_PARSE_URL(url))
        options = {option: value for option, value in given.items() if option != "connection_class"}
        given.get("connection_class", Connection)(**options)
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigError(
            f"redis_url: {error}; expected redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://, "
            "with options as redis-py reads them"
        ) from None
    if taken := sorted(_OURS & given.keys()):
        raise ConfigError(f"redis_url: {', '.join(taken)} cannot be set there; kvtier decides it")
    return given


class Wire:
    """One connection, for one call. Not thread-safe: one owner."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + timeout_s
        self._scratch = memoryview(bytearray(_LINE_BYTES))

    def ask(self, commands: Iterable[tuple[Any, ...]]) -> list[Reply]:
        """Send small commands together; their replies, errors of the server among them as values."""
        listed = list(commands)
        self._connection.send_packed_command(self._connection.pack_commands(listed))
        return [self._reply() for _ in listed]

    def put(self, items: Iterable[tuple[bytes, memoryview]], ttl_ms: int | None) -> redis.ResponseError | None:
        """SET every name to its bytes, :data:`IN_FLIGHT` at a time; ``items`` is drawn from as the sending goes.

        Returns the server's first refusal; what comes after it is not sent."""
        refusal: redis.ResponseError | None = None
        waiting = 0
        head = b"*3\r\n" if ttl_ms is None else b"*5\r\n"
        tail = b"\r\n" if ttl_ms is None else b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms)
        for name, data in items:
            start = b"%s$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (head, len(name), name, data.nbytes)
            self._send((start, data, tail))
            waiting += 1
            if waiting == IN_FLIGHT:
                refusal, waiting = self._refusal(), waiting - 1
                self._check_deadline()
            if refusal is not None:
                break
        for _ in range(waiting):
            refusal = self._refusal() or refusal
        return refusal

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> Generator[memoryview]:
        """GET every name straight into its memory, :data:`IN_FLIGHT` at a time; yields each memory once it is full.

        Ends early at the first name that does not exist; what follows it in ``into`` is undefined then. Raises
        WrongSizeError for a value of another size, ResponseError for a refusal.
        """
        commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names]
        sent = min(IN_FLIGHT, len(commands))
        clean = False
        try:
            self._connection.send_packed_command((b"".join(commands[:sent]),))
            for index, memory in enumerate(into):
                if not self._receive(memory):
                    for expected in into[index + 1 : sent]:
                        self._receive(expected)
                    break
                if sent < len(commands):
                    self._connection.send_packed_command((commands[sent],))
                    sent += 1
                if index + 1 == len(into):
                    clean = True
                yield memory
            clean = True
        finally:
            if not clean:  # replies may still be under way: nobody else must take them for theirs
                self._connection.disconnect()

    def scan(self, pattern: bytes, count: int) -> Iterator[list[bytes]]:
        """Names on this node that match; some may come twice."""
        cursor: Any = 0
        while True:
            (answer,) = self.ask([("SCAN", cursor, "MATCH", pattern, "COUNT", count)])
            if isinstance(answer, redis.ResponseError):
                raise answer
            cursor, names = answer
            yield names
            if int(cursor) == 0:
                return

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """All pieces in one system call where possible: one by one, each would wake Redis for itself, which costs a
        lane a third more. TLS has no such call and leaves it to redis-py."""
        sock = self._connection._sock
        if isinstance(sock, ssl.SSLSocket):
            self._connection.send_packed_command(pieces)
            return
        sent = sock.sendmsg(pieces)
        for piece in pieces:
            if sent < len(piece):
                sock.sendall(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))

    def _reply(self) -> Reply:
        try:
            return self._connection.read_response()
        except (AskError, ClusterDownError, MasterDownError):
            raise  # not this node's answer but the cluster's: the map of it is old, or it is broken
        except redis.ResponseError as error:
            return error

    def _refusal(self) -> redis.ResponseError | None:
        reply = self._reply()
        return reply if isinstance(reply, redis.ResponseError) else None

    def _receive(self, memory: memoryview) -> bool:
        """One GET's reply into ``memory``; False when the name does not exist.

        Every reply has at least four bytes, and the first four say whether it is the one expected."""
        expected = b"$%d\r\n" % memory.nbytes
        line = self._scratch[: len(expected)]
        self._fill(line[:4])
        if line[:4] != expected[:4]:
            return self._unexpected(4)
        self._fill(line[4:])
        if line != expected:
            raise WrongSizeError(f"expected {expected!r}, got {bytes(line)!r}")
        self._fill(memory)
        self._fill(line[:2])
        if bytes(line[:2]) != b"\r\n":
            raise WrongSizeError(f"a value is longer than {memory.nbytes} bytes")
        return True

    def _unexpected(self, have: int) -> bool:
        """The reply is none of the expected size: False for a name that does not exist, else raises."""
        while bytes(self._scratch[have - 2 : have]) != b"\r\n" and have < _LINE_BYTES:
            self._fill(self._scratch[have : have + 1])
            have += 1
        line = bytes(self._scratch[:have])
        if line == b"$-1\r\n":
            return False
        if line.startswith(b"-"):
            raise redis.ResponseError(line[1:-2].decode(errors="replace"))
        raise WrongSizeError(f"not the value expected: {line[:32]!r}")

    def _fill(self, memory: memoryview) -> None:
        # redis-py's own parser holds nothing back here, because every reply before this one was read to its end.
        receive = self._connection._sock.recv_into
        while memory.nbytes:
            got = receive(memory)
            if not got:
                raise ConnectionResetError("Redis closed the connection")
            memory = memory[got:]
            if memory.nbytes:
                self._check_deadline()

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise redis.TimeoutError("the transfer takes longer than the time allowed")


def arrived(wire: Wire, names: Sequence[bytes], into: Sequence[memoryview]) -> int:
    """How many of ``names``, from the first on, exist and are of the right size, and are in their memories now."""
    count = 0
    with suppress(WrongSizeError), closing(wire.get(names, into)) as memories:
        for _ in memories:
            count += 1
    return count
