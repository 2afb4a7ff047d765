"""Deadline: one total bound in time for several calls on one blocking socket.

A socket's own timeout starts anew with every byte that moves, so a peer that gives one byte a
second holds a thread for as long as it likes.
"""

from __future__ import annotations

import socket
import time


class Deadline:
    """``seconds`` from now on. Not thread-safe: for the thread that uses the socket."""

    __slots__ = ("_seconds", "_until")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, more than 0. Raises TimeoutError when there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done within {self._seconds:.3g} s")
        return left

    def receive(self, sock: socket.socket, into: memoryview) -> int:
        """As ``recv_into``. Raises OSError, and ConnectionResetError at the end of the
        connection."""
        sock.settimeout(self.left())
        count = sock.recv_into(into)
        if not count:
            raise ConnectionResetError("it closed the connection")
        return count

    def send(self, sock: socket.socket, data: bytes | memoryview) -> None:
        """As ``sendall``, which would have a deadline of its own for each TLS record. Raises
        OSError."""
        rest = memoryview(data)
        while rest:
            sock.settimeout(self.left())
            rest = rest[sock.send(rest) :]
