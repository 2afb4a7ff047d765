"""Whose a connection is, as far as a client cannot choose it: the names under which a server counts
what it gives to one client."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from hashlib import sha256

from kvtier.core.secret_files import peer_pid

_NETWORK_BITS = 64


def client_of(transport: asyncio.BaseTransport, sock: socket.socket) -> str:
    """The client's certificate. Without one, the address that it comes from, and on a Unix socket
    its process."""
    if sock.family == socket.AF_UNIX:
        return f"process {peer_pid(sock)}"
    tls = transport.get_extra_info("ssl_object")
    shown = None if tls is None else tls.getpeercert(binary_form=True)
    if shown:
        return f"certificate {sha256(shown).hexdigest()[:16]}"
    peer = transport.get_extra_info("peername")
    return f"address {origin_of(peer[0]) if peer else ''}"


def origin_of(address: str) -> str:
    """The part of an address that one host cannot choose."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), _NETWORK_BITS), strict=False))
