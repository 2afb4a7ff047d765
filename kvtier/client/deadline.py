"""Deadline: one bound in time for several calls on one blocking socket.

A socket's own timeout starts anew with every byte that moves. So a peer that gives one byte a
second could hold a thread for as long as it likes.
"""

from __future__ import annotations

import socket
import time


class Deadline:
    """It is ``seconds`` from now. Not thread-safe: only the thread that uses the socket may call
    it."""

    __slots__ = ("_seconds", "_until")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """How many seconds are left, always more than 0. Raises TimeoutError when none are left."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done within {self._seconds:.3g} s")
        return left

    def receive(self, sock: socket.socket, into: memoryview) -> int:
        """What ``recv_into`` does. Raises OSError, and ConnectionResetError when the other side has
        closed the connection."""
        sock.settimeout(self.left())
        count = sock.recv_into(into)
        if not count:
            raise ConnectionResetError("it closed the connection")
        return count

    def send(self, sock: socket.socket, data: bytes | memoryview) -> None:
        """What ``sendall`` does, with one deadline for all TLS records. Raises OSError."""
        rest = memoryview(data)
        while rest:
            sock.settimeout(self.left())
            rest = rest[sock.send(rest) :]
