"""What the admin interface remembers and logs is bounded."""

import asyncio
import logging
import socket
import ssl
import threading
from typing import Any

import pytest
from aiohttp import web

from kvtier.admin.places import READ_BYTES, Places
from kvtier.protocol.admin_proof import VALID_S, Seen, body_digest, signed
from kvtier.server.strangers import LogLimit
from tests.certificates import make_certificates
from tests.child_process import DEADLINE_S
from tests.clock import Clock


def test_requests_that_were_served_are_remembered_for_as_long_as_they_hold():
    seen = Seen(most=2)
    assert [seen.first(one, 0.0) for one in ("a", "a", "b", "c")] == [True, False, True, False], (
        "c: no place"
    )
    assert not seen.first("a", 2 * VALID_S), "a signer's clock may be a minute ahead"
    assert seen.first("c", 2 * VALID_S + 1)
    token, now = b"x" * 32, 1e9
    for offset, holds in (
        (0, True),
        (VALID_S, True),
        (-VALID_S, True),
        (VALID_S + 1, False),
        (-VALID_S - 1, False),
    ):
        assert (
            body_digest(token, signed(token, "GET", "/", b"", now + offset), "GET", "/", now)
            is not None
        ) is holds


def test_lines_that_strangers_cause_are_few_and_say_how_many_were_left_out(caplog):
    clock = Clock()
    limit = LogLimit(3, 10.0, clock)
    logger = logging.getLogger("kvtier.test_admin_bounds")
    logger.addFilter(limit)
    try:
        with caplog.at_level(logging.ERROR, logger.name):
            for number in range(8):
                cause = ValueError("forged\nline" + "x" * 1000)
                logger.error("a request from %s", number, exc_info=cause)
            clock.now += 10.0
            logger.error("later")
    finally:
        logger.removeFilter(limit)
    assert len(caplog.records) == 4
    assert caplog.messages[3] == "later (5 more such lines were left out)"
    assert all(
        record.exc_info is None and "\n" not in record.msg and len(record.msg) <= 300
        for record in caplog.records
    )


def test_a_line_that_comes_every_second_is_said_once_in_ten_minutes():
    clock, said = Clock(), list[str]()
    limit = LogLimit(10, 10.0, clock)

    def say(text):
        record = logging.LogRecord("a", logging.WARNING, "", 0, text, (), None)
        if limit.filter(record):
            said.append(record.getMessage())

    for _ in range(1201):
        say("a probe")
        clock.now += 1.0
    assert said == ["a probe", *["a probe (599 more such lines were left out)"] * 2]
    for number in range(1000):
        say(f"{number}")
        clock.now += 1.0
    assert len(limit._passed_at) <= 64
    say("a probe")
    assert said[-1] == "a probe", "a text that is forgotten is said"


@pytest.mark.parametrize("tls", [False, True])
def test_one_turn_reads_a_few_kib_of_a_connection(tmp_path, *, tls):
    sent = bytes(512 << 10)

    async def scenario():
        loop, read, whole = asyncio.get_running_loop(), list[int](), asyncio.Event()

        class Visited(asyncio.Protocol):
            transport: Any = None

            def connection_made(self, transport):
                self.transport = transport

            def data_received(self, data):
                read.append(len(data))
                if len(read) == 1:
                    self.transport.pause_reading()
                    after_turns(100, self.transport.resume_reading)
                if sum(read) >= len(sent):
                    whole.set()

        def after_turns(turns, call):
            if turns:
                loop.call_soon(after_turns, turns - 1, call)
            else:
                call()

        visited: Any = Visited()
        serve: Any = lambda: visited  # noqa: E731 - an aiohttp server makes a protocol a call
        ours, theirs = contexts(tmp_path) if tls else (None, None)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            client = socket.create_connection(listening.getsockname())
            client.setblocking(False)
            first = 0 if tls else client.send(sent)
            accepting = loop.create_task(Places(loop, ours).accept(listening, serve))
            name = "localhost" if tls else None
            _, writer = await asyncio.open_connection(sock=client, ssl=theirs, server_hostname=name)
            writer.write(sent[first:])
            await asyncio.wait_for(whole.wait(), DEADLINE_S)
            writer.close()
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        return read

    assert max(asyncio.run(scenario())) <= READ_BYTES


def test_a_request_that_has_come_is_read_before_its_time_is_over_however_busy_the_loop(monkeypatch):
    monkeypatch.setattr("kvtier.admin.places.FIRST_REQUEST_S", 0.01)

    async def scenario():
        loop = asyncio.get_running_loop()
        places = Places(loop, None)

        async def served(request):
            with places.request(request.protocol):
                return web.Response()

        def busy():
            threading.Event().wait(0.05)  # what others ask takes its time
            loop.call_soon(busy)

        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            with socket.create_connection(listening.getsockname(), DEADLINE_S) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                loop.call_soon(busy)
                accepting = loop.create_task(places.accept(listening, web.Server(served)))
                answer = await asyncio.to_thread(client.recv, 15)
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        return answer

    assert asyncio.run(scenario()) == b"HTTP/1.1 200 OK"


def contexts(folder):
    make_certificates(folder)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "ours-host.pem", folder / "ours-host.key")
    return server, ssl.create_default_context(cafile=folder / "ours.pem")
