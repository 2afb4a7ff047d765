"""Connections to a Redis server: made, logged in, lent to one caller at a time, and kept."""

from __future__ import annotations

import importlib
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Protocol

from kvtier.core.deadline import Deadline, KeptConnections, reach
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane, future_of
from kvtier.tiers.redis.errors import LoginError, RedisError, RefusedError, SetupError, login_error
from kvtier.tiers.redis.url import Address, Login, RedisUrl, Tls
from kvtier.tiers.redis.wire import Wire


class CredentialProvider(Protocol):
    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, or user and password."""


class ProvidedLogins:
    """Logins of a credential provider, which may wait for a network without a bound. So they are
    asked for one at a time on a lane of their own. Threads: any."""

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider, self._lock = provider, threading.Lock()
        self._lane = Lane("redis-login", 1, urgent_bound=1, bound=1)
        self._asking: Future[Login] | None = None
        self.passwords: tuple[str, ...] = ()

    def next(self, within_s: float) -> Login:
        """Return the next login, or one that an earlier caller gave up on. Raises FAULTS."""
        with self._lock:
            if self._asking is None:
                self._asking = future_of(self._lane, self._ask)
            asking = self._asking
        assert asking is not None, "its lane was empty"
        try:
            return asking.result(within_s)
        except TimeoutError:
            raise TimeoutError("redis_credential_provider has not answered yet") from None
        finally:
            with self._lock:
                if asking.done() and self._asking is asking:
                    self._asking = None

    def _ask(self) -> Login:
        try:
            given: object = self._provider.get_credentials()
        except BaseException as error:  # noqa: BLE001 - its words may hold a token
            kind = type(error).__name__
            raise RedisError(f"redis_credential_provider failed: {kind}") from None
        match given:
            case (str() as password,) | (str(), str() as password):
                self.passwords = (*self.passwords[-7:], password)
                return Login(given[0] if len(given) > 1 else None, password)
        wanted = "neither (password,) nor (user, password)"
        raise SetupError(f"redis_credential_provider gave {wanted}")


@cache
def provided_logins(path: str) -> ProvidedLogins:
    """Return the logins of the object, or of an instance of the class, at a dotted path. All tiers
    of a process share them. Raises ConfigError."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        provider = found() if isinstance(found, type) else found
        if not callable(getattr(provider, "get_credentials", None)):
            raise TypeError("it has no get_credentials")  # noqa: TRY301
    except Exception as error:
        raise ConfigError(
            f"redis_credential_provider={path!r} cannot be used: {type(error).__name__}: {error}; "
            "expected the dotted path of an object with get_credentials(), or of its class"
        ) from error
    return ProvidedLogins(provider)


class ConnectionFactory:
    """Maker of logged-in connections to any server of one URL. Threads: any. Raises ConfigError for
    certificate files that cannot be read."""

    def __init__(
        self, url: RedisUrl, login: Login | ProvidedLogins, database: int, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self._path, self._login, self._database = url.path, login, database
        self._tls = None if url.tls is None else _context(url.tls)
        self._passwords = [
            one.password for one in (url.login, url.sentinel_login) if one.password is not None
        ]

    @property
    def secrets(self) -> tuple[str, ...]:
        provided = self._login.passwords if isinstance(self._login, ProvidedLogins) else ()
        return (*self._passwords, *provided)

    def connect(self, address: Address | None, within_s: float | None = None) -> socket.socket:
        """Return a logged-in socket, to the Unix socket for None. Takes at most ``within_s``
        (default: ``timeout_s``) and the system's time for looking up a name. Raises FAULTS."""
        deadline = Deadline(self.timeout_s if within_s is None else within_s)
        try:
            return self._connected(address, deadline)
        except LoginError:
            if not isinstance(self._login, ProvidedLogins):
                raise
        # A token may have expired in the provider's hands, or while nobody fetched it.
        try:
            return self._connected(address, Deadline(deadline.left()))
        except LoginError as error:
            refused = str(error).partition(";")[0]
            raise LoginError(f"{refused}; correct what redis_credential_provider gives") from None

    def _connected(self, address: Address | None, deadline: Deadline) -> socket.socket:
        if address is None:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            found = reach(*address, deadline)
        try:
            found.settimeout(deadline.left())
            if address is None:
                found.connect(self._path)
            else:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    found = self._tls.wrap_socket(found, server_hostname=address[0])
            login = self._login
            if isinstance(login, ProvidedLogins):
                login = login.next(deadline.left())
            self._enter(Wire(found, deadline.left(), self.secrets), login)
        except BaseException:
            found.close()
            raise
        return found

    def _enter(self, wire: Wire, login: Login) -> None:
        steps: list[tuple[object, ...]] = []
        if login.password is not None:
            user = () if login.user is None else (login.user,)
            steps.append(("AUTH", *user, login.password))
        if self._database:
            steps.append(("SELECT", self._database))
        for step, reply in zip(steps, wire.ask(steps) if steps else (), strict=True):
            if isinstance(reply, RefusedError) and "max number of clients" in str(reply):
                raise RedisError(str(reply))  # said before anything was asked
            if isinstance(reply, RefusedError) and step[0] == "AUTH":
                raise login_error(reply)
            if reply != b"OK":
                raise RedisError(f"database {self._database} is refused: {reply}")


def _context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca)  # trusts the file's authorities alone
        context.check_hostname = tls.verify and tls.check_host
        context.verify_mode = ssl.CERT_REQUIRED if tls.verify else ssl.CERT_NONE
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else "no certificate or key"
        )
        raise ConfigError(f"redis_url: its certificate files cannot be used: {reason}") from None
    return context


class ConnectionPool(KeptConnections[socket.socket]):
    """At most ``connections`` connections to one server."""

    def __init__(
        self, factory: ConnectionFactory, address: Address | None, connections: int
    ) -> None:
        super().__init__(lambda: factory.connect(address))
        self._factory = factory
        self._places = threading.BoundedSemaphore(connections)

    @contextmanager
    def wire(self) -> Iterator[Wire]:
        """Lend a wire for one call. Raises FAULTS. A failed connection is closed."""
        timeout_s = self._factory.timeout_s
        if not self._places.acquire(timeout=timeout_s):
            raise TimeoutError("every connection is in use")
        try:
            with self.lent() as connection:
                yield Wire(connection, timeout_s, self._factory.secrets)
        finally:
            self._places.release()
