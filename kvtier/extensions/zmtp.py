"""ZMTP: ZeroMQ's protocol (RFC 23, version 3.0) on asyncio's streams, as far as KV events need it.

libzmq bounds the bytes of a frame and not the frames of a message, so any process that reaches one
of its sockets can fill its memory. Here a message is bounded in bytes, frames and time before any
of it is kept, and what is written waits until the other end has read. Mechanism NULL: there is no
password and no encryption.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from kvtier.core.deadline import NEXT_ADDRESS_S

GREETING_S = 3.0
"""Longest time from the connection to the end of the handshake."""
_MESSAGE_S = 30.0
"""Longest time from the first byte of a message to its last."""
_PIECE_BYTES = 64 << 10
"""Bytes that are read at once."""
_TURN_FRAMES = 16
"""Frames that are read before others on the loop have their turn."""
_MOST_FRAMES = 8
_COMMAND_BYTES = 1024
_GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_PING, _PONG, _READY = b"\x04PING", b"\x04PONG", b"\x05READY"
_SUBSCRIBE, _CANCEL = b"\x09SUBSCRIBE", b"\x06CANCEL"


class ZmtpError(Exception):
    """The other end does not speak the protocol, or sends more than is read."""


class Peer:
    """One connection. ``most``: a message's bytes. One task reads, any task of the loop writes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int
    ) -> None:
        self._reader, self._writer, self._most = reader, writer, most
        self._frames = 0
        self.heard_at = asyncio.get_running_loop().time()

    async def greet(self, own: str, others: Sequence[str]) -> None:
        """Shake hands. ``own``: our type of socket. ``others``: the types that the other end may
        have. Raises ZmtpError, OSError, and TimeoutError after :data:`GREETING_S`."""
        async with asyncio.timeout(GREETING_S):
            self._writer.write(_GREETING)
            theirs = await self._exactly(len(_GREETING))
            if theirs[0] != 0xFF or theirs[9] != 0x7F or theirs[10] < 3:
                raise ZmtpError("not ZeroMQ 3.0 or newer")
            if theirs[12:32] != _GREETING[12:32]:
                raise ZmtpError(f"mechanism {bytes(theirs[12:32])!r}, expected NULL")
            self._command(_READY + _property("Socket-Type", own) + _property("Identity", ""))
            flags, body = await self._frame(_COMMAND_BYTES)
            if not flags & _COMMAND or not body.startswith(_READY):
                raise ZmtpError("no READY")
            if (kind := _properties(body[len(_READY) :]).get("socket-type")) not in others:
                raise ZmtpError(f"a socket of type {kind!r}, expected {' or '.join(others)}")

    async def receive(self) -> list[bytearray]:
        """Read the next message's frames. A subscription by a command becomes the message that
        older libraries send. Raises ZmtpError, OSError, and TimeoutError for a message without
        end."""
        flags, frame = await self._frame(self._most)
        while flags & _COMMAND:
            if subscription := await self._commanded(frame):
                return [subscription]
            flags, frame = await self._frame(self._most)
        frames, left = [frame], self._most - len(frame)
        async with asyncio.timeout(_MESSAGE_S):
            while flags & _MORE:
                if len(frames) == _MOST_FRAMES:
                    raise ZmtpError(f"a message of more than {_MOST_FRAMES} frames")
                flags, frame = await self._frame(left)
                if flags & _COMMAND:
                    raise ZmtpError("a command inside of a message")
                left -= len(frame)
                frames.append(frame)
        return frames

    async def send(self, frames: Sequence[bytes]) -> None:
        """Write a message, and wait until nearly all is with the other end. Raises OSError."""
        flags = [_MORE] * (len(frames) - 1) + [0]
        self._writer.write(b"".join(map(_framed, flags, frames)))
        await self._writer.drain()

    async def ping(self) -> None:
        """Ask for a sign of life. ZeroMQ libraries answer by themselves. Raises OSError."""
        self._command(_PING + bytes(2))
        await self._writer.drain()

    def close(self) -> None:
        """Drop the connection, with what was not written yet."""
        self._writer.transport.abort()

    # ---- frames ----------------------------------------------------------------------------------

    async def _commanded(self, body: bytearray) -> bytearray | None:
        if body.startswith(_PING):
            self._command(_PONG + body[len(_PING) + 2 : len(_PING) + 18])
            await self._writer.drain()
        if body.startswith(_SUBSCRIBE):
            return bytearray(b"\x01") + body[len(_SUBSCRIBE) :]
        if body.startswith(_CANCEL):
            return bytearray(b"\x00") + body[len(_CANCEL) :]
        return None

    async def _frame(self, most: int) -> tuple[int, bytearray]:
        """Read a frame's flags and body. A body of more than ``most`` bytes, or a command of more
        than :data:`_COMMAND_BYTES`, is refused before it is read."""
        self._frames += 1
        if self._frames % _TURN_FRAMES == 0:
            await asyncio.sleep(0)
        flags = (await self._exactly(1))[0]
        async with asyncio.timeout(_MESSAGE_S):
            size = int.from_bytes(await self._exactly(8 if flags & _LONG else 1), "big")
            if flags & _COMMAND and size > _COMMAND_BYTES:
                raise ZmtpError(f"a command of more than {_COMMAND_BYTES:,} bytes")
            if size > most:
                raise ZmtpError(f"a message of more than {self._most:,} bytes")
            return flags, await self._exactly(size)

    async def _exactly(self, size: int) -> bytearray:
        """Read ``size`` bytes, in pieces, so that a long frame is not copied at once."""
        found = bytearray()
        while len(found) < size:
            piece = await self._reader.read(min(_PIECE_BYTES, size - len(found)))
            if not piece:
                raise ConnectionResetError("the connection has ended")
            found += piece
            self.heard_at = asyncio.get_running_loop().time()
            if size > _PIECE_BYTES:
                await asyncio.sleep(0)
        return found

    def _command(self, body: bytes | bytearray) -> None:
        self._writer.write(_framed(_COMMAND, body))


async def connected(endpoint: str, most: int) -> Peer:
    """Connect to ``tcp://host:port`` or ``ipc:///path``, without the handshake. Raises OSError, and
    TimeoutError after :data:`GREETING_S`."""
    async with asyncio.timeout(GREETING_S):
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            streams = await asyncio.open_unix_connection(path, limit=_PIECE_BYTES)
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            streams = await asyncio.open_connection(
                host.strip("[]"), int(port), limit=_PIECE_BYTES, happy_eyeballs_delay=NEXT_ADDRESS_S
            )
    return Peer(*streams, most)


async def accepted_peer(sock: socket.socket, most: int) -> Peer:
    """Make the peer of an accepted client, without the handshake. Raises OSError."""
    if sock.family == socket.AF_UNIX:
        streams = await asyncio.open_unix_connection(sock=sock, limit=_COMMAND_BYTES)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)
        streams = await asyncio.open_connection(sock=sock, limit=_COMMAND_BYTES)
    return Peer(*streams, most)


def _framed(flags: int, body: bytes | bytearray) -> bytes:
    is_long = len(body) > 255
    size = len(body).to_bytes(8 if is_long else 1, "big")
    return bytes([flags | (_LONG if is_long else 0)]) + size + body


def _property(name: str, value: str) -> bytes:
    return bytes([len(name)]) + name.encode() + len(value).to_bytes(4, "big") + value.encode()


def _properties(body: bytearray) -> dict[str, str]:
    """Parse a READY's properties, by names in small letters. Raises ZmtpError."""
    found, at = {}, 0
    while at < len(body):
        name = body[at + 1 : at + 1 + body[at]]
        at += 1 + len(name)
        size = int.from_bytes(body[at : at + 4], "big")
        at += 4 + size
        if at > len(body):
            raise ZmtpError("no READY")
        found[name.decode("ascii", "replace").lower()] = body[at - size : at].decode(
            "ascii", "replace"
        )
    return found
