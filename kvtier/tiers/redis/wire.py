"""Wire: Redis's protocol over one connection, for one call. Every reply has a bound in bytes, in
items and in time.

A reply's size is known before it is read: a broken server, or one of another protocol, costs a call
its time and nothing else. ``recv_into`` puts parts where they belong, without a copy.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.tiers.redis.errors import (
    MovedError,
    MovingError,
    ProtocolError,
    RedisError,
    RefusedError,
    WrongSizeError,
    login_error,
)

IN_FLIGHT_PARTS = 2
"""Parts under way at once: one travels while Redis works on the other."""

_LINE_BYTES = 512
_TURN_BYTES = 1 << 16
_LEAST_S = 0.001
_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_CODE = re.compile(rb"[A-Z]{2,20}")
_ADDRESS = re.compile(r"(.*):([0-9]{1,5})")
SLOTS = 16384
"""Slots of a cluster, each of which one node has."""
_SCAN_NAMES = 1000


Reply = Any
"""Reply of Redis: bytes, int, None, a list of them, or a :class:`RefusedError`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Most that a reply may have: ``size`` bytes, ``items`` in all lists, nested ``depth`` deep."""

    size: int
    items: int = 0
    depth: int = 0


SMALL = Bounds(4096)
INFO = Bounds(1 << 20)
SCANNED = Bounds(16 << 20, 100_000, 2)


class Wire:
    """One connection, for one call. Not thread-safe: one owner.

    Args:
        connection: a connected socket. The owner closes it when a method raised anything.
        timeout_s: time for all that the call does. A transfer may wait once more as long for its
            last bytes.
        secrets: never shown in an error, whatever the server says."""

    def __init__(
        self, connection: socket.socket, timeout_s: float, secrets: Sequence[str] = ()
    ) -> None:
        self._socket, self._secrets = connection, secrets
        self._timeout_s = max(_LEAST_S, timeout_s)
        self._scratch = memoryview(bytearray(_LINE_BYTES))
        self.renew()

    def renew(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        self._socket.settimeout(self._timeout_s)

    def share(self, other: Wire) -> None:
        """Make this call a part of ``other``, with its deadline."""
        self._deadline = other._deadline

    @property
    def late(self) -> bool:
        """Whether half of the call's time is gone."""
        return self._deadline - time.monotonic() < self._timeout_s / 2

    def ask(self, commands: Iterable[tuple[Any, ...]], bounds: Bounds = SMALL) -> list[Reply]:
        """Send small commands together. Returns replies within ``bounds``, errors as values. Raises
        FAULTS: SetupError and MovingError among them."""
        listed = list(commands)
        self._socket.settimeout(self._left())
        self._socket.sendall(b"".join(map(_packed, listed)))
        replies = _Replies(self, bounds)
        told = [self._checked(replies.next()) for _ in listed]
        replies.end()
        return told

    def put(
        self, items: Iterable[tuple[bytes, memoryview]], ttl_ms: int | None
    ) -> RefusedError | None:
        """SET every name to its bytes, :data:`IN_FLIGHT_PARTS` at a time, drawing from ``items``
        meanwhile. Returns the server's first refusal, after which nothing is sent."""
        self._socket.settimeout(self._left())
        refusal: RefusedError | None = None
        waiting = 0
        head = b"*3\r\n" if ttl_ms is None else b"*5\r\n"
        tail = (
            b"\r\n"
            if ttl_ms is None
            else b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms)
        )
        for name, data in items:
            start = b"%s$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (head, len(name), name, data.nbytes)
            self._send((start, data, tail))
            waiting += 1
            if waiting == IN_FLIGHT_PARTS:
                refusal, waiting = self._acknowledged(), waiting - 1
                self._left()
            if refusal is not None:
                break
        for _ in range(waiting):
            refusal = self._acknowledged() or refusal
        return refusal

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> Generator[memoryview]:
        """GET every name straight into its memory, :data:`IN_FLIGHT_PARTS` at a time. Yields each
        memory.

        Ends early at the first missing name. What follows in ``into`` is undefined then. Raises
        WrongSizeError for a value of another size, RefusedError for a refusal, FAULTS."""
        self._socket.settimeout(self._left())
        commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names]
        sent = min(IN_FLIGHT_PARTS, len(commands))
        clean = False
        try:
            self._socket.sendall(b"".join(commands[:sent]))
            for index, memory in enumerate(into):
                if not self._receive(memory):
                    for expected in into[index + 1 : sent]:
                        self._receive(expected)
                    break
                if sent < len(commands):
                    self._socket.sendall(commands[sent])
                    sent += 1
                if index + 1 == len(into):
                    clean = True
                yield memory
            clean = True
        finally:
            if not clean:  # replies may still be under way, and no other call must take them
                self._socket.close()

    def scan(self, pattern: bytes) -> Iterator[list[bytes]]:
        """Yield pages of this node's matching names, some twice. Each has a call's time."""
        cursor = b"0"
        while True:
            self.renew()
            cursor, names = self.page(cursor, pattern, _SCAN_NAMES)
            yield names
            if int(cursor) == 0:
                return

    def page(self, cursor: bytes, pattern: bytes, count: int) -> tuple[bytes, list[bytes]]:
        """Return the next cursor, and one page of names. Raises FAULTS."""
        (answer,) = self.ask([("SCAN", cursor, "MATCH", pattern, "COUNT", count)], SCANNED)
        if isinstance(answer, RefusedError):
            raise RedisError(str(answer))
        match answer:
            case [bytes(cursor), [*names]]:
                if _NUMBER.fullmatch(cursor) and {*map(type, names)} <= {bytes}:
                    return cursor, names
        raise ProtocolError("the reply to SCAN is not a cursor and names")

    def fill(self, memory: memoryview) -> None:
        while memory.nbytes:
            got = self._socket.recv_into(memory)
            if not got:
                raise ConnectionResetError("Redis closed the connection")
            memory = memory[got:]
            if memory.nbytes:
                self._left()

    def some(self) -> bytes:
        self._socket.settimeout(self._left())
        if not (received := self._socket.recv(_TURN_BYTES)):
            raise ConnectionResetError("Redis closed the connection")
        return received

    def refusal(self, line: bytes) -> RefusedError:
        code = _CODE.match(line)
        text = line[:_LINE_BYTES].decode(errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return RefusedError(code[0].decode() if code else "ERR", re.sub(r"[^ -~]", "?", text)[:200])

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the call takes longer than the time allowed")
        return max(left, _LEAST_S)

    def _checked(self, reply: Reply) -> Reply:
        if not isinstance(reply, RefusedError):
            return reply
        words = str(reply).split(" ")
        match reply.code:
            case "NOAUTH" | "WRONGPASS":
                raise login_error(reply)
            case "MOVED":
                raise _moved(words)
            case "ASK" | "TRYAGAIN":
                raise MovingError("these names move to another node of the cluster now")
            case "CLUSTERDOWN" | "MASTERDOWN" | "LOADING":
                raise RedisError(str(reply))
        return reply

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send all pieces at once: waking Redis for each would cost a lane a third more."""
        if isinstance(self._socket, ssl.SSLSocket):
            for piece in pieces:
                self._socket.sendall(piece)
            return
        sent = self._socket.sendmsg(pieces)
        for piece in pieces:
            if sent < len(piece):
                self._socket.sendall(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))

    def _acknowledged(self) -> RefusedError | None:
        """Return the reply to SET: None, or the server's refusal."""
        self.fill(self._scratch[:5])
        if bytes(self._scratch[:5]) == b"+OK\r\n":
            return None
        line = self._line(5)
        if not line.startswith(b"-"):
            raise ProtocolError("the reply to SET is neither OK nor an error")
        reply = self._checked(self.refusal(line[1:-2]))
        assert isinstance(reply, RefusedError)
        return reply

    def _receive(self, memory: memoryview) -> bool:
        """Receive one GET's reply into ``memory``. Returns False when the name does not exist.

        The first four bytes, which every reply has, tell whether it is the expected one."""
        expected = b"$%d\r\n" % memory.nbytes
        line = self._scratch[: len(expected)]
        self.fill(line[:4])
        if line[:4] != expected[:4]:
            return self._unexpected(4)
        self.fill(line[4:])
        if line != expected:
            raise WrongSizeError(f"expected a value of {memory.nbytes} bytes")
        self.fill(memory)
        self.fill(line[:2])
        if bytes(line[:2]) != b"\r\n":
            raise WrongSizeError(f"a value is longer than {memory.nbytes} bytes")
        return True

    def _unexpected(self, have: int) -> bool:
        """Return False for a name that does not exist. Raises for any other unexpected reply."""
        line = self._line(have)
        if line == b"$-1\r\n":
            return False
        if line.startswith(b"-"):
            raise RedisError(str(self._checked(self.refusal(line[1:-2]))))
        raise WrongSizeError("not a value of the size expected")

    def _line(self, have: int) -> bytes:
        """Return a reply's first line, of which ``have`` bytes are there. A long one is cut."""
        while bytes(self._scratch[have - 2 : have]) != b"\r\n" and have < _LINE_BYTES:
            self._left()
            self.fill(self._scratch[have : have + 1])
            have += 1
        return bytes(self._scratch[:have])


class _Replies:
    def __init__(self, wire: Wire, bounds: Bounds) -> None:
        self._wire, self._bounds = wire, bounds
        self._buffer = bytearray()
        self._at = 0
        self._size = self._items = 0

    def next(self) -> Reply:
        """Return the next reply. Raises ProtocolError for another thing, or beyond the bounds."""
        del self._buffer[: self._at]
        self._at, self._size, self._items = 0, self._bounds.size, self._bounds.items
        return self._reply(self._bounds.depth)

    def end(self) -> None:
        """Raise ProtocolError where more came than was asked for."""
        if self._at < len(self._buffer):
            raise ProtocolError("the server says more than it was asked")

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return rest
            case b"-":
                return self._wire.refusal(rest)
            case b":":
                return _number(rest)
            case b"$":
                return self._bulk(_number(rest))
            case b"*":
                return self._list(_number(rest), depth)
        raise ProtocolError("the server does not speak Redis's protocol")

    def _bulk(self, size: int) -> bytes | None:
        if size == -1:
            return None
        self._spend(size)
        while len(self._buffer) - self._at < size + 2:
            self._buffer += self._wire.some()
        end = self._at + size
        found, ending = bytes(self._buffer[self._at : end]), self._buffer[end : end + 2]
        if ending != b"\r\n":
            raise ProtocolError("a value is longer than it says")
        self._at = end + 2
        return found

    def _list(self, count: int, depth: int) -> list[Reply] | None:
        if count == -1:
            return None
        self._items -= count
        if count < 0 or self._items < 0 or depth < 1:
            raise ProtocolError(
                f"the server announces a list of {count} items where none of that size is expected"
            )
        return [self._reply(depth - 1) for _ in range(count)]

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._at, self._at + _LINE_BYTES)) < 0:
            if len(self._buffer) - self._at >= _LINE_BYTES:
                raise ProtocolError(f"a line is longer than {_LINE_BYTES} bytes")
            self._buffer += self._wire.some()
        line = bytes(self._buffer[self._at : end])
        self._spend(len(line) + 2)
        self._at = end + 2
        return line

    def _spend(self, size: int) -> None:
        self._size -= size
        if size < 0 or self._size < 0:
            raise ProtocolError(
                f"a reply is larger than {self._bounds.size} bytes, the most expected"
            )


def _number(text: bytes) -> int:
    if not _NUMBER.fullmatch(text):
        raise ProtocolError("a number in a reply is none")
    return int(text)


def _packed(command: tuple[Any, ...]) -> bytes:
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%s\r\n" % (len(word), word) for word in words
    )


def _moved(words: Sequence[str]) -> MovedError:
    if len(words) != 3 or not words[1].isdigit() or int(words[1]) >= SLOTS:
        return MovedError(0, None)
    found = _ADDRESS.fullmatch(words[2])
    return MovedError(
        int(words[1]), (found[1].strip("[]"), int(found[2])) if found and found[1] else None
    )
