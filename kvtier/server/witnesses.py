"""Witnesses: pipes by which a server knows whether a process of an engine has its pool mapped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from kvtier.protocol import wire

_IDLE_S, _AGAIN_S, _TRIES = 20, 10, 3
"""Keep-alive's seconds and tries: a host gone without a word is noticed within a minute."""


class Witnesses:
    """Witnesses of one engine: pipes' read ends, whose write ends its processes hold. On the loop.
    ``closed``: called when one of them has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, closed: Callable[[], None]) -> None:
        self._loop, self._closed = loop, closed
        self._ends: set[int] = set()

    @property
    def open(self) -> int:
        return len(self._ends)

    def lend(self, sock: socket.socket, welcome: wire.Welcome, pool_descriptor: int) -> None:
        """Pass the descriptors of the pool and of a new witness with the first byte of the Welcome.
        Raises OSError and WireError when the other side does not take them."""
        frame = wire.frame(welcome)
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            sent = socket.send_fds(sock, [frame], [pool_descriptor, theirs])
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._ends.add(ours)
        self._loop.add_reader(ours, self._read, ours)
        if sent != len(frame):
            raise wire.WireError("it does not read its Welcome")

    def let_go(self) -> None:
        for end in tuple(self._ends):
            self._end(end)

    def _read(self, end: int) -> None:
        """End a witness at its end-of-file: no process has it open. Nobody should write to it."""
        with contextlib.suppress(BlockingIOError):
            if os.read(end, 4096):
                return
            self._end(end)
            self._closed()

    def _end(self, end: int) -> None:
        self._ends.discard(end)
        self._loop.remove_reader(end)
        os.close(end)


def notice_lost_hosts(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other host is gone without a word. Its slots would
    otherwise be held for hours."""
    if sock.family != socket.AF_UNIX:
        for option, value in (
            (socket.TCP_KEEPIDLE, _IDLE_S),
            (socket.TCP_KEEPINTVL, _AGAIN_S),
            (socket.TCP_KEEPCNT, _TRIES),
            (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_S + _AGAIN_S * _TRIES)),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
