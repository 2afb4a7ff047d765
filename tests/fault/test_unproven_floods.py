"""Clients of other hosts that have not shown that they may come in: however many, they keep no
engine out."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import Address, ServerAccess, client_tls, enter, hello
from kvtier.protocol import wire
from kvtier.server.listening.strangers import PLACES, PLACES_OF_ONE
from tests.certificates import make_certificates
from tests.child_process import DEADLINE_S
from tests.fault.test_hostile_clients import last_words
from tests.server_process import LAYOUT, SLOT, at_rest, attached, run, save, serving

pytestmark = pytest.mark.usefixtures("patient")

TOKEN = b"a secret of more than 16 bytes"
FLOOD = """
import select, socket, sys
host, port, count, again = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "again"
poll, sockets = select.epoll(), {}
def begin():
    one = socket.socket()
    one.bind((host, 0))
    one.connect(("127.0.0.1", port))
    sockets[one.fileno()] = one
    poll.register(one, select.EPOLLRDHUP)
for _ in range(count):
    begin()
print("ready", flush=True)
while True:
    for number, _ in poll.poll():
        poll.unregister(number)
        sockets.pop(number).close()
        if again:
            begin()
"""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_bytes(TOKEN)
    file.chmod(0o600)
    return file


@contextmanager
def flood(port: int, host: str, count: int, again: bool) -> Iterator[None]:
    """``count`` sockets of a process that say nothing. ``again``: each that is closed is opened
    anew."""
    words = [sys.executable, "-c", FLOOD, host, str(port), str(count), "again" if again else "once"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("host", "again"),
    [("127.0.0.2", True), ("127.0.0.1", False)],
    ids=["another host, for ever", "the same host"],
)
def test_a_flood_of_silent_sockets_keeps_no_engine_out(
    port: int, token_file: Path, host: str, again: bool
) -> None:
    with (
        serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file) as server,
        attached(server.access()) as near,
    ):
        save(near, run(1, 3))
        access = ServerAccess(
            Address("", "127.0.0.1", port), hello(LAYOUT.fingerprint, SLOT, stream=True), TOKEN
        )
        with flood(port, host, 600, again):
            for _ in range(20):
                enter(access).socket.close()
        assert near.lookup(run(1, 3)).ready == 3
        at_rest(near)
        assert "too many clients have not said who they are; the oldest was closed" in server.said()


def test_a_flood_of_silent_sockets_before_tls(port: int, token_file: Path, tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    keys: dict[str, Any] = {
        "server_cert": folder / "ours-host.pem",
        "server_key": folder / "ours-host.key",
    }
    tls = client_tls(str(folder / "ours.pem"))
    access = ServerAccess(
        Address("", "localhost", port), hello(LAYOUT.fingerprint, SLOT, stream=True), TOKEN, tls
    )
    with (
        serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file, **keys),
        flood(port, "127.0.0.2", 600, True),
    ):
        for _ in range(10):
            enter(access).socket.close()


@pytest.mark.parametrize(
    ("places", "hosts"),
    [(PLACES_OF_ONE, 1), (PLACES, PLACES + 1)],
    ids=["of one address", "of all"],
)
def test_the_places_are_bounded_and_the_oldest_leaves(
    port: int, token_file: Path, places: int, hosts: int
) -> None:
    with ExitStack() as stack:
        listen, sockets = f"tcp://127.0.0.1:{port}", []
        stack.enter_context(serving(listen, patient=True, server_token_file=token_file))
        for number in range(places + 1):
            place = (f"127.0.1.{number % hosts + 1}", 0)
            sock = socket.create_connection(("127.0.0.1", port), DEADLINE_S, source_address=place)
            sockets.append(stack.enter_context(sock))
        assert last_words(sockets[0]) == "", "cut off"
        for other in (sockets[1], sockets[-1]):
            other.sendall(b"\xff" * 4)
            assert "a frame of" in last_words(other), "still there"


def test_those_who_were_let_in_take_no_place_of_the_others(port: int, token_file: Path) -> None:
    access = ServerAccess(
        Address("", "127.0.0.1", port), hello(LAYOUT.fingerprint, SLOT, stream=True), TOKEN
    )
    with serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file):
        inside = [enter(access).socket for _ in range(2 * PLACES_OF_ONE)]
        for one in inside:
            one.settimeout(DEADLINE_S)
            one.sendall(wire.frame(wire.Find(1, b"")))
            assert one.recv(100) == wire.frame(wire.Found(1, 0))
            one.close()


def test_a_greeting_that_comes_byte_by_byte_has_seconds(port: int, token_file: Path) -> None:
    said = wire.frame(hello(LAYOUT.fingerprint, SLOT, stream=True))
    with (
        serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file) as server,
        dialled(port) as sock,
    ):
        assert sock.recv(100)
        sock.settimeout(0.25)
        for at in range(len(said)):
            sock.sendall(said[at : at + 1])
            try:
                assert b"no greeting within 4 s" in sock.recv(1000)
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("it may take as long as it likes")
        assert "no greeting within 4 s" in server.said()


def dialled(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))
