"""Inbox: the messages in the bytes that a socket gives. Sans-I/O: it has no socket."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvtier.protocol.wire import HEADER_BYTES, MAX_FRAME_BYTES, WireError

_ROOM_BYTES = 64 * 1024
T = TypeVar("T")


class Inbox(Generic[T]):
    """Turns a socket's bytes into messages of one union, as they come.

    Read into :meth:`room`, call :meth:`filled`, then :meth:`next` until it returns None. Keeps at
    most one frame of ``limit`` bytes and 64 KiB. Not thread-safe."""

    def __init__(self, union: Any, limit: int = MAX_FRAME_BYTES) -> None:
        self.expect(union, limit)
        self._buffer = memoryview(bytearray(self._size))
        self._start = self._end = 0

    def expect(self, union: Any, limit: int = MAX_FRAME_BYTES) -> None:
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._limit = limit
        self._size = min(_ROOM_BYTES, HEADER_BYTES + limit)

    def room(self) -> memoryview:
        """Return room for the next bytes, never empty. Raises WireError if too many are unread."""
        need = self._needed()
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) != self._size:
                self._buffer = memoryview(bytearray(self._size))
        elif self._start + need > len(self._buffer) or self._end == len(self._buffer):
            self._make_room(need)
        return self._buffer[self._end :]

    def _make_room(self, need: int) -> None:
        kept = self._buffer[self._start : self._end]
        if len(kept) > self._limit + _ROOM_BYTES:
            raise WireError(
                f"{len(kept)} bytes of messages unread: it asks faster than it is answered"
            )
        if need > len(self._buffer) or len(kept) == len(self._buffer):
            self._buffer = memoryview(bytearray(max(need, len(kept) + _ROOM_BYTES)))
        self._buffer[: len(kept)] = kept
        self._start, self._end = 0, len(kept)

    def filled(self, count: int) -> None:
        self._end += count

    def next(self) -> T | None:
        """Return the next message, or None if bytes are missing. Unusable after a WireError."""
        need = self._needed()
        if self._end - self._start < need:
            return None
        body = self._buffer[self._start + HEADER_BYTES : self._start + need]
        self._start += need
        try:
            message: T = self._decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"malformed message: {error}") from None
        return message

    def drain(self, into: memoryview) -> int:
        """Move bytes that follow a frame ``into`` a chunk's memory. Returns how many."""
        count = min(self._end - self._start, len(into))
        into[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        return count

    def _needed(self) -> int:
        """Return the first frame's length, as far as known. Raises WireError if it is too long."""
        if self._end - self._start < HEADER_BYTES:
            return HEADER_BYTES
        length = int.from_bytes(self._buffer[self._start : self._start + HEADER_BYTES], "little")
        if length > self._limit:
            raise WireError(f"a frame of {length} bytes, expected at most {self._limit}")
        return HEADER_BYTES + length
