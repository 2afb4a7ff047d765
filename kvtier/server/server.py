"""The server: listens, keeps its connections and Stores, and ends in order. One loop thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.core.errors import ConfigError
from kvtier.core.secret_files import peer_uid
from kvtier.protocol import wire
from kvtier.server import strangers
from kvtier.server.connection import Connection
from kvtier.server.listeners import Listener
from kvtier.server.registry import SizeClasses
from kvtier.server.session import Publication
from kvtier.store.store import Store

logger = logging.getLogger("kvtier.server")

_MAX_CONNECTIONS = 512
"""Most connections through Unix sockets, and as many through TCP that were let in."""
_DRAIN_S = 2.0
_SETTLE_S = 1.0
_HITS_CHECKED_S = 60.0


class Server:
    """Server of Stores for any number of engines until :meth:`stop`. Create it and ``await`` its
    methods on one loop. ``open_store`` and ``discard``: see :class:`SizeClasses`. ``listeners``:
    closed by :meth:`stop`. ``token``: clients of ``needs_token`` listeners must prove that they
    know it."""

    def __init__(
        self,
        open_store: Callable[..., Store],
        listeners: Sequence[Listener],
        *,
        token: bytes | None = None,
        discard: Callable[[int], object] = lambda slot_bytes: None,
    ) -> None:
        if token is None and any(listener.needs_token for listener in listeners):
            raise ConfigError(
                "a listener asks for a token and the server has none: set server_token_file"
            )
        self.loop = asyncio.get_running_loop()
        self.clock = time.monotonic
        self.listeners = listeners
        self.token = token
        self.name = os.urandom(wire.TICKET_BYTES)
        """Name of this start, which no other start of a server has."""
        self.steered: dict[bytes, Connection] = {}
        """Engines with schedulers on other hosts, by the ticket with which workers here join."""
        self.size_classes = SizeClasses(open_store, self.call_soon, discard=discard)
        self.announced: Publication | None = None
        self.counts: Counter[str] = Counter()
        """Connections since the start, by ``accepted``, ``rejected``, ``dropped``, ``ended``."""
        self.connections: set[Connection] = set()
        self.handshakes: strangers.Handshakes[Connection] = strangers.Handshakes()
        self._turns = strangers.Turns(self.loop)
        self.lingering: set[Connection] = set()
        """Closed connections of engines of which some process still has the pool mapped."""
        self.started = time.monotonic()
        self._empty = asyncio.Event()
        self.ready = False
        self.trouble: dict[str, str] = {}
        """Troubles by subject, in words, without tiers' own. The admin port shows them."""
        self._tasks: list[asyncio.Task[None]] = []
        self._admitting: set[asyncio.Task[None]] = set()
        self._log_limit = strangers.LogLimit(10, 10.0, letters=1000)

    @property
    def stores(self) -> dict[int, Store]:
        return {size: size_class.store for size, size_class in self.size_classes.open.items()}

    async def prepare(self, slot_bytes: int | None, found: Sequence[int] = ()) -> None:
        """Open the Store of the configured slot size and touch its pool, and open those of the
        sizes ``found`` on the disk, so that no engine waits for that. Raises KVTierError when the
        configured size cannot be opened. Another size is tried again when an engine asks for it."""
        opened = {
            size: asyncio.wrap_future(one)
            for size, one in self.size_classes.prepare(slot_bytes, found).items()
        }
        await asyncio.shield(asyncio.gather(*opened.values(), return_exceptions=True))
        for size, future in opened.items():
            error = future.exception()
            if error is not None and size == slot_bytes:
                raise error
            if error is not None:
                logger.warning("chunks of %d bytes from before cannot be used: %s", size, error)
        if slot_bytes is not None:
            await asyncio.shield(asyncio.wrap_future(opened[slot_bytes].result().store.touched))
            logger.info("chunks of %d bytes: the pool and the tiers are ready", slot_bytes)

    async def start(self) -> None:
        self._tasks = [self.loop.create_task(self._accept(listener)) for listener in self.listeners]
        self._tasks += [
            self.loop.create_task(self._check_hits()),
            self.loop.create_task(self._settle()),
        ]
        self.ready = True
        logger.info(
            "serving at %s", ", ".join(str(listener.address) for listener in self.listeners)
        )

    async def stop(self, timeout_s: float = 20.0) -> bool:
        """Finish chunks on their way, close every connection, and write what is queued to the lower
        tiers. False if something was dropped."""
        self.ready = False
        for task in (*self._tasks, *self._admitting):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._admitting, return_exceptions=True)
        for listener in self.listeners:
            listener.close()
        await self._close_connections()
        for one in self.lingering:
            one.let_go()
        return self.size_classes.close(timeout_s)

    async def _close_connections(self) -> None:
        """Close connections, first those without a chunk being sent or received."""
        for close in (Connection.finish, Connection.close):
            for one in tuple(self.connections):
                close(one)
            if self.connections:
                self._empty.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._empty.wait(), _DRAIN_S)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` on the loop. Any thread. Without effect once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    async def _check_hits(self) -> None:
        while True:
            await asyncio.sleep(_HITS_CHECKED_S)
            for size_class in self.size_classes.open.values():
                size_class.check_hits()

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(_SETTLE_S)
            self.size_classes.settle()

    # ---- connections -----------------------------------------------------------------------------

    async def _accept(self, listener: Listener) -> None:
        def failed(error: OSError) -> None:
            self._log("cannot accept at %s: %s", listener.address, error)

        pause_s = 0.0 if listener.local else strangers.STRANGERS_S
        async for sock, peer in strangers.accepted(self.loop, listener.socket, failed, pause_s):
            self.counts["accepted"] += 1
            if not self._may_enter(listener, sock):
                self.counts["rejected"] += 1
                sock.close()
                continue
            one = Connection(self, listener, sock)
            self.connections.add(one)
            address = "" if listener.local else peer[0]
            if address:
                self._make_place(one, address)
            task = self.loop.create_task(self._admit(one, sock, address))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)

    def _may_enter(self, listener: Listener, sock: socket.socket) -> bool:
        local = listener.local
        there = [one for one in self.connections | self.lingering if one not in self.handshakes]
        taken = sum(one.listener.local == local for one in there)
        if taken >= _MAX_CONNECTIONS:
            self._log("%s: %d connections are open; one more was closed", listener.address, taken)
            return False
        if local and peer_uid(sock) not in (os.getuid(), 0):
            self._log(
                "%s: user %d may not attach, only user %d",
                listener.address,
                peer_uid(sock),
                os.getuid(),
            )
            return False
        return True

    def _make_place(self, one: Connection, address: str) -> None:
        oldest = self.handshakes.enter(one, address)
        if oldest is not None:
            self.counts["rejected"] += 1
            self._log(
                "%s: too many clients have not said who they are; the oldest was closed",
                one.listener.address,
            )
            oldest.cut()

    async def _admit(self, one: Connection, sock: socket.socket, address: str) -> None:
        listener = one.listener
        try:
            if not listener.local:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._turns.greet(sock, one, listener.tls, strangers.origin_of(address))
        except OSError as error:
            self._forget(one)
            if isinstance(error, ConnectionResetError):
                self.counts["ended"] += 1  # a probe of a port: it breaks no rule
            else:
                self.dropped(listener, f"no connection: {error}")

    def greeted(self, one: Connection) -> None:
        self.handshakes.leave(one)

    def closed(self, one: Connection) -> None:
        self.counts["ended"] += 1
        self._forget(one)
        if one.lingers:
            self.lingering.add(one)

    def _forget(self, one: Connection) -> None:
        self.connections.discard(one)
        self.handshakes.leave(one)
        if not self.connections:
            self._empty.set()

    def retired(self, one: Connection) -> None:
        self.lingering.discard(one)

    def dropped(self, listener: Listener, reason: str) -> None:
        self.counts["dropped"] += 1
        self._log("%s: dropped a connection: %s", listener.address, reason)

    def _log(self, text: str, *arguments: object) -> None:
        record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, text, arguments, None)
        if self._log_limit.filter(record):
            logger.handle(record)


Beside = Callable[[Server], contextlib.AbstractAsyncContextManager[None]]
"""Function whose context runs around a server, or only while it is ready."""


Sizes = tuple[int | None, Sequence[int]]
"""Arguments of :meth:`Server.prepare`."""


async def serve(
    make: Callable[[], Server], beside: Beside, ready: Beside, sizes: Sizes, timeout_s: float = 20.0
) -> bool:
    """Run a server until SIGTERM or SIGINT, then :meth:`Server.stop`. ``make`` is called on the
    loop.

    ``beside`` runs all the time, ``ready`` only while engines are let in. False if something was
    dropped at the end. Raises KVTierError when the server cannot start."""
    told = asyncio.Event()
    server = make()
    for number in (signal.SIGTERM, signal.SIGINT):
        server.loop.add_signal_handler(number, told.set)
    async with beside(server):
        telling = server.loop.create_task(told.wait())
        starting = server.loop.create_task(_start(server, sizes))
        try:
            await asyncio.wait({starting, telling}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                async with ready(server):
                    await telling
            logger.info("stopping")
        finally:
            telling.cancel()
            starting.cancel()
            await asyncio.gather(telling, starting, return_exceptions=True)
            clean = await server.stop(timeout_s)
        return clean


async def _start(server: Server, sizes: Sizes) -> None:
    await server.prepare(*sizes)
    gc.collect()
    # Freeze all objects of the start: no later collection walks over them while engines wait.
    gc.freeze()
    await server.start()
