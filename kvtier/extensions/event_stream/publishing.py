"""Publishing: a server's own stream of KV events, by ZeroMQ, as vLLM's publisher writes it.

Messages are numbered from 0. Each subscriber, and each replay, goes along the last of them at its
own speed. A subscriber that is slower than they leave loses events: the server never waits for one.
Subscribers are not trusted: what comes in is subscriptions and numbers of a few bytes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from kvtier.client.connect import Address
from kvtier.config.values import parse_stream
from kvtier.core.deadline import listening
from kvtier.core.errors import ConfigError
from kvtier.extensions import zmtp
from kvtier.extensions.event_stream.announced import Announced
from kvtier.protocol.kv_events import AllBlocksCleared, Event
from kvtier.server.extension import ServerExtension, running
from kvtier.server.listeners import Listener, listen_unix
from kvtier.server.strangers import LogLimit, accepted

if TYPE_CHECKING:
    from kvtier.config.keys import Config
    from kvtier.config.values import Stream
    from kvtier.server.server import Server

logger = logging.getLogger("kvtier.server")
_strangers = logging.getLogger("kvtier.server.publishing")
"""Logger for faults that subscribers cause, with a limit."""
_strangers.addFilter(LogLimit(10, 10.0))

_LOOK_S = 0.05
"""Interval at which evicted chunks are looked for."""
_MESSAGE_BYTES = 64 << 10
"""Size at which a message is sent. Smaller ones hold all events of one turn of the loop."""
_KEPT_MESSAGES, _KEPT_BYTES = 10_000, 64 << 20
"""Messages that are kept for subscribers that are slow, come late or missed some."""
_REQUEST_BYTES = 1024
_MOST_CLIENTS = 64
"""Connections at one endpoint."""
_TURN_MESSAGES = 8
"""Messages that are sent to one client before others have their turn."""
_PATIENCE_S = 10.0
"""Longest time for one message of a replay."""
_LINGER_S = 0.1
_END_OF_REPLAY = (2**64 - 1).to_bytes(8, "big")
_pack = msgspec.msgpack.Encoder().encode


def beside_server(config: Config) -> Publisher | None:
    return Publisher(parse_stream(config.server.events)) if config.server.events else None


class Publisher(ServerExtension):
    """A server's stream of KV events, listening at once. Raises ConfigError if it cannot."""

    def __init__(self, stream: Stream) -> None:
        self.announced = Announced(self._add)
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._number = self._kept_bytes = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._news = asyncio.Event()
        """Event of the next message: set, and replaced by a new one, when it is sent."""
        self._over = False
        self._loop: asyncio.AbstractEventLoop
        self._doors: list[_Door] = []
        try:
            self._listen(stream.endpoint, self._subscriber)
            if stream.replay:
                self._listen(stream.replay, self._replays)
        except BaseException:
            self.close()
            raise

    def _listen(self, endpoint: str, serve: Callable[[zmtp.Peer], Awaitable[None]]) -> None:
        try:
            if endpoint.startswith("ipc://"):
                listener = listen_unix(Address(endpoint.removeprefix("ipc://"), "", 0))
            else:
                address = Address.parse(endpoint)
                sock = listening(address.host, address.port, _MOST_CLIENTS)
                listener = Listener(sock, address, None, False, sock.close)
        except (ConfigError, OSError) as error:
            raise ConfigError(
                f"server_events: cannot listen at {endpoint}: {error}; give "
                "ipc:///run/kvtier/events, or a free port and an address of this host in numbers"
            ) from error
        self._doors.append(_Door(listener, serve))
        if not listener.local:
            logger.warning(
                "server_events=%s: every process that reaches it reads the tokens and cache salts "
                "of all prompts, in clear, on loopback too; ipc:///run/kvtier/events is for this "
                "user alone",
                endpoint,
            )

    def close(self) -> None:
        for door in self._doors:
            door.listener.close()

    @asynccontextmanager
    async def beside(self, server: Server) -> AsyncIterator[None]:
        """Publish. The first and the last event say that no block is held."""
        server.announced = self.announced
        self._loop = server.loop
        self._add(AllBlocksCleared())
        try:
            async with running(*(door.open() for door in self._doors)):
                try:
                    async with running(self._follow(server)):
                        yield
                finally:
                    self._add(AllBlocksCleared())
                    self._send()
                    self._over = True
                    if any(door.clients for door in self._doors):
                        await asyncio.sleep(_LINGER_S)
        finally:
            self.close()

    async def _follow(self, server: Server) -> None:
        ignored = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            stores = list(server.stores.values())
            for steps in (self.announced.without(stores), self.announced.following()):
                for _ in steps:
                    await asyncio.sleep(0)
            if self.announced.ignored and not ignored:
                logger.warning(
                    "not every chunk is published: another model or tenant was first, or there are "
                    "too many"
                )
            ignored = self.announced.ignored

    # ---- messages --------------------------------------------------------------------------------

    def _add(self, event: Event) -> None:
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.append(_pack(event))
        self._waiting_bytes += len(self._waiting[-1])
        if self._waiting_bytes >= _MESSAGE_BYTES:
            self._send()

    def _send(self) -> None:
        if not self._waiting or self._over:
            return
        payload = _pack((time.time(), [msgspec.Raw(event) for event in self._waiting], 0))
        self._waiting, self._waiting_bytes = [], 0
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)
        self._number += 1
        while len(self._kept) > _KEPT_MESSAGES or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._news.set()
        self._news = asyncio.Event()

    # ---- clients ---------------------------------------------------------------------------------

    async def _subscriber(self, peer: zmtp.Peer) -> None:
        """Send every message to a subscriber, whatever its topic: vLLM's messages have none."""
        await peer.greet("PUB", ("SUB", "XSUB"))
        subscriptions, sending = 0, None
        try:
            while True:
                (said, *_) = await peer.receive()
                if bytes(said) in (b"\x01", b"\x00"):
                    subscriptions = max(0, subscriptions + (1 if said[0] else -1))
                if subscriptions and sending is None:
                    sending = self._loop.create_task(self._forever(peer))
                elif sending is not None and not subscriptions:
                    await _stopped(sending)
                    sending = None
        finally:
            if sending is not None:
                await _stopped(sending)

    async def _forever(self, peer: zmtp.Peer) -> None:
        number = self._number
        while True:
            news = self._news
            number = await self._messages(peer, number, ())
            await news.wait()

    async def _replays(self, peer: zmtp.Peer) -> None:
        await peer.greet("ROUTER", ("DEALER", "REQ"))
        while True:
            *_, begin = await peer.receive()
            if len(begin) == len(_END_OF_REPLAY):
                await self._messages(peer, int.from_bytes(begin, "big"), (b"",))
                async with asyncio.timeout(_PATIENCE_S):
                    await peer.send([b"", b"", _END_OF_REPLAY, b""])

    async def _messages(self, peer: zmtp.Peer, number: int, before: tuple[bytes, ...]) -> int:
        """Send the kept messages from ``number`` on. Returns the number of the next one."""
        while number < self._number and self._kept:
            place = max(0, number - self._kept[0][0])
            found = list(islice(self._kept, place, place + _TURN_MESSAGES))
            for one, payload in found:
                async with asyncio.timeout(_PATIENCE_S if before else None):
                    await peer.send([*before, b"", one.to_bytes(8, "big"), payload])
            number = found[-1][0] + 1
            await asyncio.sleep(0)
        return self._number


class _Door:
    """One endpoint and its clients. On the loop."""

    def __init__(self, listener: Listener, serve: Callable[[zmtp.Peer], Awaitable[None]]) -> None:
        self.listener, self._serve = listener, serve
        self.clients: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for sock, _ in accepted(loop, self.listener.socket):
                if len(self.clients) >= _MOST_CLIENTS:
                    _strangers.warning(
                        "server_events: %s has its %d connections, and one more was refused",
                        self.listener.address,
                        _MOST_CLIENTS,
                    )
                    sock.close()
                    continue
                client = loop.create_task(self._client(sock))
                self.clients.add(client)
                client.add_done_callback(self.clients.discard)
        finally:
            for client in self.clients:
                client.cancel()
            await asyncio.gather(*self.clients, return_exceptions=True)

    async def _client(self, sock: socket.socket) -> None:
        try:
            peer = await zmtp.accepted_peer(sock, _REQUEST_BYTES)
        except OSError:
            sock.close()
            return
        try:
            await self._serve(peer)
        except (OSError, TimeoutError):
            pass  # it is gone, or does not move
        except zmtp.ZmtpError as error:
            _strangers.warning("server_events: a client of it was sent away: %s", error)
        except Exception:
            logger.exception("a bug: a client of the event stream was sent away")
        finally:
            peer.close()


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
