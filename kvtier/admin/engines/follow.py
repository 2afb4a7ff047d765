"""Follow: the engines' event streams, by ZeroMQ.

A picture holds for one connection. When the connection ends, or its heartbeats stay out, the
picture is dropped, and made anew from the engine's replay buffer when the engine is there again. A
socket belongs to one connection, so no message of a dead engine is read later.

Messages are numbered. What is missing is asked for at the replay endpoint. Where there is none, or
it has not got it any more, the picture is dropped, and goes on with what comes next: it then knows
less than the engine has. The last messages of a burst can be missing without a sign. So a stream
that is quiet is asked, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvtier.admin.engines.followed import Followed
from kvtier.protocol import kv_events

logger = logging.getLogger("kvtier.admin.engines")

QUIET_S = 5.0
"""A stream that says nothing for so long is asked whether something is missing."""
_REPLY_S, _PAUSE_S = 2.0, 0.2
_HEARTBEAT_MS, _SILENT_MS = 1000, 3000
_WAITING, _LONGEST = 1000, 32 << 20
"""Messages that wait in a socket, and the bytes of one. vLLM publishes one for each step."""
_END = (2**64 - 1).to_bytes(8, "big")
"""The number behind the last message of a replay."""


@asynccontextmanager
async def following(engines: Sequence[Followed]) -> AsyncIterator[None]:
    """Follow them for as long as the context lasts."""
    context = zmq.asyncio.Context()
    tasks = [asyncio.create_task(_Follower(engine, context).run()) for engine in engines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


class _Follower:
    """``_next``: the number of the message that is to come. None: any."""

    def __init__(self, engine: Followed, context: zmq.asyncio.Context) -> None:
        self._engine, self._context = engine, context
        self._next: int | None = None
        self._warned = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with closing(self._socket(zmq.SUB)) as socket:
                await self._connection(socket)
            logger.warning("%s: its stream of KV events has ended", self._engine.name)
            await asyncio.sleep(_PAUSE_S)

    async def _connection(self, socket: Any) -> None:
        """One connection, from its beginning to its end."""
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        reading: asyncio.Task[None] | None = None
        try:
            socket.connect(self._engine.stream.endpoint)
            await _happens(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)
            reading = asyncio.create_task(self._read(socket))
            lost = asyncio.create_task(_happens(monitor, zmq.EVENT_DISCONNECTED))
            await asyncio.wait({reading, lost}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        except OSError:
            logger.exception("%s: its stream cannot be read", self._engine.name)
        finally:
            if reading is not None:
                reading.cancel()
                lost.cancel()
                await asyncio.gather(reading, lost, return_exceptions=True)
            self._engine.followed = False
            self._engine.drop()
            socket.disable_monitor()

    async def _read(self, socket: Any) -> None:
        replayed = self._engine.stream.replay is not None
        self._next = None
        if replayed:
            self._next = 0
            await self._catch_up()
        self._engine.followed = True
        logger.info("%s: its KV events are followed", self._engine.name)
        while True:
            if await socket.poll(QUIET_S * 1000 if replayed else None):
                await self._heard(await socket.recv_multipart())
            else:
                await self._catch_up()

    async def _heard(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._refuse("no message of vLLM's")
            return
        number = int.from_bytes(frames[1], "big")
        if self._next is not None and number > self._next:
            self._engine.counts["gap"] += 1
            await self._catch_up()
            if number > self._next:
                self._engine.drop()
        if self._next is None or number >= self._next:
            await self._apply(number, frames[2])

    async def _apply(self, number: int, payload: bytes) -> None:
        try:
            for _ in self._engine.picture.apply(kv_events.decode(payload)):
                await asyncio.sleep(0)
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            self._refuse(str(error))
        self._engine.counts["message"] += 1
        self._next = number + 1

    def _refuse(self, why: str) -> None:
        self._engine.counts["refused"] += 1
        self._engine.drop()
        logger.warning("%s: a message of its stream was refused: %.200s", self._engine.name, why)

    # ---- what was missed -------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Ask for all from the next message on, as long as something comes."""
        ended, begun = False, None
        while not ended and self._next != begun and self._engine.stream.replay is not None:
            begun = self._next
            with closing(self._socket(zmq.DEALER)) as socket:
                socket.connect(self._engine.stream.replay)
                await socket.send_multipart([b"", (self._next or 0).to_bytes(8, "big")])
                ended = await self._replay(socket)

    async def _replay(self, socket: Any) -> bool:
        """Whether the answer came to its end. What is too much for the sockets does not come."""
        first = True
        while await socket.poll(_REPLY_S * 1000):
            *_, numbered, payload = await socket.recv_multipart()
            if numbered == _END:
                return True
            number, next_ = int.from_bytes(numbered, "big"), self._next or 0
            if number < next_:
                continue
            if number > next_:
                if not first:
                    return False
                self._engine.drop()
            first = False
            await self._apply(number, payload)
        if first and not self._warned:
            logger.warning("%s: nobody answers at its replay endpoint", self._engine.name)
            self._warned = True
        return False

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        socket.setsockopt(zmq.IPV6, 1)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        return socket


async def _happens(monitor: Any, event: int) -> None:
    """Wait for this event of a socket."""
    while (await recv_monitor_message(monitor))["event"] != event:
        pass
