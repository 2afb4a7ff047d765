"""Where the admin interface listens, and places for its connections: who is let in, and who must
leave when places are short.

A connection without a running request gives up its place for a new one, the one that has been quiet
longest first. So a crowd of idle connections keeps no liveness probe out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from kvtier.core.deadline import is_loopback, listening
from kvtier.core.errors import ConfigError
from kvtier.server.strangers import Turns, accepted, origin_of

PLACES = 64
MOST_REQUESTS = 32
"""Most requests that run at once. Beyond that only liveness and readiness are answered."""
READ_BYTES = 16 << 10
"""Bytes read in one connection's turn: asyncio's 256 KiB, in chunks of a byte, would take 20 ms."""
FIRST_REQUEST_S = 3.0
"""Longest time from a connection's start, TLS handshake included, to its first request."""
_LOOKS = 12
"""Parts of this time. After each the loop has a turn, so that a request that has come is read
before its time is over, however long a turn takes."""
_PASSED_ON = "connection_made", "connection_lost", "eof_received", "pause_writing", "resume_writing"


class _Sips(asyncio.BufferedProtocol):
    """Protocol that hands bytes to aiohttp's, at most :data:`READ_BYTES` a turn of the loop."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._room = memoryview(bytearray(READ_BYTES))
        for name in _PASSED_ON:
            setattr(self, name, getattr(handler, name))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._handler.data_received(bytes(self._room[:nbytes]))


class _Visit:
    """A connection, *quiet* while none of its requests is running."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.handler: Any = None
        """Protocol of aiohttp, once it exists."""
        self.admitting: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.working = 0

    @property
    def ended(self) -> bool:
        return (
            self.admitting is not None and self.admitting.done() and self.handler.transport is None
        )

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.admitting is not None:
            self.admitting.cancel()
        if self.handler is not None and self.handler.transport is not None:
            self.handler.transport.abort()


class Places:
    """Places for at most :data:`PLACES` connections. On the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None) -> None:
        self._loop, self._tls, self._turns = loop, tls, Turns(loop)
        self._visits: OrderedDict[_Visit, None] = OrderedDict()
        """Connections, the one that was quiet longest first."""

    @property
    def at_work(self) -> int:
        return sum(visit.working for visit in self._visits)

    @contextlib.contextmanager
    def request(self, handler: object) -> Iterator[None]:
        """Count a running request of this connection for as long as the context lasts."""
        visit = next((one for one in self._visits if one.handler is handler), None)
        if visit is None:
            yield
            return
        if visit.timer is not None:
            visit.timer.cancel()
        visit.working += 1
        try:
            yield
        finally:
            visit.working -= 1
            if visit in self._visits:
                self._visits.move_to_end(visit)

    async def accept(self, listening: socket.socket, serve: web.Server) -> None:
        """Let connections in until cancelled, then close the quiet ones: aiohttp ends the
        others."""
        try:
            async for sock, (address, *_) in accepted(self._loop, listening):
                self._enter(sock, address, serve)
        finally:
            for visit in self._visits:
                if not visit.working:
                    visit.close()

    def _enter(self, sock: socket.socket, address: str, serve: web.Server) -> None:
        for ended in [visit for visit in self._visits if visit.ended]:
            self._leave(ended)
        if len(self._visits) >= PLACES:
            quiet = next((visit for visit in self._visits if not visit.working), None)
            if quiet is None:
                sock.close()
                return
            self._leave(quiet)
        visit = _Visit(sock)
        self._visits[visit] = None
        self._wait(visit, _LOOKS)
        visit.admitting = self._loop.create_task(self._admit(visit, address, serve))

    def _wait(self, visit: _Visit, looks: int) -> None:
        if looks:
            part = FIRST_REQUEST_S / _LOOKS
            visit.timer = self._loop.call_later(part, self._wait, visit, looks - 1)
        else:
            self._leave(visit)

    def _leave(self, visit: _Visit) -> None:
        visit.close()
        self._visits.pop(visit, None)

    async def _admit(self, visit: _Visit, address: str, serve: web.Server) -> None:
        visit.handler = serve()
        with contextlib.suppress(OSError):  # no handshake: its connection is closed
            await self._turns.greet(visit.sock, _Sips(visit.handler), self._tls, origin_of(address))


class Port(NamedTuple):
    """A bound socket that listens. ``local``: only processes of this host can connect."""

    socket: socket.socket
    url: str
    tls: ssl.SSLContext | None
    local: bool


def bind(url: str, *, token: bool, tls: ssl.SSLContext | None) -> Port:
    """Listen at ``http://host:port`` or ``https://host:port``. Port 0 means any free port.

    Raises ConfigError when the port is taken, when the address is not loopback and there is no
    token, or when https is asked for without a certificate."""
    scheme, host, number = _parts(url)
    local = is_loopback(host)
    if not local and not token:
        raise ConfigError(
            f"admin={url} would let everybody on the network look in: set admin_token_file, or "
            "give an address on 127.0.0.1"
        )
    if scheme == "https" and tls is None:
        raise ConfigError(
            f"admin={url} needs a certificate: set server_cert and server_key, or give http://"
        )
    try:
        sock = listening(host, number, 2 * PLACES)
    except OSError as error:
        raise ConfigError(
            f"admin={url}: cannot listen there: {error}; give another port, or admin=off"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    return Port(
        sock,
        f"{scheme}://{shown}:{sock.getsockname()[1]}",
        tls if scheme == "https" else None,
        local,
    )


def without_port(host: str) -> str:
    """Return the name in a Host header, or "" if the header makes no sense."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _parts(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        scheme, host, number = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, number = "", None, None
    if scheme not in {"http", "https"} or not host or number is None or parts.path not in {"", "/"}:
        raise ConfigError(f"admin={url}: expected http://host:port, https://host:port or off")
    return scheme, host, number
