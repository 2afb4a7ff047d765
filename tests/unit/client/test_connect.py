"""How a client gets to a server on another host."""

from __future__ import annotations

import socket

import pytest

from kvtier.client.connect import Address, _connect_tcp


def test_an_address_of_a_family_that_this_host_lacks_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name may have an IPv6 address first, and the host no IPv6."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        families = 255, socket.AF_INET  # the kernel has no family 255
        found = [(family, socket.SOCK_STREAM, 0, "", place) for family in families]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **more: found)
        with _connect_tcp(Address("", "a.host", place[1]), 2.0) as sock:
            assert sock.getpeername() == place
