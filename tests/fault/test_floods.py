"""Clients that ask without end: everybody else has a turn after each millisecond of theirs. No
clock decides here: the server's own is turned by hand, and what is served between two messages of
an honest client is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

import pytest

from kvtier.client.connect import hello
from kvtier.core.chunk import ChunkLayout
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.server.session import Session
from kvtier.server.stream import ChunkStream
from kvtier.store.store import Store
from tests.loop_server import served, until

SLOT = 4096
LAYOUT = ChunkLayout(bytes(32), 1, 1, (SLOT,))
LONG = wire.joined(LAYOUT.keys(range(2000)))
_PIECES_A_TURN = 10


class Watch:
    """The server's clock: every look at it takes a tenth of a turn. And the order in which
    questions are begun."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.served: list[tuple[int, str]] = []
        for kind in (Session, ChunkStream):
            begin = kind.begin

            def begun(one, message, begin=begin):
                self.served.append((id(one), type(message).__name__))
                return begin(one, message)

            monkeypatch.setattr(kind, "begin", begun)

    def __call__(self):
        self.now += 0.001 / _PIECES_A_TURN
        return self.now


def run(monkeypatch, scenario):
    watch, store = Watch(monkeypatch), Store(Pool(4096, SLOT))

    async def beside():
        async with served(store) as server:
            server.clock = watch
            try:
                await scenario(server, watch)
            finally:
                for peer in Peer.made:
                    peer.writer.transport.abort()
                Peer.made.clear()

    asyncio.run(beside())
    return store


class Peer:
    """A client by hand, on the server's own loop: nothing is served while it does not wait."""

    made: ClassVar[list[Peer]] = []

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.made.append(self)

    @classmethod
    async def attached(cls, server, client=""):
        peer = cls(*await asyncio.open_unix_connection(server.listeners[0].address.path))
        return await peer._greet(hello(bytes(32), SLOT, stream=False, client=client))

    @classmethod
    async def cache_server(cls, server):
        peer = cls(*await asyncio.open_connection("127.0.0.1", server.listeners[1].address.port))
        return await peer._greet(hello(bytes(32), SLOT, stream=True))

    async def _greet(self, greeting):
        await self.answer()
        self.say(greeting)
        await self.answer()
        return self

    def say(self, *messages):
        self.writer.write(b"".join(map(wire.frame, messages)))

    async def answer(self):
        return await self.reader.readexactly(
            int.from_bytes(await self.reader.readexactly(4), "little")
        )


def between(watch, question):
    return next(at for at, (_, name) in enumerate(watch.served) if name == question)


FLOODS: dict[str, list[wire.Message]] = {
    "stats": [wire.StatsCall(1)] * 3000,
    "check": [wire.Check(1, False)] * 3000,
    "clear": [wire.InvalidateAllCall()] * 3000,
    "end": [wire.Invalidate(wire.joined(LAYOUT.keys([1])))] * 500,
    "lookup": [wire.LookupCall(1, LONG)] * 20,
    "save": [wire.Save(1, LONG)] * 20,
    "load": [wire.LoadCall(1, LONG, 0)] * 20,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_after_a_millisecond_of_a_flood_everybody_else_has_a_turn(flood, monkeypatch):
    async def scenario(server, watch):
        hostile, honest = await Peer.attached(server), await Peer.attached(server)
        hostile.say(*FLOODS[flood])
        honest.say(wire.Wait(7, 0), wire.Decline(b"", "slower"), wire.Poll(9, 1, 0))
        watch.served.clear()
        said = await honest.reader.read()
        assert b"lease 1 is not open" in said, "its last question was answered"
        assert between(watch, "Decline") <= 2 * _PIECES_A_TURN

    run(monkeypatch, scenario)


def test_one_message_is_worked_on_in_turns_with_those_of_others(monkeypatch):
    async def scenario(server, watch):
        large, small = await Peer.attached(server), await Peer.attached(server)
        large.say(wire.Check(1, False), wire.Save(2, LONG), wire.Check(3, False))
        begun = watch.now
        for number in range(3):
            small.say(wire.LookupCall(number, LONG[:40]))
            await small.answer()
        turns = (watch.now - begun) / 0.001
        assert turns <= 12
        found = (watch.served[-1][1], [name for _, name in watch.served].count("Check"))
        assert found != ("Check", 2)
        for _ in range(3):
            await large.answer()

    store = run(monkeypatch, scenario)
    store.check(idle=True)


def test_a_flood_over_tcp_has_its_turns_too(monkeypatch):
    async def scenario(server, watch):
        cache_server, honest = await Peer.cache_server(server), await Peer.attached(server)
        cache_server.say(*[wire.Delete(number, LONG[:40]) for number in range(1000)])
        honest.say(wire.LookupCall(1, LONG[:40]))
        watch.served.clear()
        await honest.answer()
        assert between(watch, "LookupCall") <= 2 * _PIECES_A_TURN

    run(monkeypatch, scenario)


@pytest.mark.parametrize(
    "question",
    [
        wire.Save(1, LONG),
        wire.LoadCall(1, LONG, 0),
        wire.InvalidateAllCall(),
        wire.Check(1, True),
        wire.Find(1, LONG),
    ],
)
def test_who_leaves_in_the_middle_of_a_long_question_leaves_nothing_behind(question, monkeypatch):
    far = isinstance(question, wire.Find)

    async def scenario(server, watch):
        leaver = await (Peer.cache_server(server) if far else Peer.attached(server))
        (size_class,) = server.size_classes.open.values()
        if far:
            with size_class.store.save(LAYOUT.keys(range(2000))) as lease:
                lease.commit()
        watch.served.clear()
        leaver.say(question)
        await until(lambda: bool(watch.served))
        leaver.writer.transport.abort()
        await until(lambda: not (server.connections or server.lingering))
        size_class.store.check(idle=True)
        assert size_class.users == 0
        assert size_class.shares.join().left == 3072, "three quarters of 4,096: nobody holds any"

    run(monkeypatch, scenario)


def test_what_a_client_calls_itself_cannot_forge_a_line_of_the_log(monkeypatch, caplog):
    async def scenario(server, watch):
        await Peer.attached(server, "x\n2026 WARNING kvtier.admin.http: cleared \x1b[31m")

    with caplog.at_level(logging.INFO, "kvtier.server"):
        run(monkeypatch, scenario)
    said = [record.getMessage() for record in caplog.records]
    assert any("cleared" in line for line in said)
    assert not any("\n" in line or "\x1b" in line for line in said)
