"""Connections to one Redis server: made, logged in, lent out one caller at a time, and kept for the
next."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvtier.core.deadline import Deadline, reach
from kvtier.core.errors import ConfigError
from kvtier.tiers.redis.errors import RedisError, RefusedError, login_error
from kvtier.tiers.redis.url import Address, Login, RedisUrl, Tls
from kvtier.tiers.redis.wire import Wire


class ConnectionFactory:
    """How to reach and to enter any server of one URL. Threads: any.

    Raises ConfigError for certificate files that cannot be read."""

    def __init__(self, url: RedisUrl, login: Login, database: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._path, self._login, self._database = url.path, login, database
        self._tls = None if url.tls is None else _context(url.tls)
        self.secrets = tuple(
            one.password for one in (url.login, url.sentinel_login) if one.password is not None
        )

    def connect(self, address: Address | None, within_s: float | None = None) -> socket.socket:
        """A socket that is logged in. None: the Unix socket. Takes ``timeout_s``, or ``within_s``,
        at most, and the time that the system takes to look up a name. Raises FAULTS."""
        deadline = Deadline(self.timeout_s if within_s is None else within_s)
        if address is None:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            found = reach(*address, deadline)
        try:
            found.settimeout(deadline.left())
            if address is None:
                found.connect(self._path)
            else:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    found = self._tls.wrap_socket(found, server_hostname=address[0])
            self._enter(Wire(found, deadline.left(), self.secrets))
        except BaseException:
            found.close()
            raise
        return found

    def _enter(self, wire: Wire) -> None:
        steps: list[tuple[object, ...]] = []
        if self._login.password is not None:
            user = () if self._login.user is None else (self._login.user,)
            steps.append(("AUTH", *user, self._login.password))
        if self._database:
            steps.append(("SELECT", self._database))
        for step, reply in zip(steps, wire.ask(steps) if steps else (), strict=True):
            if isinstance(reply, RefusedError) and "max number of clients" in str(reply):
                raise RedisError(str(reply))  # said before anything was asked
            if isinstance(reply, RefusedError) and step[0] == "AUTH":
                raise login_error(reply)
            if reply != b"OK":
                raise RedisError(f"database {self._database} is refused: {reply}")


def _context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca)  # trusts the file's authorities alone
        context.check_hostname = tls.verify and tls.check_host
        context.verify_mode = ssl.CERT_REQUIRED if tls.verify else ssl.CERT_NONE
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else "no certificate or key"
        )
        raise ConfigError(f"redis_url: its certificate files cannot be used: {reason}") from None
    return context


class ConnectionPool:
    """At most ``connections`` connections to one server. Threads: any. ``_lock`` is never held
    during I/O."""

    def __init__(
        self, factory: ConnectionFactory, address: Address | None, connections: int
    ) -> None:
        self._factory, self._address = factory, address
        self._places = threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._closed = False

    @contextmanager
    def wire(self) -> Iterator[Wire]:
        """A wire for one call. Raises FAULTS. A connection that failed is closed, not lent
        again."""
        timeout_s = self._factory.timeout_s
        if not self._places.acquire(timeout=timeout_s):
            raise TimeoutError("every connection is in use")
        try:
            connection = self._kept() or self._factory.connect(self._address)
            try:
                yield Wire(connection, timeout_s, self._factory.secrets)
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
        finally:
            self._places.release()

    def close(self) -> None:
        """Close connections that are not in use. The others are closed when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _kept(self) -> socket.socket | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not _has_news(connection):
                return connection
            connection.close()

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and connection.fileno() >= 0:
                self._idle.append(connection)
                return
        with suppress(OSError):
            connection.close()


def _has_news(connection: socket.socket) -> bool:
    """A connection at rest that can be read has ended, or has an answer without a question."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
