"""Tells systemd how the service is: started, alive or stopping (sd_notify(3)), and takes the socket
that it has made (sd_listen_fds(3)). Each message is one datagram, and nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping

logger = logging.getLogger("kvtier.server")

_TELLS_A_WATCHDOG_TIME = 3
"""The service manager gives up when it hears nothing for one watchdog time."""


_FIRST_FD = 3


def passed_socket(env: Mapping[str, str], path: str) -> socket.socket | None:
    """The listening Unix socket of ``path`` that the service manager gave to this process, not
    blocking, or None. Taken only once."""
    if env.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = env.get("LISTEN_FDS", "")
    for descriptor in range(_FIRST_FD, _FIRST_FD + (int(count) if count.isdecimal() else 0)):
        given = socket.socket(fileno=descriptor)
        if given.family == socket.AF_UNIX and given.getsockname() == path:
            given.setblocking(False)
            os.set_inheritable(descriptor, False)
            return given
        given.detach()
    return None


class Notifier:
    """Without a service manager nothing is sent. ``env``: the environment, where the manager names
    its socket (``NOTIFY_SOCKET``) and its watchdog time in microseconds (``WATCHDOG_USEC``)."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        patience = env.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(patience) / 1e6 if patience.isdigit() and int(patience) else None

    def tell(self, *states: str) -> None:
        """Send lines such as ``READY=1``. Any thread may call it. A manager that cannot be reached
        is logged."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            try:
                sock.sendto("\n".join(states).encode(), self._address)
            except OSError as error:
                logger.warning(
                    "the service manager at NOTIFY_SOCKET cannot be told %s: %s", states[0], error
                )

    @contextlib.asynccontextmanager
    async def serving(self, status: Callable[[], str]) -> AsyncIterator[None]:
        """Report ready, and then alive as long as the loop runs, until the context ends.
        ``status``: one line for people."""
        self.tell("READY=1", f"STATUS={status()}")
        beating = asyncio.create_task(self._beat(status)) if self.watchdog_s is not None else None
        try:
            yield
        finally:
            if beating is not None:
                beating.cancel()
            self.tell("STOPPING=1", "STATUS=stopping")

    async def _beat(self, status: Callable[[], str]) -> None:
        assert self.watchdog_s is not None
        while True:
            self.tell("WATCHDOG=1", f"STATUS={status()}")
            await asyncio.sleep(self.watchdog_s / _TELLS_A_WATCHDOG_TIME)
