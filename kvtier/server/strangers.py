"""Strangers: what connections may cost a port before they have shown who they are.

*Places.* Connections that say nothing have few places, apart from those of engines that were let
in. When they are full, the oldest one of the address that has the most leaves at once: a flood of
silent sockets costs an engine at most a second attempt.

*Turns.* One TLS handshake takes milliseconds of the loop that serves all engines. The handshakes of
a port take about a tenth of it. A socket has its turn after its client has sent something: until
then OpenSSL knows nothing of it. Addresses take turns among themselves, and of one address the
client that came last goes first, because in a flood the others will soon give up.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from hashlib import sha256
from typing import Any, Generic, TypeVar

from kvtier.core.secret_files import peer_pid

_NETWORK_BITS = 64
STRANGERS_S = 0.002
"""Pause between two connections of a port that other hosts or users reach. Each takes a quarter of
a millisecond of the loop, whatever comes of it. Those that come meanwhile wait in the kernel."""
_FAILED_ACCEPT_PAUSE_S = 0.1
PLACES = 64
ONE_HOSTS_PLACES = 16
"""Places of one IPv4 address or IPv6 network of 64 bits: a host may have all addresses of it."""
_HANDSHAKE_S = 4.0
"""Longest TLS handshake, its wait for a turn included."""
_REST_FACTOR = 9
"""Length of a pause in lengths of the handshakes before it."""
_ANSWER_S = 0.005
"""Least pause between two turns: the loop answers the client in it, so that its cost is known."""
_MOST_WAITING_BYTES = 32 << 10
"""Most bytes that a client sends before its turn. A first message has at most 16 KiB."""
Work = Callable[[], object]
T = TypeVar("T")


def client_of(transport: asyncio.BaseTransport, sock: socket.socket) -> str:
    """Name the client by what it cannot choose: its certificate, else its address, and on a Unix
    socket its process."""
    if sock.family == socket.AF_UNIX:
        return f"process {peer_pid(sock)}"
    tls = transport.get_extra_info("ssl_object")
    shown = None if tls is None else tls.getpeercert(binary_form=True)
    if shown:
        return f"certificate {sha256(shown).hexdigest()[:16]}"
    peer = transport.get_extra_info("peername")
    return f"address {origin_of(peer[0]) if peer else ''}"


def origin_of(address: str) -> str:
    """Return the part of an address that one host cannot choose."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), _NETWORK_BITS), strict=False))


async def accepted(
    loop: asyncio.AbstractEventLoop,
    listening: socket.socket,
    failed: Callable[[OSError], object] = lambda _: None,
    pause_s: float = STRANGERS_S,
) -> AsyncIterator[tuple[socket.socket, Any]]:
    """Accept connections until the task is cancelled: socket and address of each. ``failed`` is
    told why one could not be accepted, such as that no descriptors are left."""
    while True:
        try:
            connection = await loop.sock_accept(listening)
        except OSError as error:
            failed(error)
            await asyncio.sleep(_FAILED_ACCEPT_PAUSE_S)
            continue
        yield connection
        # sock_accept does not yield to the loop while clients are queued
        await asyncio.sleep(pause_s)


class Handshakes(Generic[T]):
    """Connections that have not said who they are, oldest first. Not thread-safe."""

    def __init__(self, places: int = PLACES, places_of_one: int = ONE_HOSTS_PLACES) -> None:
        self._places = places
        self._places_of_one = places_of_one
        self._under_way: dict[T, str] = {}

    def __contains__(self, one: T) -> bool:
        return one in self._under_way

    def enter(self, one: T, address: str) -> T | None:
        """Give ``one`` a place. Returns the connection that must leave for it, or None."""
        origin = origin_of(address)
        counts = Counter(self._under_way.values())
        if counts[origin] >= self._places_of_one:
            leaves = self._oldest(origin)
        elif len(self._under_way) >= self._places:
            leaves = self._oldest(counts.most_common(1)[0][0])
        else:
            leaves = None
        self._under_way[one] = origin
        return leaves

    def leave(self, one: T) -> None:
        """Free the place. Without effect the second time."""
        self._under_way.pop(one, None)

    def _oldest(self, origin: str) -> T:
        oldest = next(one for one, its in self._under_way.items() if its == origin)
        del self._under_way[oldest]
        return oldest


class Turns:
    """Turns of one port's handshakes, on ``loop``. ``cpu``: processor seconds of this thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self.loop, self._cpu = loop, cpu
        self._waiting: dict[str, list[Work]] = {}
        """Waiting handshakes by address. The address that had no turn for longest comes first."""
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
        when the connection or its handshake fails."""
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
        """Wait for ``least_bytes`` or the client's end. False if ``waiting`` ends before that."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_bytes)
        self.loop.add_reader(sock, _end, waiting, True)
        try:
            return await waiting
        finally:
            self.loop.remove_reader(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def wait(self, origin: str, work: Work) -> None:
        self._waiting.setdefault(origin, []).append(work)
        if not self._rests:
            self._next()

    def leave(self, origin: str, work: Work) -> None:
        """Stop waiting for a turn. Without effect after it."""
        works = self._waiting.get(origin, [])
        if work in works:
            works.remove(work)
        if not works:
            self._waiting.pop(origin, None)

    def charge(self, work: Work) -> None:
        """Do ``work``, and delay the next turns in proportion to its time."""
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
            rest_s, self._spent_s = max(_REST_FACTOR * self._spent_s, _ANSWER_S), 0.0
            self.loop.call_later(rest_s, self._next)


def _end(waiting: asyncio.Future[bool], result: bool) -> None:
    if not waiting.done():
        waiting.set_result(result)


_AGAIN_S = 600.0
_KEPT_TEXTS = 64


class LogLimit(logging.Filter):
    """Filter that passes at most ``lines`` records in ``seconds``, each cut to ``letters`` and
    without a traceback, and of equal ones one in ``again_s``. A record after an omission says how
    many were left out. Any thread."""

    def __init__(
        self,
        lines: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        letters: int = 300,
        again_s: float = _AGAIN_S,
    ) -> None:
        super().__init__()
        self._seconds, self._clock, self._letters = seconds, clock, letters
        self._again_s = again_s
        self._passed: deque[float] = deque(maxlen=lines)
        self._passed_at: dict[str, float] = {}
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        cause = record.exc_info[1] if record.exc_info else None
        said = f"{record.getMessage()}{f': {cause!r}' if cause is not None else ''}"[
            : self._letters
        ]
        is_many = len(self._passed) == self._passed.maxlen and now - self._passed[0] < self._seconds
        before = self._passed_at.get(said)
        if is_many or (before is not None and now - before < self._again_s):
            self._left_out += 1
            return False
        self._passed.append(now)
        self._passed_at.pop(said, None)
        self._passed_at[said] = now
        if len(self._passed_at) > _KEPT_TEXTS:
            del self._passed_at[next(iter(self._passed_at))]
        more = f" ({self._left_out} more such lines were left out)" if self._left_out else ""
        record.msg, record.args = f"{said}{more}", ()
        record.exc_info = record.exc_text = None
        self._left_out = 0
        return True
