"""Connect to a kvtier server and be welcomed: addresses, TLS and the greeting, on blocking sockets with deadlines."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvtier import wire
from kvtier.errors import ConfigError, TierError
from kvtier.private import read_secret

_CONNECT_TIMEOUT_S = 2.0
_WELCOME_TIMEOUT_S = 15.0
"""A server that opens a large NVMe tier takes its time; when it is too long, the next attempt finds it open."""
_ATTACH_DESCRIPTORS = 2


class Address(NamedTuple):
    """``unix:///path`` has a path; ``tcp://host:port`` has host and port."""

    path: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError for anything else."""
        if text.startswith("unix:///"):
            return cls(text.removeprefix("unix://"), "", 0)
        found = re.fullmatch(r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})/?", text)
        if found is None or int(found[3]) >= 1 << 16:
            raise ConfigError(f"address {text!r}: expected unix:///path/kvtier.sock or tcp://host:port")
        return cls("", found[1] or found[2], int(found[3]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix://{self.path}" if self.path else f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Door:
    """Where a server is and how to be let in. ``hello`` without nonce and proof; ``tls`` for tcp:// only."""

    address: Address
    hello: wire.Hello
    token: bytes | None = None
    tls: ssl.SSLContext | None = None


class Entered(NamedTuple):
    """A connection past its greeting; the caller owns socket and descriptors (pool, witness; none for streams)."""

    socket: socket.socket
    welcome: wire.Welcome
    descriptors: list[int]


def hello(fingerprint: bytes, chunk_bytes: int, *, stream: bool, namespace: str = "", client: str = "") -> wire.Hello:
    """Who we are, for a :class:`Door`."""
    mode: wire.Mode = "stream" if stream else "attach"
    nobody = bytes(wire.NONCE_BYTES)
    return wire.Hello(wire.VERSION, mode, fingerprint, namespace[:64], chunk_bytes, client[:64], nobody)


def client_tls(ca: str, certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Trust servers whose certificate ``ca`` signed for their host name; show ours if there is one.

    Raises ConfigError when a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS files {ca}, {certificate}, {key} cannot be used: {error}") from error
    return context


def read_token(path: str, key: str = "server_token_file") -> bytes:
    """A secret of at least 16 bytes. Raises ConfigError for a shorter one, and as :func:`read_secret` does."""
    token = read_secret(path, key)
    if len(token) < 16:  # of printable text; 128 bits would be 22
        raise ConfigError(
            f"{key}={path} has {len(token)} bytes, expected 16 or more, such as from: openssl rand -hex 32"
        )
    return token


def enter(door: Door) -> Entered:
    """Connect and greet.

    Raises TierError when the server cannot be reached, talks nonsense or has no room for our chunks now (try again
    later), ConfigError when it does not let us in, or cannot show that it has our token.
    """
    descriptors: list[int] = []
    try:
        sock = _connect(door)
    except OSError as error:
        raise TierError(f"no kvtier server at {door.address}: {error}") from error
    try:
        welcome = _greet(sock, door, descriptors)
    except BaseException as error:
        sock.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError | wire.WireError):
            raise TierError(f"greeting with the server at {door.address} failed: {error}") from error
        raise
    return Entered(sock, welcome, descriptors)


def _connect(door: Door) -> socket.socket:
    path, host, port = door.address
    if not path:
        sock = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if door.tls is None:
            return sock
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            wrapped = door.tls.wrap_socket(sock, server_hostname=host)
            undo.pop_all()
            return wrapped
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _greet(sock: socket.socket, door: Door, descriptors: list[int]) -> wire.Welcome:
    inbox: wire.Inbox[wire.Challenge | wire.Welcome | wire.Refused] = wire.Inbox(
        wire.Challenge | wire.Welcome | wire.Refused, wire.MAX_GREETING
    )
    challenge = _receive(sock, inbox, descriptors)
    if not isinstance(challenge, wire.Challenge):
        raise _unwelcome(challenge, door)
    if challenge.version != wire.VERSION:
        raise ConfigError(
            f"the server at {door.address} speaks version {challenge.version} of the protocol, this client "
            f"{wire.VERSION}: install the same kvtier on both"
        )
    hello = msgspec.structs.replace(door.hello, nonce=os.urandom(wire.NONCE_BYTES))
    if door.token is not None:
        hello = msgspec.structs.replace(hello, proof=wire.client_proof(door.token, challenge, hello))
    sock.sendall(wire.frame(hello))
    sock.settimeout(_WELCOME_TIMEOUT_S)
    welcome = _receive(sock, inbox, descriptors)
    if not isinstance(welcome, wire.Welcome):
        raise _unwelcome(welcome, door)
    if door.token is not None and not door.address.path:
        expected = wire.server_proof(door.token, challenge, hello)
        if not wire.proven(expected, welcome.proof):
            raise ConfigError(f"the server at {door.address} does not know our token; it gets no KV")
    if len(descriptors) != (_ATTACH_DESCRIPTORS if hello.mode == "attach" else 0):
        raise wire.WireError(f"the server passed {len(descriptors)} descriptors")
    return welcome


def _receive(
    sock: socket.socket, inbox: wire.Inbox[wire.Challenge | wire.Welcome | wire.Refused], descriptors: list[int]
) -> wire.Challenge | wire.Welcome | wire.Refused:
    while (message := inbox.next()) is None:
        room = inbox.room()
        if sock.family == socket.AF_UNIX:
            data, passed, _, _ = socket.recv_fds(sock, len(room), _ATTACH_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            descriptors += passed
            count = len(data)
            room[:count] = data
        else:
            count = sock.recv_into(room)
        if not count:
            raise ConnectionResetError("it closed the connection")
        inbox.filled(count)
    return message


def _unwelcome(message: object, door: Door) -> Exception:
    if isinstance(message, wire.Refused):
        kind = TierError if message.later else ConfigError
        return kind(f"the server at {door.address} refused: {message.reason}")
    return wire.WireError(f"{type(message).__name__} out of turn")
