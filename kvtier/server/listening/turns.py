"""TLS handshakes in turns. The asymmetric cryptography of one takes milliseconds of the loop that
serves all engines, and any client that reaches a port can ask for it.

The handshakes of a port take about a tenth of the loop's time. A socket has its turn after its
client has sent something, so silence takes no turns. Until then its bytes wait in the kernel, and
OpenSSL knows nothing of it. Addresses take turns among themselves, and of one address the client
that came last goes first: in a flood the others will soon give up.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

_HANDSHAKE_S = 4.0
"""The time for TLS, with its waiting."""
_REST = 9
"""After handshakes, pause this many times as long."""
_ANSWER_S = 0.005
"""From one turn to the next at least. Meanwhile the loop answers the client, and its cost shows."""
_MOST_WAITING_BYTES = 32 << 10
"""What a client may send before its turn. Its first message has at most 16 KiB."""
Work = Callable[[], object]


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
        charge = self.charge

        class Charged(ssl.SSLObject):
            def do_handshake(self) -> None:
                charge(super().do_handshake)

        self._charged = Charged

    async def greet(
        self,
        sock: socket.socket,
        protocol: asyncio.BaseProtocol,
        tls: ssl.SSLContext | None,
        origin: str,
    ) -> None:
        """Run ``protocol`` on an accepted socket, with ``tls`` after a handshake. Raises OSError
        when the connection or its handshake fails. ``origin``: the client's address."""
        try:
            if tls is None:
                await self.loop.connect_accepted_socket(lambda: protocol, sock)
                return
            async with asyncio.timeout(_HANDSHAKE_S):
                await self._turn(sock, origin)
                tls.sslobject_class = self._charged
                await self.loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
        except BaseException as error:
            sock.close()
            for each in (error, error.__cause__):
                if each is not None:  # its frames keep OpenSSL's memory until garbage is collected
                    each.__traceback__ = None
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no TLS handshake within {_HANDSHAKE_S:g} s") from None
            raise

    async def _turn(self, sock: socket.socket, origin: str) -> None:
        """Wait until the client has sent something, and then for its turn."""
        await self._readable(sock, 1, self.loop.create_future())
        if not sock.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError("it left before its handshake")
        turn: asyncio.Future[bool] = self.loop.create_future()
        begin = partial(_end, turn, False)
        self.wait(origin, begin)
        try:
            if not await self._readable(sock, _MOST_WAITING_BYTES, turn):
                return
        finally:
            self.leave(origin, begin)
        if len(sock.recv(_MOST_WAITING_BYTES, socket.MSG_PEEK)) == _MOST_WAITING_BYTES:
            raise ConnectionAbortedError("it sends too much before its handshake")
        raise ConnectionResetError("it left before its handshake")

    async def _readable(
        self, sock: socket.socket, least_bytes: int, waiting: asyncio.Future[bool]
    ) -> bool:
        """Wait until so many bytes have come or the client has left. False: ``waiting`` ended
        before."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_bytes)
        self.loop.add_reader(sock, _end, waiting, True)
        try:
            return await waiting
        finally:
            self.loop.remove_reader(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

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
            rest_s, self._spent_s = max(_REST * self._spent_s, _ANSWER_S), 0.0
            self.loop.call_later(rest_s, self._next)


def _end(waiting: asyncio.Future[bool], result: bool) -> None:
    if not waiting.done():
        waiting.set_result(result)
