"""Clients that lie, flood, stall or leave in the middle: their own connection ends, and nothing
else happens."""

import asyncio
import re
import socket
import time
from dataclasses import replace

import pytest
from msgspec import structs

from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import hello
from kvtier.core.lookup import Progress
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.server import connection
from kvtier.server.strangers import ONE_HOSTS_PLACES
from kvtier.store.store import Store
from kvtier.testing import content
from tests.attack.clients import enter_raw, far
from tests.attack.stage import own_mib
from tests.child_process import most_lines, wait_for
from tests.feeding import feed
from tests.loop_server import served, until
from tests.server_process import SLOT, at_rest, attached, load, run, save, serving

pytestmark = pytest.mark.usefixtures("patient")

KEY = run(1, 1)[0]


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def server(port):
    with serving(f"tcp://127.0.0.1:{port}", flags=("--insecure",)) as server:
        yield server


@pytest.fixture
def client(server):
    """One that behaves; at the end it has been served all the time and nothing is left of the
    others."""
    with attached(server.access()) as client:
        save(client, run(7, 5))
        yield client
        assert load(client, run(7, 5)) == ["ram"] * 5
        at_rest(client)
        assert client.counts["lost"] == 0


def last_words(sock):
    inbox: Inbox[wire.Message] = Inbox(
        wire.Challenge | wire.Answer | wire.Go | wire.Welcome | wire.Refused
    )
    said: list[wire.Message] = []
    try:
        while data := sock.recv(1 << 16):
            said += feed(inbox, data)
    except ConnectionResetError:
        pass
    if not said or not isinstance(said[-1], wire.Refused):
        return ""
    then = "Welcome, then " if any(isinstance(one, wire.Welcome) for one in said) else ""
    return then + said[-1].reason


NOT_A_GREETING = {
    "noise": (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
    "long": (b"\xff\xff\xff\x7f", "a frame of 2147483647 bytes"),
    "malformed": (b"\x03\0\0\0abc", "malformed"),
    "a question": (wire.frame(wire.StatsCall(1)), "malformed"),
    "another version": (
        wire.frame(structs.replace(hello(bytes(32), SLOT, stream=False), version=1000)),
        f"the server speaks version {wire.VERSION}, the client 1000",
    ),
    "twice": (
        wire.frame(hello(bytes(32), SLOT, stream=False)) * 2,
        "Hello before the Welcome|Welcome, then malformed",
    ),
}


@pytest.mark.parametrize("said", NOT_A_GREETING)
def test_what_is_not_a_greeting(server, client, said):
    data, reason = NOT_A_GREETING[said]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(server.socket))
        sock.sendall(data)
        assert re.match(reason, last_words(sock))


NOT_A_QUESTION = {
    "an answer": wire.frame(wire.LookupReply(1, [(0, 0.0)])),
    "a lease of nobody": wire.frame(wire.Commit(77)),
    "half a key": wire.frame(wire.LookupCall(1, bytes(41))),
    "a long frame": (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
    "a tier's question": wire.frame(wire.Get(1, KEY)),
    "two waits": wire.frame(wire.Wait(1, 5000)) + wire.frame(wire.Wait(2, 5000)),
}


@pytest.mark.parametrize("said", NOT_A_QUESTION)
def test_what_is_not_a_question_ends_the_session_and_its_leases(server, client, said):
    with enter_raw(server.access()) as sock:
        sock.sendall(
            wire.frame(wire.Save(1, wire.joined(run(3, 4))))
            + wire.frame(wire.LoadCall(2, wire.joined(run(7, 5)), 0))
        )
        sock.sendall(NOT_A_QUESTION[said])
        assert last_words(sock) != ""
    assert client.lookup(run(3, 4)).progress == Progress(0, 0)


OUT_OF_TURN = {
    "a Seal without a chunk": wire.frame(wire.Seal(bytes(16))),
    "before the last question was answered": wire.frame(wire.Put(1, KEY)) * 2,
    "malformed": wire.frame(wire.Put(1, KEY)) + bytes(100),
    "Invalid value 15": wire.frame(wire.StatsCall(1)),
}


@pytest.mark.parametrize("why", OUT_OF_TURN)
def test_a_stream_that_speaks_out_of_turn(client, port, why):
    with enter_raw(far(port)) as sock:
        sock.sendall(OUT_OF_TURN[why])
        assert why in last_words(sock)


def test_a_stream_that_leaves_in_the_middle_of_a_chunk(client, port):
    with enter_raw(far(port)) as sock:
        sock.sendall(wire.frame(wire.Put(1, KEY)))
        assert sock.recv(100) == wire.frame(wire.Go(1, True, False))
        sock.sendall(content(KEY, SLOT)[: SLOT // 2])
        wait_for(lambda: client.stats()["ram_filling"] == 1, "begun")
    wait_for(lambda: client.stats()["ram_filling"] == 0, "given back")
    assert client.lookup([KEY]).progress == Progress(0, 0)


def test_one_that_does_not_read_is_dropped_and_hinders_nobody(server, client):
    with enter_raw(server.access()) as sock:
        sock.setblocking(False)
        flood = wire.frame(wire.StatsCall(1)) * 1000
        sent = 0
        for _ in range(100_000):
            try:
                sent += sock.send(flood[sent % len(wire.frame(wire.StatsCall(1))) :])
            except BlockingIOError:
                assert client.lookup(run(7, 5)).progress == Progress(5, 0)
            except OSError:
                break
        else:
            pytest.fail("never dropped")
    assert "does not read its answers" in server.said()


def test_a_thousand_bad_sessions_leave_a_few_lines_in_the_log_and_nothing_in_memory(server, client):
    before, begun = own_mib(server.pid), time.monotonic()
    for _ in range(1000):
        with enter_raw(server.access()) as sock:
            sock.sendall(b"\xff" * 64)
            assert last_words(sock) != ""
    assert 1 <= server.said().count("dropped") <= most_lines(10, 10.0, begun)
    assert own_mib(server.pid) - before < 20


TOKEN = b"a secret of more than 16 bytes"


@pytest.fixture
def guarded(port, tmp_path):
    file = tmp_path / "token"
    file.write_bytes(TOKEN)
    file.chmod(0o600)
    with serving(f"tcp://127.0.0.1:{port}", server_token_file=file):
        yield replace(far(port), token=TOKEN)


def test_those_who_were_let_in_take_no_place_of_the_others(guarded):
    inside = [enter_raw(guarded) for _ in range(2 * ONE_HOSTS_PLACES)]
    for one in inside:
        one.sendall(wire.frame(wire.Find(1, b"")))
        assert one.recv(100) == wire.frame(wire.Found(1, 0))
        one.close()


def test_a_greeting_that_comes_byte_by_byte_has_seconds(guarded):
    with socket.create_connection((guarded.address.host, guarded.address.port)) as sock:
        assert sock.recv(100)
        sock.settimeout(0.25)
        for byte in wire.frame(guarded.hello):
            sock.sendall(bytes([byte]))
            try:
                assert b"no greeting within 4 s" in sock.recv(1000)
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("it may take as long as it likes")


LARGE = 16 << 20


def in_process(monkeypatch, scenario):
    """Run a scenario beside a server on one loop, with deadlines short enough to be met."""
    for name in ("_CALL_S", "_GREETING_S", "_LOOK_S"):
        monkeypatch.setattr(connection, name, 0.3)
    monkeypatch.setattr(connection, "_SLOWEST_BYTES_S", 1 << 40)
    store = Store(Pool(2, LARGE))

    async def both():
        async with served(store) as server:
            await scenario(server, store)

    asyncio.run(both())


async def far_stream(server):
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.listeners[1].address.port, limit=1 << 16
    )
    writer.write(wire.frame(hello(bytes(32), LARGE, stream=True)))
    for _ in range(2):
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
    return reader, writer


def test_a_chunk_of_which_a_byte_comes_now_and_then(monkeypatch, caplog):
    """It moves all the time, and would hold its slot for days. A byte that comes after the server
    has closed resets the connection, so its last word may not arrive: the log has it."""

    async def scenario(server, store):
        reader, writer = await far_stream(server)
        writer.write(wire.frame(wire.Put(1, KEY)))
        await reader.readexactly(len(wire.frame(wire.Go(1, True, False))))
        while server.connections:
            writer.write(b"\0")
            await asyncio.sleep(0.01)
        assert "a chunk has not come through" in caplog.text
        store.check(idle=True)
        writer.close()

    in_process(monkeypatch, scenario)


def test_a_chunk_that_nobody_reads(monkeypatch):
    async def scenario(server, store):
        with store.save([KEY]) as lease:
            lease.commit()
        _, writer = await far_stream(server)
        writer.write(wire.frame(wire.Get(1, KEY)))
        await until(lambda: not server.connections)
        store.check(idle=True)
        writer.close()

    in_process(monkeypatch, scenario)
