"""Where a server listens, and who may connect: socket files, modes, peer credentials and TLS. And
what systemd is told (sd_notify(3)) and gives (sd_listen_fds(3))."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from kvtier.client.connect import PLAIN, Address, refuse_plain
from kvtier.core.deadline import listening
from kvtier.core.errors import ConfigError
from kvtier.core.processes import environment
from kvtier.core.secret_files import make_folder, refuse_shared_folder

logger = logging.getLogger("kvtier.server")

_WATCHDOG_TELLS = 3
"""Reports within a watchdog time. The service manager gives up after one without any."""
_FIRST_FD = 3


def passed_socket(env: Mapping[str, str], path: str) -> socket.socket | None:
    """Take the listening Unix socket of ``path`` that the service manager gave to this process, not
    blocking. None if there is none, or it was taken before."""
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
    """Reports to a service manager, if there is one. ``env``: the environment, where the manager
    names its socket (``NOTIFY_SOCKET``) and watchdog time in microseconds (``WATCHDOG_USEC``)."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        patience = env.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(patience) / 1e6 if patience.isdigit() and int(patience) else None

    def tell(self, *states: str) -> None:
        """Send lines such as ``READY=1``. Any thread. A manager that is not reached is logged."""
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
        """Report ready, then alive while the loop runs. ``status``: one line for people."""
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
            await asyncio.sleep(self.watchdog_s / _WATCHDOG_TELLS)


_BACKLOG_CONNECTIONS = 128


class Listener(NamedTuple):
    """A listening socket that does not block. ``needs_token``: clients must prove their token."""

    socket: socket.socket
    address: Address
    tls: ssl.SSLContext | None
    needs_token: bool
    close: Callable[[], None]

    @property
    def local(self) -> bool:
        return bool(self.address.path)


def listen_unix(address: Address) -> Listener:
    """Listen at a socket file of mode 0600, which replaces a stale one.

    Its folder must belong to this user or to root, and no other user may write to it, as in /tmp. A
    missing folder is made with mode 0700. Raises ConfigError for an unsafe folder, and when another
    server has the file. A socket that systemd has made is taken as it is, and left when the server
    ends."""
    path = Path(address.path)
    if (given := passed_socket(environment(), address.path)) is not None:
        refuse_shared_folder(path.parent)
        if (mode := path.stat().st_mode) & 0o077:
            raise ConfigError(
                f"{path} has mode {mode & 0o777:o}, expected 600: write SocketMode=0600 in the "
                "socket unit"
            )
        return Listener(given, address, None, False, given.close)
    make_folder(path.parent)
    refuse_shared_folder(path.parent)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    sock = socket.socket(socket.AF_UNIX)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_stale(path)
        os.fchmod(sock.fileno(), 0o600)  # before bind: the file is never wider than this
        sock.bind(address.path)
        sock.listen(_BACKLOG_CONNECTIONS)
        sock.setblocking(False)
    except (OSError, ConfigError) as error:
        sock.close()
        os.close(lock)
        if isinstance(error, ConfigError):
            raise
        why = "another kvtier server has it" if isinstance(error, BlockingIOError) else str(error)
        raise ConfigError(f"cannot listen at {address}: {why}") from error

    def close() -> None:
        sock.close()
        path.unlink(missing_ok=True)
        os.close(lock)

    return Listener(sock, address, None, False, close)


def listen_tcp(
    address: Address,
    *,
    token: bool,
    tls: ssl.SSLContext | None,
    insecure: bool = False,
    unencrypted: bool = False,
) -> Listener:
    """Listen at a port. ``token``: whether the server has a token, which clients must know.

    Raises ConfigError where any client could come in: without a token and without client
    certificates, unless the address is loopback and ``insecure`` is given; and where traffic could
    be read along: on other addresses without TLS, unless ``unencrypted`` is given. Then the log
    says so."""
    named = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
    if not token and not named and not (insecure and address.is_loopback):
        raise ConfigError(
            f"{address} would serve KV to anybody: set server_token_file, or server_ca for client "
            "certificates; on an address that is not loopback also set server_cert and server_key "
            "for TLS. On a loopback address, --insecure serves without"
        )
    if tls is None and not address.is_loopback:
        refuse_plain(address, "server_cert and server_key", unencrypted=unencrypted)
        logger.warning(PLAIN, address)
    try:
        sock = listening(address.host, address.port, _BACKLOG_CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error}") from error
    bound = Address("", address.host, sock.getsockname()[1])
    return Listener(sock, bound, tls, token, sock.close)


def server_tls(certificate: str, key: str, ca: str | None = None) -> ssl.SSLContext:
    """Make a server's TLS. ``ca``: clients must show a certificate of it. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS files {certificate}, {key}, {ca} cannot be used: {error}"
        ) from error
    return context


def _remove_stale(path: Path) -> None:
    """Remove a stale socket file. Raises ConfigError if it is in use, or no socket."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} is there and is not a socket: remove it, or listen elsewhere")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(os.fspath(path))
        raise ConfigError(f"cannot listen at {path}: another process does")
    path.unlink()
