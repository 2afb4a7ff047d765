"""Accepting: the connections of one listening socket. The only accept loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

STRANGERS_S = 0.002
"""The pause between two connections of a port that other hosts or users reach. Each takes a quarter
of a millisecond of the loop, whatever comes of it. Those that come meanwhile wait in the kernel."""
_PAUSE_S = 0.1
"""After a connection that could not be accepted: for example, no file descriptor was left."""


async def accepted(
    loop: asyncio.AbstractEventLoop,
    listening: socket.socket,
    failed: Callable[[OSError], None],
    pause_s: float = STRANGERS_S,
) -> AsyncIterator[tuple[socket.socket, Any]]:
    """Each connection with its address, until the task is cancelled. ``failed`` is told why one
    could not be accepted. ``pause_s``: between two of them."""
    while True:
        try:
            connection = await loop.sock_accept(listening)
        except OSError as error:
            failed(error)
            await asyncio.sleep(_PAUSE_S)
            continue
        yield connection
        # sock_accept does not let others run while clients are queued
        await asyncio.sleep(pause_s)
