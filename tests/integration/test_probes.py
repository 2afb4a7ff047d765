"""What balancers and orchestrators send to a server's ports, second after second: it is answered,
and it fills no log."""

import socket
import ssl
from contextlib import suppress
from pathlib import Path
from struct import pack

import pytest

from kvtier.bench.processes.servers import free_port
from tests.admin_server import administered
from tests.certificates import make_certificates
from tests.child_process import DEADLINE_S, wait_for

PLAIN, TLS = free_port(), free_port()


@pytest.fixture(scope="module", params=["plain", "tls"])
def server(request, tmp_path_factory):
    folder = make_certificates(tmp_path_factory.mktemp("certificates"))
    (folder / "token").write_bytes(b"x" * 32)
    (folder / "token").chmod(0o600)
    keys: dict[str, Path] = {"server_token_file": folder / "token"}
    if request.param == "tls":
        keys |= {"server_cert": folder / "ours-host.pem", "server_key": folder / "ours-host.key"}
    port = TLS if request.param == "tls" else PLAIN
    with administered(f"tcp://127.0.0.1:{port}", **keys) as server:
        server.tcp = port
        yield server


def dial(port):
    return socket.create_connection(("127.0.0.1", port), DEADLINE_S)


def said_to(port, words):
    with dial(port) as sock:
        sock.sendall(words)
        with suppress(ConnectionError):
            return b"".join(iter(lambda: sock.recv(1 << 16), b""))
        return b""


@pytest.mark.parametrize(
    "words",
    [
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
        "GET /healthz/ready HTTP/1.0\r\n",
        "GET /healthz?from=balancer HTTP/1.0\r\nUser-Agent: a/1\r\n",
        "HEAD /healthz HTTP/1.1\r\nHost: 127.0.0.1:80\r\n",
        "HEAD /healthz/live HTTP/1.0\r\n",
        "HEAD / HTTP/1.0\r\n",
        "OPTIONS / HTTP/1.0\r\n",
        "OPTIONS /healthz HTTP/1.1\r\nHost: [::1]:80\r\n",
        "GET http://127.0.0.1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    ],
)
def test_a_probe_of_the_admin_port_is_answered(server, words):
    head, _, body = said_to(server.port, f"{words}Connection: close\r\n\r\n".encode()).partition(
        b"\r\n\r\n"
    )
    assert head.split(b" ")[1] == b"200", head
    assert b"Access-Control" not in head, "a browser's page of another origin reads nothing"
    if words.startswith("HEAD"):
        assert body == b""
    else:
        assert body == b'{"live":true,"ready":true,"trouble":[]}'


def test_connections_that_say_nothing_and_leave_break_no_rule(server):
    tcp: int = server.tcp
    before, ended = server.said(), events(server)
    for port in (tcp, server.port):
        for number in range(20):
            sock = dial(port)
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
            sock.close()
    if tcp == TLS:
        with dial(tcp) as sock, suppress(ssl.SSLError):
            outgoing = ssl.MemoryBIO()
            hello = ssl.create_default_context().wrap_bio(
                ssl.MemoryBIO(), outgoing, server_hostname="localhost"
            )
            with suppress(ssl.SSLWantReadError):
                hello.do_handshake()
            sock.sendall(outgoing.read())
    count = 20 + (tcp == TLS)
    wait_for(lambda: events(server)["ended"] == ended["ended"] + count, "all have ended")
    assert events(server)["dropped"] == ended["dropped"]
    assert server.said() == before


def events(server):
    found: dict[str, int] = server.ask("GET", "/v1/stats").body["connections"]
    return found
