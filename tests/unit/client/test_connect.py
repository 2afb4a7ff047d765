"""From a host's name to a socket: all of its addresses, within one deadline, by one function."""

import asyncio
import re
import socket
import ssl
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.client.connect import Address, ServerAccess, _connect, hello
from kvtier.core.deadline import Deadline, exchange, reach
from kvtier.extensions import zmtp
from kvtier.extensions.mooncake.tier import _own_address
from kvtier.extensions.mooncake.url import parse as mooncake_url
from kvtier.tiers.redis.connections import ConnectionFactory
from kvtier.tiers.redis.url import Login, parse

NAME = "cache.example"
HOUSE = Path(__file__).parents[3]
PRODUCT = "kvtier", "autoconfig", "connectors"


@pytest.fixture
def hole():
    with ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.2", 0))
        silent.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        yield silent.getsockname()[1]


@pytest.fixture
def answering(hole):
    with socket.create_server(("127.0.0.1", hole)) as server:
        yield server


@pytest.fixture(autouse=True)
def names(monkeypatch):
    resolve = socket.getaddrinfo

    def both(host, *rest, **more):
        places = ("127.0.0.2", "127.0.0.1") if host == NAME else (host,)
        return [one for place in places for one in resolve(place, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", both)


def _redis(port):
    url = parse(f"redis://{NAME}:{port}")
    ConnectionFactory(url, Login(), 0, 1.0).connect((NAME, port)).close()


def _server(port):
    address = Address.parse(f"tcp://{NAME}:{port}")
    named = hello(bytes(32), 4096, stream=True)
    _connect(ServerAccess(address, named, b"token", unencrypted=True), 2.0).close()


def _zmtp(port):
    async def meet():
        (await zmtp.connected(f"tcp://{NAME}:{port}", 1024)).close()

    asyncio.run(meet())


@pytest.mark.parametrize(
    "connect",
    [
        _server,
        _redis,
        _zmtp,
        lambda port: _own_address(mooncake_url(f"mooncake://{NAME}:{port}?bytes=1GiB")),
    ],
    ids=["a kvtier server", "redis", "an event stream", "mooncake's master"],
)
def test_a_silent_first_address_does_not_hide_the_second(connect, answering):
    connect(answering.getsockname()[1])
    answering.settimeout(5)
    answering.accept()[0].close()


def test_a_silent_first_address_does_not_hide_an_admin_interface(answering):
    def answer():
        client, _ = answering.accept()
        with client:
            client.recv(4096)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    server = threading.Thread(target=answer)
    server.start()
    _, text = exchange(f"http://{NAME}:{answering.getsockname()[1]}", "/", None, {}, 2.0)
    server.join()
    assert text == b"ok"


def test_tls_to_redis_has_what_is_left_of_the_same_time(answering):
    port = answering.getsockname()[1]
    url = parse(f"rediss://{NAME}:{port}?ssl_cert_reqs=none")
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        ConnectionFactory(url, Login(), 0, 1.0).connect((NAME, port))
    assert 0.9 < time.monotonic() - begun < 1.9  # bounds of a promise, not a speed


def test_all_addresses_together_have_one_deadline(hole):
    begun = time.monotonic()
    with pytest.raises(OSError, match="not done within"):
        reach("127.0.0.2", hole, Deadline(0.3))
    assert 0.3 <= time.monotonic() - begun < 1.9


def test_twenty_silent_addresses_are_all_tried(answering, monkeypatch):
    port = answering.getsockname()[1]
    found = socket.getaddrinfo("127.0.0.2", port, type=socket.SOCK_STREAM) * 20
    found += socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **more: found)
    with reach(NAME, port, Deadline(2.0)) as sock:
        assert sock.getpeername() == ("127.0.0.1", port)


def test_one_family_that_leads_nowhere_costs_one_pause(monkeypatch):
    """Families come in turns: IPv6, IPv4, IPv6 ... A kernel without family 255 refuses it."""
    tried = list[int]()

    class Counted(socket.socket):
        def __init__(self, family, *rest):
            tried.append(family)
            super().__init__(family, *rest)

    monkeypatch.setattr(socket, "socket", Counted)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        families = 255, 255, 255, socket.AF_INET
        found = [(family, socket.SOCK_STREAM, 0, "", place) for family in families]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **more: found)
        tried.clear()
        with reach("a.host", place[1], Deadline(2.0)) as sock:
            assert sock.getpeername() == place
    assert tried == [255, socket.AF_INET]


def test_a_refusal_is_told_and_no_descriptor_is_left():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConnectionRefusedError):
        reach("127.0.0.1", port, Deadline(1.0))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_certificate_is_checked_for_the_name(answering):
    with pytest.raises((TimeoutError, ssl.SSLError)):
        exchange(f"https://{NAME}:{answering.getsockname()[1]}", "/", None, {}, 0.5)
    client, _ = answering.accept()
    with client:
        assert client.recv(1) == b"\x16"  # a TLS record


def test_no_other_place_resolves_and_connects():
    resolves = r"\b(create_connection|urlopen|gethostbyname\w*|getaddrinfo|HTTPS?Connection)\("
    apart = r"\bopen_connection\((?![\s\S]{0,200}(sock=|happy_eyeballs_delay))"
    files = (path for room in PRODUCT for path in HOUSE.glob(f"{room}/**/*.py"))
    found = {path for path in files if re.search(f"{resolves}|{apart}", path.read_text())}
    assert {str(path.relative_to(HOUSE)) for path in found} == {"kvtier/core/deadline.py"}
