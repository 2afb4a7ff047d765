"""Accepting: the connections of one listening socket. The only accept loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

_PAUSE_S = 0.1
"""After a connection that could not be accepted: for example, no file descriptor was left."""


async def accepted(
    loop: asyncio.AbstractEventLoop,
    listening: socket.socket,
    failed: Callable[[OSError], None],
) -> AsyncIterator[tuple[socket.socket, Any]]:
    """Each connection with its address, until the task is cancelled. ``failed`` is told why one
    could not be accepted."""
    while True:
        try:
            connection = await loop.sock_accept(listening)
        except OSError as error:
            failed(error)
            await asyncio.sleep(_PAUSE_S)
            continue
        yield connection
        # sock_accept does not let others run while clients are queued
        await asyncio.sleep(0)
