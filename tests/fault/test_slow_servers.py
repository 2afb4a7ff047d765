"""Servers that give one byte at a time, or take one: every call ends in a time of its own, however
many bytes move."""

import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest
import xxhash

from kvtier.client import connect, remote_tier
from kvtier.client.connect import ServerAccess, enter, hello
from kvtier.client.remote_tier import RemoteTier
from kvtier.core.errors import TierError
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.testing import content
from tests.child_process import DEADLINE_S, wait_for
from tests.clock import Clock
from tests.descriptors import descriptors
from tests.rogue_server import SLOTS, greet, hear, rogue
from tests.server_process import LAYOUT, SLOT, run, short_folder

BOUND_S = 0.3
"""In the place of seconds, for calls that a slow server would answer well in twice as long."""
KEY = run(1, 1)[0]


def dribble(client, data, pause_s):
    for at in range(len(data)):
        client.sendall(data[at : at + 1])
        time.sleep(pause_s)


def access(address, stream=True):
    return ServerAccess(address, hello(LAYOUT.fingerprint, SLOT, stream=stream))


@pytest.mark.parametrize("near", [True, False], ids=["unix", "tcp"])
@pytest.mark.parametrize("slow", ["challenge", "welcome"])
def test_a_greeting_that_comes_byte_by_byte(slow, near, monkeypatch):
    if slow == "challenge":
        monkeypatch.setattr(connect, "_CONNECT_S", BOUND_S)

    def say(client, message, slowly):
        said = wire.frame(message)
        dribble(client, said, 2 * BOUND_S / len(said) if slowly else 0.0)

    def script(client):
        say(client, wire.Challenge(wire.VERSION, bytes(32)), slow == "challenge")
        hear(client, Inbox(wire.Hello))
        say(client, wire.Welcome(SLOTS, SLOT, ["ram"], SLOTS), slow == "welcome")

    with (
        short_folder() as folder,
        rogue(folder / "sock" if near else None, script) as address,
        pytest.raises(TierError, match=r"timed out|not done within"),
    ):
        enter(access(address), BOUND_S if slow == "welcome" else DEADLINE_S)


def test_a_greeting_that_is_too_long():
    def script(client):
        client.sendall((1025).to_bytes(4, "little") + bytes(1025))
        hear(client, Inbox(wire.Hello))

    with (
        rogue(None, script) as address,
        pytest.raises(TierError, match="a frame of 1025 bytes, expected at most 1024"),
    ):
        enter(access(address))


def test_a_server_that_passes_descriptors_without_end():
    challenge = wire.frame(wire.Challenge(wire.VERSION, bytes(32)))
    passed: list[int] = []

    def script(client):
        for at in range(len(challenge)):
            socket.send_fds(client, [challenge[at : at + 1]], [client.fileno()] * 2)
            passed.append(at)
            time.sleep(0.01)

    with short_folder() as folder, rogue(folder / "sock", script) as address:
        before = descriptors()
        with pytest.raises(TierError, match="the server passed 4 descriptors"):
            enter(access(address, stream=False))
        assert len(passed) < len(challenge)
        wait_for(lambda: descriptors() <= before, "closed, and the thread's socket too")


def test_a_tls_handshake_that_is_not_answered(monkeypatch):
    monkeypatch.setattr(connect, "_CONNECT_S", BOUND_S)
    context = ssl.create_default_context()

    def script(client):
        dribble(client, b"\x16\x03\x03\x3f\xff\x02" + bytes(40), 2 * BOUND_S / 40)
        client.recv(1 << 16)
        hear(client, Inbox(wire.Hello))

    with rogue(None, script) as address:
        tls = ServerAccess(address, access(address).hello, None, context)
        with pytest.raises(TierError, match="timed out"):
            enter(tls)


def slow_answer(answer):
    def reply(client, asked):
        frame = wire.frame(answer(asked.id))
        dribble(client, frame, 2 * BOUND_S / len(frame))

    return reply


def slow_chunk(from_):
    """Twenty bytes of a chunk and its seal come slowly, from this one on."""

    def reply(client, asked):
        assert isinstance(asked, wire.Get)
        data = content(KEY, SLOT).tobytes()
        data += wire.frame(wire.Seal(xxhash.xxh3_128(asked.key + data).digest()))
        client.sendall(wire.frame(wire.Chunk(asked.id, SLOT)) + data[:from_])
        dribble(client, data[from_ : from_ + 20], 2 * BOUND_S / 20)
        client.sendall(data[from_ + 20 :])

    return reply


def slow_taker(client, asked):
    assert isinstance(asked, wire.Put)
    client.sendall(wire.frame(wire.Go(asked.id, True, False)))
    left = SLOT
    while left:
        left -= len(client.recv(min(left, SLOT // 20)))
        time.sleep(2 * BOUND_S / 20)
    hear(client, Inbox(wire.Seal))
    client.sendall(wire.frame(wire.Stored(asked.id, True)))


SLOW: dict[
    str,
    tuple[Callable[[RemoteTier], object], object, Callable[[socket.socket, wire.Message], None]],
] = {
    "find": (lambda tier: tier.find([KEY]), 0, slow_answer(lambda number: wire.Found(number, 1))),
    "read": (lambda tier: tier.read(KEY, memoryview(bytearray(SLOT))), None, slow_chunk(0)),
    "a read's end": (
        lambda tier: tier.read(KEY, memoryview(bytearray(SLOT))),
        None,
        slow_chunk(SLOT),
    ),
    "write": (lambda tier: tier.write(KEY, content(KEY, SLOT)), False, slow_taker),
    "delete": (lambda tier: tier.delete(KEY), None, slow_answer(wire.Done)),
}


def quick_to(tier, monkeypatch):
    monkeypatch.setattr(remote_tier, "_CALL_S", BOUND_S)
    monkeypatch.setattr(remote_tier, "_SLOWEST_BYTES_S", 1 << 40)


@pytest.mark.parametrize("call", SLOW)
def test_a_call_of_a_far_server_that_dribbles(call, monkeypatch):
    ask, nothing, reply = SLOW[call]

    def script(client):
        greet(client)
        inbox: Inbox[wire.Message] = Inbox(wire.StreamQuestion)
        while True:
            reply(client, hear(client, inbox))

    with rogue(None, script) as address:
        tier = RemoteTier(access(address))
        quick_to(tier, monkeypatch)
        assert ask(tier) == nothing
        assert tier.counts["failed"] == 1
        tier.close()


def test_a_chunk_that_is_not_taken_is_given_up(monkeypatch):
    size, took, ended = 32 << 20, [0], threading.Event()

    def script(client):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        greet(client)
        asked = hear(client, Inbox(wire.StreamQuestion))
        assert isinstance(asked, wire.Put)
        client.sendall(wire.frame(wire.Go(asked.id, True, False)))
        slow_until = time.monotonic() + 6 * BOUND_S
        try:
            while data := client.recv(1 << 16):
                took[0] += len(data)
                if time.monotonic() < slow_until:
                    time.sleep(0.02)
        finally:
            ended.set()

    with rogue(None, script) as address:
        tier = RemoteTier(ServerAccess(address, hello(LAYOUT.fingerprint, size, stream=True)))
        quick_to(tier, monkeypatch)
        assert tier.write(KEY, memoryview(bytes(size))) is False
        assert tier.counts["failed"] == 1
        assert ended.wait(DEADLINE_S)
        assert took[0] < size, "given up in the middle, and not when all was sent"
        tier.close()


def test_a_server_that_answers_another_question_is_not_believed():
    def script(client):
        greet(client)
        asked = hear(client, Inbox(wire.StreamQuestion))
        client.sendall(wire.frame(wire.Found(asked.id + 1, 1)))
        client.recv(1)

    with rogue(None, script) as address:
        tier = RemoteTier(access(address))
        assert (tier.find([KEY]), tier.counts["failed"]) == (0, 1)
        tier.close()


def test_a_server_that_is_away_is_left_alone_and_tried_again_by_one_read():
    def script(client):
        greet(client)
        inbox: Inbox[wire.Message] = Inbox(wire.StreamQuestion)
        while True:
            asked = hear(client, inbox)
            client.sendall(wire.frame(wire.Found(asked.id, 1)))

    clock, into = Clock(), memoryview(bytearray(SLOT))
    with rogue(None, script) as address:
        tier = RemoteTier(access(address), clock=clock)
        assert (tier.find([KEY]), tier.may_read(KEY), tier.open_breakers) == (1, True, 0)
        assert tier.read(KEY, into) is None, "that was no answer to a Get"
        assert (tier.may_read(KEY), tier.open_breakers) == (False, 1)
        assert tier.find([KEY]) == 0
        assert (tier.counts["failed"], tier.counts["breaker_trips"]) == (1, 1), "it was not asked"
        clock.now += 60.0
        assert [tier.may_read(KEY), tier.may_read(KEY)] == [True, False]
        assert (tier.find([KEY]), tier.may_read(KEY), tier.open_breakers) == (1, True, 0)
        tier.close()


def test_an_answer_that_is_too_long_is_not_read(caplog):
    def script(client):
        greet(client)
        hear(client, Inbox(wire.StreamQuestion))
        client.sendall((1 << 20).to_bytes(4, "little") + bytes(1 << 20))

    with rogue(None, script) as address:
        tier = RemoteTier(access(address))
        assert (tier.find([KEY]), tier.counts["failed"]) == (0, 1)
        assert "a frame of 1048576 bytes, expected at most 4096" in caplog.text
        tier.close()
