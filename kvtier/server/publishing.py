"""Publishing: a server's own stream of KV events, by ZeroMQ, as vLLM's publisher writes it.

Messages are numbered from 0. The last of them are kept, tokens included, for subscribers that come
late or miss some. A subscriber that is slow or gone loses events, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from kvtier.core.errors import ConfigError
from kvtier.protocol.kv_events import AllBlocksCleared, Event
from kvtier.server.announced import Announced

if TYPE_CHECKING:
    from kvtier.config.streams import Stream
    from kvtier.server.server import Server

logger = logging.getLogger("kvtier.server")

_LOOK_S = 0.05
"""The interval at which is looked for chunks that have left."""
_MESSAGE_BYTES = 64 << 10
"""Events of one turn are one message, as long as it is shorter."""
_KEPT, _KEPT_BYTES = 10_000, 64 << 20
"""Messages for who missed some."""
_WAITING = 1000
"""Messages that wait for one subscriber."""
_REQUEST_BYTES = 1024
_PATIENCE_S = 1.0
"""A replay that does not move for so long ends."""
_HEARTBEAT_MS, _SILENT_MS, _LINGER_MS = 1000, 5000, 100
_END = (2**64 - 1).to_bytes(8, "big")
"""The number behind the last message of a replay."""
_pack = msgspec.msgpack.Encoder().encode


class Publisher:
    """Listens at once. Raises ConfigError when it cannot."""

    def __init__(self, stream: Stream) -> None:
        self.announced = Announced(self._add)
        self._context = zmq.Context()
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._number = self._kept_bytes = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._loop: asyncio.AbstractEventLoop
        try:
            self._socket = self._bound(zmq.PUB, stream.endpoint)
            self._asked = self._bound(zmq.ROUTER, stream.replay) if stream.replay else None
        except BaseException:
            self._context.destroy(linger=0)
            raise
        if not _is_local(stream.endpoint):
            logger.warning(
                "server_events=%s: whoever reaches it reads the tokens of all prompts, in clear",
                stream.endpoint,
            )

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.sndhwm = _WAITING
        socket.maxmsgsize = _REQUEST_BYTES
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _SILENT_MS
        socket.ipv6 = 1
        if kind == zmq.ROUTER:
            socket.router_mandatory = 1
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"server_events: cannot listen at {endpoint}: {error}; give a free port and an "
                "address of this host in numbers"
            ) from error
        return socket

    @asynccontextmanager
    async def publishing(self, server: Server) -> AsyncIterator[None]:
        """For as long as the context lasts. Subscribers are told at its begin and at its end that
        there is nothing."""
        server.announced = self.announced
        self._loop = server.loop
        self._add(AllBlocksCleared())
        tasks = [server.loop.create_task(self._follow(server))]
        if self._asked is not None:
            tasks.append(server.loop.create_task(self._answer(self._asked)))
        for task in tasks:
            task.add_done_callback(_ended)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._add(AllBlocksCleared())
            self._send()
            self._context.destroy(linger=_LINGER_MS)

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
        if not self._waiting or self._socket.closed:
            return
        payload = _pack((time.time(), [msgspec.Raw(event) for event in self._waiting], 0))
        self._waiting, self._waiting_bytes = [], 0
        self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload], zmq.DONTWAIT)
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)
        self._number += 1
        while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    # ---- replay ----------------------------------------------------------------------------------

    async def _answer(self, bound: Any) -> None:
        """One after the other."""
        socket: Any = zmq.asyncio.Socket.from_socket(bound)
        while True:
            client, *_, begin = await socket.recv_multipart()
            messages = [one for one in self._kept if one[0] >= int.from_bytes(begin[:8], "big")]
            for number, payload in messages:
                message = [client, b"", b"", number.to_bytes(8, "big"), payload]
                if not await self._moves(socket, message):
                    break
            else:
                await self._moves(socket, [client, b"", b"", _END, b""])

    async def _moves(self, socket: Any, message: list[bytes]) -> bool:
        """False: who asked is gone, or does not read."""
        for _ in range(100):
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await socket.send_multipart(message)
                return True
            except zmq.Again:
                await asyncio.sleep(_PATIENCE_S / 100)
            except (zmq.ZMQError, TimeoutError):
                return False
        return False


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a bug: KV events are not published", exc_info=task.exception())


def _is_local(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        return parts.scheme == "ipc" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
