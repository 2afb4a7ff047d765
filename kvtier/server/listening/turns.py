"""TLS handshakes in turns. The asymmetric cryptography of one takes milliseconds of the loop that
serves all engines, and any client that reaches a port can ask for it.

The handshakes of a port take about a tenth of the loop's time. A handshake waits for its turn when
the client has sent its first message, so sockets that say nothing take no turns. Addresses take
turns among themselves, and of one address the client that came last goes first: in a flood the
others will soon give up.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, NamedTuple

_REST = 9
"""After handshakes, pause this many times as long."""
_MOST_WAITING_BYTES = 32 << 10
"""What a client may send before its turn. Its first message has at most 16 KiB."""
_FIRST_BYTES = 16 << 10
"""What one turn of the loop reads of a connection before its handshake is over."""
Work = Callable[[], None]


class Turns:
    """The turns of one port, for the thread of its ``loop``. ``cpu``: processor seconds of this
    thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self.loop, self._cpu = loop, cpu
        self._waiting: dict[str, list[Work]] = {}
        """By address. The address that had no turn for longest comes first."""
        self._spent_s = 0.0
        self._rests = False

    def of(self, origin: str) -> _Turn:
        """The turn of a client of this address."""
        return _Turn(self, origin)

    def wait(self, origin: str, work: Work) -> None:
        """Do ``work`` for a client of this address, now or in its turn."""
        self._waiting.setdefault(origin, []).append(work)
        if not self._rests:
            self._next()

    def leave(self, origin: str, work: Work) -> None:
        """The client is gone. No effect after its turn."""
        works = self._waiting.get(origin, [])
        if work in works:
            works.remove(work)
        if not works:
            self._waiting.pop(origin, None)

    def charge(self, work: Work) -> None:
        """Do ``work`` now. The turns after it come later by what it took."""
        begun = self._cpu()
        try:
            work()
        finally:
            self._spent_s += self._cpu() - begun

    def _next(self) -> None:
        self._rests = bool(self._waiting)
        if not self._waiting:
            return
        origin = next(iter(self._waiting))
        works = self._waiting.pop(origin)
        work = works.pop()
        if works:
            self._waiting[origin] = works
        try:
            self.charge(work)
        finally:
            rest_s, self._spent_s = _REST * self._spent_s, 0.0
            self.loop.call_later(rest_s, self._next)


class _Turn(NamedTuple):
    turns: Turns
    origin: str


class TurnedTls(SSLProtocol):
    """The server's end of a TLS connection. ``shaken``: done after the handshake. ``within_s``: the
    time for it, with its waiting."""

    def __init__(
        self,
        turn: _Turn,
        protocol: Any,
        tls: ssl.SSLContext,
        shaken: asyncio.Future[None],
        within_s: float | None = None,
    ) -> None:
        loop, self._whole_bytes = turn.turns.loop, self.max_size
        # each connection has a buffer of that size, however soon it goes
        self.max_size = min(self.max_size, _FIRST_BYTES)
        super().__init__(
            loop, protocol, tls, shaken, server_side=True, ssl_handshake_timeout=within_s
        )
        self._turns, self._origin = turn
        self._has_begun = self._waits = self._is_shaken = False

    def _do_handshake(self) -> None:
        """Called at the start, and whenever bytes have come until the handshake is over."""
        if self._has_begun or not self._incoming.pending:
            self._turns.charge(super()._do_handshake)
        elif self._incoming.pending > _MOST_WAITING_BYTES:
            self._fatal_error(ConnectionAbortedError("it sends too much before its handshake"))
        elif not self._waits:
            self._waits = True
            self._turns.wait(self._origin, self._begin)

    def _on_handshake_complete(self, error: BaseException | None) -> None:
        self.max_size, self._is_shaken = self._whole_bytes, error is None
        super()._on_handshake_complete(error)

    def _begin(self) -> None:
        self._has_begun = True
        if self._transport is not None:
            super()._do_handshake()

    def connection_lost(self, error: Exception | None) -> None:
        self._turns.leave(self._origin, self._begin)
        super().connection_lost(error)
        if not self._is_shaken:
            self._sslobj = None  # what OpenSSL has for it would wait for the garbage collector


async def connected(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    protocol: asyncio.BaseProtocol,
    shaken: asyncio.Future[None],
    read_bytes: int | None = None,
) -> None:
    """Run ``protocol`` on an accepted socket until ``shaken`` is done. Raises OSError when the
    connection or its handshake fails. ``read_bytes``: the most that one turn of the loop reads."""
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock)
    except BaseException:
        sock.close()
        raise
    if read_bytes is not None:
        transport.max_size = read_bytes  # type: ignore[attr-defined] # before its first read
    try:
        await shaken
    except BaseException:
        transport.abort()
        raise
