"""Engines on another host, here over loopback: what a tier promises, tokens, TLS, and what is
refused."""

import os
import socket
import threading
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.wire import client_proof
from kvtier.store.store import Store
from kvtier.testing import check_tier, content
from tests.child_process import DEADLINE_S, wait_for
from tests.feeding import feed
from tests.rogue_server import hear, rogue
from tests.server_process import (
    LAYOUT,
    SLOT,
    ServerProcess,
    at_rest,
    attached,
    load,
    run,
    save,
    serving,
    short_folder,
)

pytestmark = pytest.mark.usefixtures("patient")

TOKEN = b"a secret of more than 16 bytes"
INSECURE = ("--insecure",)


def cache_server(port, layout=LAYOUT, token=None, tls=None):
    own = hello(layout.fingerprint, layout.chunk_bytes, stream=True, client="far")
    return ServerAccess(Address("", "localhost" if tls else "127.0.0.1", port), own, token, tls)


@contextmanager
def engine(access, slots=8):
    """An engine's own Store over a server far away."""
    tier = RemoteTier(access)
    store = Store(Pool(slots, SLOT), [(tier, Lane("remote", 2, urgent_bound=64, bound=64))])
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def server(port):
    with serving(f"tcp://127.0.0.1:{port}", flags=INSECURE) as server:
        yield server


@pytest.mark.parametrize("chunk_bytes", [SLOT, 5000, 3 << 20])
def test_a_server_keeps_the_promises_of_a_tier(port, chunk_bytes):
    with serving(
        f"tcp://127.0.0.1:{port}", flags=INSECURE, ram_bytes=32 * max(SLOT, chunk_bytes)
    ) as server:

        def make():
            """A tier that holds nothing: the server forgets what the test before left."""
            layout = ChunkLayout(LAYOUT.fingerprint, 1, 1, (chunk_bytes,))
            with attached(server.access(layout)) as client:
                client.invalidate_all()
                wait_for(lambda: client.stats()["ram_ready"] == 0, "empty")
            return RemoteTier(cache_server(port, layout))

        check_tier(make, chunk_bytes=chunk_bytes)


def test_engines_near_and_far_share_what_they_saved(server, port):
    with (
        attached(server.access()) as near,
        engine(cache_server(port)) as one,
        engine(cache_server(port)) as two,
    ):
        save(near, run(1, 4))
        assert near.lookup(run(1, 4)).ready == 4, "it is answered after the commit"
        assert load(one, run(1, 4)) == ["remote"] * 4
        save(two, run(2, 5))
        wait_for(lambda: near.lookup(run(2, 5)).ready == 5, "spilled to the server")
        assert load(near, run(2, 5)) == ["ram"] * 5
        assert load(one, run(2, 5)) == ["remote"] * 5
        at_rest(near)


def test_a_server_that_comes_back_is_used_again(server, port):
    tier = RemoteTier(cache_server(port))
    key = run(1, 1)[0]
    into = memoryview(bytearray(SLOT))
    assert tier.write(key, content(key, SLOT))
    server.kill()
    assert (tier.read(key, into), tier.find([key])) == (None, 0)
    server.start()
    wait_for(lambda: tier.write(key, content(key, SLOT)), "reconnected")
    assert tier.read(key, into) and into == content(key, SLOT)
    tier.close()


def test_a_bit_flipped_on_the_way_is_a_miss_at_either_end(server, port):
    with flipping(port) as bad:
        key = run(1, 1)[0]
        tier = RemoteTier(cache_server(bad))
        assert not tier.write(key, content(key, SLOT))
        with attached(server.access()) as near:
            assert near.lookup([key]).progress == (0, 0)
            save(near, [key])
            assert tier.read(key, memoryview(bytearray(SLOT))) is None, (
                "the server has the right bytes"
            )
            assert tier.counts["corrupt"] == 1
            at_rest(near)
        tier.close()


@contextmanager
def flipping(port):
    """A relay that flips one bit in the middle of every chunk, in both directions."""
    middle = content(run(1, 1)[0], SLOT)[SLOT // 2 : SLOT // 2 + 16].tobytes()
    with relay(
        port, lambda data, _: data.replace(middle, bytes([middle[0] ^ 1]) + middle[1:])
    ) as bad:
        yield bad


@contextmanager
def relay(port, change):
    """Somebody between an engine and ``port``. Passes on what ``change`` makes of the bytes. It is
    also told whether they come from the server."""

    def pipe(source, sink, away):
        with source, sink:
            while data := source.recv(1 << 20):
                sink.sendall(change(data, away))
            sink.shutdown(socket.SHUT_RDWR)

    def script(near):
        away = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=pipe, args=(near.dup(), away.dup(), False), daemon=True).start()
        pipe(away, near, True)

    with rogue(None, script) as address:
        yield address.port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::]"])  # noqa: S104
def test_tcp_without_token_or_key_is_refused(port, host):
    flags = () if host in {"127.0.0.1", "localhost"} else INSECURE
    with short_folder() as folder:
        for given in ({}, {"server_unencrypted": True}):
            refusal = ServerProcess(folder, f"tcp://{host}:{port}", flags=flags, **given).refusal()
            assert "would serve KV to anybody: set server_token_file" in refusal


def test_attach_is_not_for_other_hosts(server, port):
    own = hello(LAYOUT.fingerprint, SLOT, stream=False)
    with pytest.raises(ConfigError, match="another host cannot map the pool"):
        RemoteTier(ServerAccess(Address("", "127.0.0.1", port), own))


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o600)
    return file


def test_a_token_must_be_known_to_both(port, token_file):
    with serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file) as server:
        for wrong in (None, b"another secret of enough bytes"):
            with pytest.raises(ConfigError, match="does not know the server's token"):
                RemoteTier(cache_server(port, token=wrong))
        with engine(cache_server(port, token=TOKEN)) as store, attached(server.access()) as near:
            save(near, run(1, 2))
            assert near.lookup(run(1, 2)).ready == 2, "it is answered after the commit"
            assert load(store, run(1, 2)) == ["remote"] * 2


def test_a_server_that_does_not_know_our_token_gets_no_kv(server, port):
    with pytest.raises(ConfigError, match="does not know our token"):
        RemoteTier(cache_server(port, token=TOKEN))


def test_a_proof_is_of_one_connection_only(port, token_file):
    with serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file):
        own = replace(cache_server(port).hello, nonce=os.urandom(32))
        heard = wire.Challenge(wire.VERSION, bytes(32))
        replayed = replace(own, proof=client_proof(TOKEN, heard, own))
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
            sock.sendall(wire.frame(replayed))
            inbox: Inbox[wire.Challenge | wire.Refused | wire.Welcome] = Inbox(
                wire.Challenge | wire.Refused | wire.Welcome
            )
            said = []
            while data := sock.recv(4096):
                said += list(feed(inbox, data))
        assert isinstance(said[-1], wire.Refused) and "token" in said[-1].reason


def test_what_an_impostor_recorded_of_a_server_convinces_no_engine(port, token_file):
    recorded = bytearray()

    def record(data, away):
        if away:
            recorded.extend(data)
        return data

    with (
        serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file),
        relay(port, record) as tapped,
    ):
        RemoteTier(cache_server(tapped, token=TOKEN)).close()
    inbox: Inbox[wire.Challenge | wire.Welcome] = Inbox(wire.Challenge | wire.Welcome)
    said = list(feed(inbox, bytes(recorded)))
    assert [type(each) for each in said] == [wire.Challenge, wire.Welcome]

    def replay(client):
        client.sendall(wire.frame(said[0]))
        hear(client, Inbox(wire.Hello))
        client.sendall(wire.frame(said[1]))

    with (
        rogue(None, replay) as address,
        pytest.raises(ConfigError, match="does not know our token"),
    ):
        RemoteTier(cache_server(address.port, token=TOKEN))


def test_nobody_there_is_an_error_that_says_where(port):
    from kvtier.client.connect import enter

    with pytest.raises(TierError, match=f"no kvtier server at tcp://127.0.0.1:{port}"):
        enter(cache_server(port))
