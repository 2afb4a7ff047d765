"""TLS handshakes take turns: a tenth of the loop, address by address, and none for those who say
nothing."""

import asyncio
import gc
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.server.strangers import _MOST_WAITING_BYTES, Turns, accepted
from tests.certificates import make_certificates
from tests.child_process import DEADLINE_S, wait_for


class Bench:
    """Turns over a loop whose time and processor stand still unless they are moved."""

    def __init__(self):
        self.cpu, self.timers, self.done = 0.0, list[tuple[float, Callable[[], None]]](), ""
        loop: Any = SimpleNamespace(call_later=lambda *timer: self.timers.append(timer))
        self.turns = Turns(loop, lambda: self.cpu)

    def work(self, name, cost_s=0.004):
        def work():
            self.cpu += cost_s
            self.done += name

        return work

    def rest(self):
        ((seconds, call),) = self.timers
        self.timers.clear()
        call()
        return seconds


def test_a_handshake_at_rest_is_done_at_once_and_the_next_after_nine_times_as_long():
    bench = Bench()
    bench.turns.wait("a", bench.work("1"))
    bench.turns.wait("a", bench.work("2", 0.01))
    assert bench.done == "1"
    assert bench.rest() == pytest.approx(0.036)
    assert bench.done == "12"
    bench.turns.charge(bench.work("-", 0.001))  # the end of the first
    assert bench.rest() == pytest.approx(0.09)
    assert bench.timers == [], "nobody waits"
    bench.turns.wait("b", bench.work("3"))
    assert bench.done == "12-3"
    assert bench.rest() == pytest.approx(9 * 0.005), "it had to be paid for"


def test_a_turn_lasts_until_the_loop_has_answered_and_is_paid_for_then():
    bench = Bench()
    for name in "12":
        bench.turns.wait("a", bench.work(name, 0.0))
    bench.turns.charge(bench.work("-"))
    assert bench.done == "1-"
    assert bench.rest() == 0.005
    assert bench.done == "1-2"
    assert bench.rest() == pytest.approx(0.036)


def test_addresses_take_turns_and_of_one_the_last_goes_first():
    bench = Bench()
    for origin, name in zip("xaaabbc", "0123456", strict=True):
        bench.turns.wait(origin, bench.work(name))
    while bench.timers:
        bench.rest()
    assert bench.done == "0" + "356" + "24" + "1"


def test_who_is_gone_has_no_turn_and_nothing_of_it_is_kept():
    bench = Bench()
    works = [bench.work(str(number)) for number in range(4)]
    for work in works:
        bench.turns.wait("a", work)
    for work in (works[3], works[1], works[2], works[0]):
        bench.turns.leave("a", work)
    assert bench.turns._waiting == {}
    bench.rest()
    assert (bench.done, bench.timers) == ("0", [])


def test_a_turn_that_fails_ends_nobody_elses():
    bench = Bench()

    def fails():
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        bench.turns.wait("a", fails)
    bench.turns.wait("a", bench.work("1"))
    bench.rest()
    assert bench.done == "1"


class Visited(asyncio.Protocol):
    def connection_made(self, transport):
        transport.abort()


async def visited(folder, act, *, rests=True):
    """Why a connection was not made on which the client does ``act`` in a thread of its own.
    None: it was. ``rests``: somebody else had a turn."""
    make_certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ours-host.pem", folder / "ours-host.key")
    loop = asyncio.get_running_loop()
    turns = Turns(loop)
    turns._rests = rests
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname(), DEADLINE_S)
        ours, _ = listening.accept()
    ours.setblocking(False)
    acting = loop.run_in_executor(None, act, turns, theirs)
    try:
        await asyncio.wait_for(turns.greet(ours, Visited(), context, "a"), DEADLINE_S)
    except OSError as error:
        return error
    finally:
        await acting
        theirs.close()
        assert turns._waiting == {}
    return None


def test_a_handshake_waits_for_its_turn_and_is_paid_for(tmp_path):
    def act(turns, sock):
        context = ssl.create_default_context(cafile=tmp_path / "ours.pem")
        shaking = context.wrap_socket(
            sock, server_hostname="localhost", do_handshake_on_connect=False
        )
        shaking.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            shaking.do_handshake()
        wait_for(lambda: "a" in turns._waiting, "it waits")
        with pytest.raises(ssl.SSLWantReadError):
            shaking.do_handshake()
        assert turns._spent_s == 0.0
        turns.loop.call_soon_threadsafe(turns._waiting["a"].pop())
        shaking.settimeout(DEADLINE_S)
        shaking.do_handshake()
        assert turns._spent_s > 0.0
        shaking.close()

    assert asyncio.run(visited(tmp_path, act)) is None


def test_who_sends_too_much_before_its_turn_is_cut_off(tmp_path):
    def act(_, sock):
        sock.sendall(b"\x16" * _MOST_WAITING_BYTES)
        with suppress(ConnectionError):
            assert sock.recv(1) == b"", "cut off"

    error = asyncio.run(visited(tmp_path, act))
    assert "too much before its handshake" in str(error)


def test_who_says_nothing_takes_no_turn_and_who_leaves_gives_it_back(tmp_path):
    def act(turns, sock):
        assert turns._waiting == {}
        sock.sendall(b"\x16")
        wait_for(lambda: "a" in turns._waiting, "it waits")
        sock.shutdown(socket.SHUT_RDWR)

    assert isinstance(asyncio.run(visited(tmp_path, act)), ConnectionResetError)


@pytest.mark.parametrize("first", [b"", b"\x16"], ids=["silent", "waiting"])
def test_the_time_for_a_handshake_ends_before_its_turn_too(tmp_path, monkeypatch, first):
    monkeypatch.setattr("kvtier.server.strangers._HANDSHAKE_S", 0.05)

    def act(_, sock):
        sock.sendall(first)
        with suppress(ConnectionError):
            assert sock.recv(1) == b"", "cut off"

    assert str(asyncio.run(visited(tmp_path, act))) == "no TLS handshake within 0.05 s"


@pytest.mark.parametrize("end", ["leaves", "stalls", "junk"])
def test_what_openssl_has_for_a_handshake_that_fails_goes_at_once(tmp_path, monkeypatch, end):
    if end == "stalls":
        monkeypatch.setattr("kvtier.server.strangers._HANDSHAKE_S", 0.2)

    def act(turns, sock):
        first = ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), first).do_handshake()
        sock.sendall(b"x" * 100 if end == "junk" else first.read())
        if end == "leaves":
            wait_for(lambda: turns._spent_s > 0.0, "it was answered")
            sock.shutdown(socket.SHUT_RDWR)

    def held():
        return [one for one in gc.get_objects() if type(one).__name__ == "Charged"]

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(visited(tmp_path, act, rests=False)) is not None
        assert held() == []
    finally:
        gc.enable()


def test_connections_of_strangers_come_one_in_two_milliseconds():
    slept = list[float]()

    async def scenario():
        loop, pause = asyncio.get_running_loop(), asyncio.sleep

        async def sleep(seconds):
            slept.append(seconds)
            await pause(0)

        with (
            pytest.MonkeyPatch.context() as changed,
            socket.create_server(("127.0.0.1", 0)) as listening,
        ):
            changed.setattr(asyncio, "sleep", sleep)
            listening.setblocking(False)
            clients = [socket.create_connection(listening.getsockname()) for _ in range(3)]
            async for sock, _ in accepted(loop, listening, lambda error: pytest.fail(str(error))):
                sock.close()
                clients.pop().close()
                if not clients:
                    break

    asyncio.run(scenario())
    assert slept == [0.002] * 2
