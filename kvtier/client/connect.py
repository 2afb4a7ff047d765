"""Connect to a kvtier server: addresses, TLS and the handshake, on blocking sockets, each step with
a bound in time and in bytes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvtier.core.deadline import Deadline, is_loopback, reach
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.core.secret_files import peer_uid, read_secret
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.wire import client_proof, proven, server_proof

_CONNECT_S = 2.0
"""Longest time to connect to any address of a host; as long for TLS, and for the Challenge. The
system bounds the look-up of a name."""
_WELCOME_S = 15.0
"""Longest wait for a Welcome. If a large NVMe tier takes longer to open, a later attempt finds
it."""
_ATTACH_DESCRIPTORS = 2
_Greeting = wire.Challenge | wire.Welcome | wire.Refused
PLAIN = (
    "%s is not encrypted (server_unencrypted): who sees the network between can read and "
    "forge chunks"
)


class Address(NamedTuple):
    """Address of a server: ``unix:///path`` has a path, ``tcp://host:port`` a host and a port."""

    path: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``unix:///path`` or ``tcp://host:port``. Raises ConfigError for anything else."""
        if text.startswith("unix:///"):
            return cls(text.removeprefix("unix://"), "", 0)
        found = re.fullmatch(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})/?", text)
        if found is None or int(found[3]) >= 1 << 16:
            raise ConfigError(
                f"address {text!r}: expected unix:///path/kvtier.sock or tcp://host:port"
            )
        return cls("", found[1] or found[2], int(found[3]))

    @property
    def is_loopback(self) -> bool:
        """Whether TCP surely stays on this host."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix://{self.path}" if self.path else f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Address of a server, and what it asks of those it lets in.

    ``hello`` has no nonce and no proof yet. ``tls`` is for tcp:// only. ``unencrypted``: the
    operator gave up encryption beyond loopback. Raises ConfigError for an address beyond loopback
    without TLS, unless the operator gave that up and there is a token."""

    address: Address
    hello: wire.Hello
    token: bytes | None = None
    tls: ssl.SSLContext | None = None
    unencrypted: bool = False

    def __post_init__(self) -> None:
        if self.is_plain:
            refuse_plain(self.address, "server_ca", unencrypted=self.unencrypted)
            if self.token is None:
                raise ConfigError(
                    f"{self.address} is not encrypted and there is no token: set "
                    "server_token_file, because server_unencrypted gives up encryption only"
                )

    @property
    def is_plain(self) -> bool:
        return not self.address.path and not self.address.is_loopback and self.tls is None


def refuse_plain(address: Address, keys: str, *, unencrypted: bool) -> None:
    """Refuse TCP beyond loopback without TLS. The ConfigError says that ``keys`` turn it on."""
    if not unencrypted:
        raise ConfigError(
            f"{address} is beyond this host and not encrypted: who sees the network could read and "
            "forge chunks, also "
            f"with a token; set {keys} for TLS. server_unencrypted=true goes without"
        )


class Welcomed(NamedTuple):
    """Result of a handshake. The caller owns the socket, and the descriptors of the pool and its
    witness, which another host does not get."""

    socket: socket.socket
    welcome: wire.Welcome
    descriptors: list[int]


def hello(
    fingerprint: bytes,
    chunk_bytes: int,
    *,
    stream: bool,
    namespace: str = "",
    client: str = "",
    steers: bool = False,
) -> wire.Hello:
    """Make a Hello. ``steers``: workers on the server's host map the pool, and not this process.
    Raises ConfigError for a namespace that is too long: cut, it could be another tenant's."""
    if len(namespace) > wire.NAME_LETTERS:
        raise ConfigError(
            f"namespace={namespace!r} has {len(namespace)} letters, expected at most "
            f"{wire.NAME_LETTERS}: give the tenant a shorter name"
        )
    mode: wire.Mode = "stream" if stream else "steer" if steers else "attach"
    no_nonce = bytes(wire.NONCE_BYTES)
    return wire.Hello(
        wire.VERSION, mode, fingerprint, namespace, chunk_bytes, client[:64], no_nonce
    )


def client_tls(ca: str, certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Make TLS that trusts servers whose certificate ``ca`` has signed. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS files {ca}, {certificate}, {key} cannot be used: {error}"
        ) from error
    return context


def read_token(path: str, key: str = "server_token_file") -> bytes:
    """Read a token. Raises ConfigError if it has less than 16 bytes, and as :func:`read_secret`."""
    return long_enough(read_secret(path, key), path, key)


def long_enough(token: bytes, path: str, key: str) -> bytes:
    if len(token) < 16:  # of printable text; 128 bits would be 22
        raise ConfigError(
            f"{key}={path} has {len(token)} bytes, expected 16 or more, such as from: openssl "
            "rand -hex 32"
        )
    return token


def join(address: Address, token: bytes | None, ticket: bytes, within_s: float) -> Welcomed:
    """Enter a server on this host as a worker of the engine with this ticket. With an empty one the
    Welcome only names the server, without descriptors. Each of the three parts takes ``within_s``
    at most. Raises as :func:`enter` does."""
    own = wire.Hello(wire.VERSION, "join", bytes(32), "", 1, "", bytes(32), ticket=ticket)
    return enter(ServerAccess(address, own, token), within_s, within_s)


def enter(
    access: ServerAccess, welcome_s: float = _WELCOME_S, begin_s: float | None = None
) -> Welcomed:
    """Connect, and do the handshake. Blocks for three times ``begin_s`` (by default two seconds)
    and ``welcome_s`` at most, and for less than a second as a rule.

    Raises TierError when it may work later: the server cannot be reached, does not speak the
    protocol, or has no room for our chunks now. Raises ConfigError when the server does not let us
    in, and when we do not trust it: it runs as another user, or cannot prove that it has our token.
    """
    descriptors: list[int] = []
    begin_s = _CONNECT_S if begin_s is None else begin_s
    try:
        sock = _connect(access, begin_s)
    except OSError as error:
        raise TierError(f"no kvtier server at {access.address}: {error}") from error
    try:
        welcome = _handshake(sock, access, descriptors, (begin_s, welcome_s))
    except BaseException as error:
        sock.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError | wire.WireError):
            raise TierError(
                f"the handshake with the server at {access.address} failed: {error}"
            ) from error
        raise
    return Welcomed(sock, welcome, descriptors)


def _connect(access: ServerAccess, within_s: float) -> socket.socket:
    with contextlib.ExitStack() as undo:
        if access.address.path:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(within_s)
            sock.connect(access.address.path)
            _refuse_stranger(sock, access)
        else:
            reached = reach(access.address.host, access.address.port, Deadline(within_s))
            sock = undo.enter_context(reached)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if access.tls is not None:
                sock.settimeout(within_s)
                sock = undo.enter_context(
                    access.tls.wrap_socket(sock, server_hostname=access.address.host)
                )
        undo.pop_all()
        return sock


def _refuse_stranger(sock: socket.socket, access: ServerAccess) -> None:
    """Raise ConfigError if a Unix socket is another user's, in whose memory chunks would lie. With
    a token it is enough that the server proves later that it has the same one."""
    uid = peer_uid(sock)
    if uid not in (os.geteuid(), 0) and access.token is None:
        raise ConfigError(
            f"the server at {access.address} runs as user {uid}, expected user {os.geteuid()} or "
            "root; it gets no KV. Run it as the engine's user, or set server_token_file at both"
        )


def _handshake(
    sock: socket.socket, access: ServerAccess, descriptors: list[int], bounds_s: tuple[float, float]
) -> wire.Welcome:
    """Do the handshake. ``bounds_s``: for the Challenge, and for the Welcome."""
    inbox: Inbox[_Greeting] = Inbox(_Greeting, wire.MAX_GREETING_BYTES)
    challenge_s, welcome_s = bounds_s
    deadline = Deadline(challenge_s)
    challenge = _receive(sock, inbox, descriptors, deadline)
    if not isinstance(challenge, wire.Challenge):
        raise _unwelcome(challenge, access)
    if challenge.version != wire.VERSION:
        raise ConfigError(
            f"the server at {access.address} speaks version {challenge.version} of the protocol, "
            f"this client {wire.VERSION}: install the same kvtier on both"
        )
    hello = msgspec.structs.replace(access.hello, nonce=os.urandom(wire.NONCE_BYTES))
    if access.token is not None:
        hello = msgspec.structs.replace(hello, proof=client_proof(access.token, challenge, hello))
    deadline.send(sock, wire.frame(hello))
    welcome = _receive(sock, inbox, descriptors, Deadline(welcome_s))
    if not isinstance(welcome, wire.Welcome):
        raise _unwelcome(welcome, access)
    if access.token is not None and not proven(
        server_proof(access.token, challenge, hello), welcome.proof
    ):
        raise ConfigError(
            f"the server at {access.address} does not know our token; it gets no KV. Give both "
            "ends the same server_token_file"
        )
    maps = hello.mode == "attach" or bool(hello.ticket)
    if len(descriptors) != (_ATTACH_DESCRIPTORS if maps else 0):
        raise wire.WireError(f"the server passed {len(descriptors)} descriptors")
    return welcome


def _receive(
    sock: socket.socket, inbox: Inbox[_Greeting], descriptors: list[int], deadline: Deadline
) -> _Greeting:
    while (message := inbox.next()) is None:
        room = inbox.room()
        if sock.family != socket.AF_UNIX:
            inbox.filled(deadline.receive(sock, room))
            continue
        sock.settimeout(deadline.left())
        data, passed, _, _ = socket.recv_fds(
            sock, len(room), _ATTACH_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        descriptors += passed
        if len(descriptors) > _ATTACH_DESCRIPTORS:
            raise wire.WireError(f"the server passed {len(descriptors)} descriptors")
        if not data:
            raise ConnectionResetError("it closed the connection")
        room[: len(data)] = data
        inbox.filled(len(data))
    return message


def _unwelcome(message: object, access: ServerAccess) -> Exception:
    if isinstance(message, wire.Refused):
        text = f"the server at {access.address} refused: {message.reason}"
        if message.slot_bytes is not None:
            return RefusedSize(text, message.slot_bytes)
        return TierError(text) if message.later else ConfigError(text)
    return wire.WireError(f"{type(message).__name__} out of turn")
