"""Port: where the admin interface listens, and whom that lets in."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from kvtier.admin.places import PLACES
from kvtier.core.errors import ConfigError


class Port(NamedTuple):
    """A bound socket that listens. ``local``: only processes of this host can connect."""

    socket: socket.socket
    url: str
    tls: ssl.SSLContext | None
    local: bool


def bind(url: str, *, token: bool, tls: ssl.SSLContext | None) -> Port:
    """Listen at ``http://host:port`` or ``https://host:port``. Port 0 means any free port.

    Raises ConfigError when the port is taken, when the address is not loopback and there is no
    token, or when https is asked for without a certificate.
    """
    scheme, host, number = _parts(url)
    local = is_this_host(host)
    if not local and not token:
        raise ConfigError(
            f"admin={url} would let everybody on the network look in: set admin_token_file, or "
            "give an address on 127.0.0.1"
        )
    if scheme == "https" and tls is None:
        raise ConfigError(
            f"admin={url} needs a certificate: set server_cert and server_key, or give http://"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, number), family=family, backlog=2 * PLACES)
    except OSError as error:
        raise ConfigError(
            f"admin={url}: cannot listen there: {error}; give another port, or admin=off"
        ) from error
    sock.setblocking(False)
    shown = f"[{host}]" if ":" in host else host
    return Port(
        sock,
        f"{scheme}://{shown}:{sock.getsockname()[1]}",
        tls if scheme == "https" else None,
        local,
    )


def without_port(host: str) -> str:
    """The name in a Host header, or "" where that makes no sense."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_this_host(name: str) -> bool:
    """localhost or a loopback address (``127.example.org`` is neither)."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _parts(url: str) -> tuple[str, str, int]:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        scheme, host, number = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, number = "", None, None
    if scheme not in {"http", "https"} or not host or number is None or parts.path not in {"", "/"}:
        raise ConfigError(f"admin={url}: expected http://host:port, https://host:port or off")
    return scheme, host, number
