"""Deadline: one bound in time for several calls on one blocking socket. :func:`reach`: the only way
from a host's name to a socket. :class:`KeptConnections`: those of earlier calls.

A socket's own timeout starts anew with every byte that moves. So a peer that gives one byte a
second could hold a thread for as long as it likes.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import http.client

NEXT_ADDRESS_S = 0.25
"""Silence of one address after which the next is tried too (RFC 8305, happy eyeballs)."""
_MOST_ADDRESSES = 64
_PORTS = {"http": 80, "https": 443}
_Place = tuple[int, int, tuple[Any, ...]]
"""Socket family, protocol and address."""


class Deadline:
    """A deadline ``seconds`` from now, for the thread that uses the socket."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._until = time.monotonic() + self._seconds

    def left(self) -> float:
        """Return the seconds left, more than 0. Raises TimeoutError when none are left."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done within {self._seconds:.3g} s")
        return left

    def receive(self, sock: socket.socket, into: memoryview) -> int:
        """Receive as ``recv_into`` does. ConnectionResetError if the other side has closed."""
        sock.settimeout(self.left())
        count = sock.recv_into(into)
        if not count:
            raise ConnectionResetError("it closed the connection")
        return count

    def send(self, sock: socket.socket, data: bytes | memoryview) -> None:
        """Send as ``sendall`` does, with one deadline for all TLS records. Raises OSError."""
        rest = memoryview(data)
        while rest:
            sock.settimeout(self.left())
            rest = rest[sock.send(rest) :]


def reach(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first address of ``host`` that answers. All addresses have one deadline
    together, and silent ones do not keep the others from being tried. It begins when the name has
    been looked up. Raises OSError."""
    places = _alternating(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    deadline.renew()
    pause_s = min(NEXT_ADDRESS_S, deadline.left() / (2 * max(1, len(places))))
    trying = dict[int, socket.socket]()
    failure, poll = OSError("the name has no address"), select.poll()
    try:
        while places or trying:
            if places:
                try:
                    _begin(places.pop(0), trying, poll)
                except OSError as error:  # also where this host has no such family
                    failure = error
                    continue
            wait_s = min(deadline.left(), pause_s) if places else deadline.left()
            for descriptor, _ in poll.poll(1000 * wait_s + 1):
                poll.unregister(descriptor)
                sock = trying.pop(descriptor)
                if not (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    sock.settimeout(deadline.left())
                    return sock
                sock.close()
                failure = OSError(code, os.strerror(code))
    finally:
        for sock in trying.values():
            sock.close()
    raise failure


def _alternating(found: Sequence[tuple[int, int, int, str, Any]]) -> list[_Place]:
    """Order IPv6 and IPv4 in turns, the system's choice first: a dead one costs one pause."""
    first = [one for one in found if one[0] == found[0][0]]
    other = [one for one in found if one[0] != found[0][0]]
    turns = chain.from_iterable(zip_longest(first, other))
    return [(one[0], one[2], one[4]) for one in turns if one is not None][:_MOST_ADDRESSES]


def _begin(place: _Place, trying: dict[int, socket.socket], poll: select.poll) -> None:
    family, protocol, address = place
    sock = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    trying[sock.fileno()] = sock
    poll.register(sock, select.POLLOUT)


class KeptSocket(Protocol):
    def fileno(self) -> int: ...
    def close(self) -> None: ...


C = TypeVar("C", bound=KeptSocket)


class KeptConnections(Generic[C]):
    """Connections that are kept between calls, each lent to one call at a time. ``connect`` makes
    one more. Threads: any. No I/O under ``_lock``."""

    def __init__(self, connect: Callable[[], C]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[C] = []
        self.closed = False

    @contextmanager
    def lent(self) -> Iterator[C]:
        """Lend a connection for one call. A failed one is closed, and with one that was reset the
        idle ones, which have the same end."""
        connection = self._kept() or self._connect()
        try:
            yield connection
        except BaseException as error:
            connection.close()
            if isinstance(error, ConnectionError):
                self._end_idle()
            raise
        self.keep(connection)

    def keep(self, connection: C) -> None:
        with self._lock:
            if not self.closed and connection.fileno() >= 0:
                self._idle.append(connection)
                return
        with suppress(OSError):
            connection.close()

    def close(self) -> None:
        self.closed = True
        self._end_idle()

    def _end_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _kept(self) -> C | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not _has_news(connection):
                return connection
            connection.close()


def _has_news(connection: KeptSocket) -> bool:
    """Return whether an idle connection has ended, or got bytes that nobody asked for."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def is_loopback(host: str) -> bool:
    """Whether this is localhost or a loopback address. Another name may mean any host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket that does not block. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=backlog)
    sock.setblocking(False)
    return sock


def exchange(
    url: str,
    path: str,
    sent: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> tuple[http.client.HTTPResponse, bytes]:
    """GET ``path`` below ``url``, or POST ``sent`` to it. Returns the answer, and its text.
    ``tls``: None for the system's authorities. Raises OSError and HTTPException."""
    import http.client

    parts = urlsplit(url)
    assert parts.hostname is not None
    line = http.client.HTTPConnection(parts.hostname, parts.port or _PORTS[parts.scheme])
    with closing(line):
        line.sock = reach(line.host, line.port, Deadline(timeout_s))
        if parts.scheme == "https":
            trusted = ssl.create_default_context() if tls is None else tls
            line.sock.settimeout(timeout_s)
            line.sock = trusted.wrap_socket(line.sock, server_hostname=line.host)
        line.sock.settimeout(timeout_s)
        line.request("GET" if sent is None else "POST", parts.path + path, sent, headers)
        answer = line.getresponse()
        return answer, answer.read()
