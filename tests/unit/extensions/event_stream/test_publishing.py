"""A server's publisher: where it listens, what it keeps for who comes late, and what it refuses."""

import asyncio
import logging
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvtier.bench.processes.servers import free_port
from kvtier.config.keys import Config
from kvtier.config.values import parse_stream
from kvtier.core.errors import ConfigError
from kvtier.core.pool import Pool
from kvtier.extensions.event_stream import publishing
from kvtier.protocol import kv_events
from kvtier.protocol.kv_events import AllBlocksCleared, BlockRemoved
from kvtier.server.server import Server
from kvtier.store.store import Store
from tests.child_process import DEADLINE_S
from tests.server_process import short_folder

END = (2**64 - 1).to_bytes(8, "big")


def gone(number, blocks=1):
    return BlockRemoved([number.to_bytes(8, "big")] * blocks, "CPU")


@pytest.fixture
def at():
    with short_folder() as folder:
        yield parse_stream(f"ipc://{folder}/events?replay=ipc://{folder}/replay")


def during(at, act):
    """Publish as a server does while ``act`` runs."""

    async def scenario():
        publisher = publishing.Publisher(at)
        server = Server(lambda slot_bytes: Store(Pool(2, 4096)), [])
        async with publisher.beside(server):
            assert server.announced is publisher.announced
            async with asyncio.timeout(DEADLINE_S):
                await act(publisher)
        await server.stop()

    asyncio.run(scenario())


async def replayed(at, begin):
    """Number and events of each message, asked as vLLM's subscribers do."""
    found = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        assert at.replay is not None
        socket.connect(at.replay)
        await socket.send_multipart([b"", begin.to_bytes(8, "big")])
        while (frames := await socket.recv_multipart())[-2] != END:
            found.append((int.from_bytes(frames[-2], "big"), kv_events.decode(frames[-1])))
    return found


def test_events_of_one_turn_are_one_message_and_the_first_says_that_nothing_holds(at):
    async def act(publisher):
        await asyncio.sleep(0)
        for number in range(3):
            publisher._add(gone(number))
        assert await replayed(at, 0) == [
            (0, [AllBlocksCleared()]),
            (1, [gone(number) for number in range(3)]),
        ]
        assert await replayed(at, 2) == []

    during(at, act)


def test_what_is_kept_for_who_comes_late_is_bounded(at, monkeypatch):
    monkeypatch.setattr(publishing, "_KEPT_MESSAGES", 5)
    monkeypatch.setattr(publishing, "_KEPT_BYTES", 1000)
    monkeypatch.setattr(publishing, "_MESSAGE_BYTES", 1)

    async def act(publisher):
        for number in range(20):
            publisher._add(gone(number))
        assert [number for number, _ in await replayed(at, 0)] == list(range(16, 21))
        for number in range(4):
            publisher._add(gone(number, 40))
        assert [number for number, _ in await replayed(at, 0)] == [23, 24]
        assert publisher._kept_bytes <= 1000

    during(at, act)


def test_a_client_that_does_not_read_its_replay_delays_no_other(at, monkeypatch):
    monkeypatch.setattr(publishing, "_PATIENCE_S", DEADLINE_S)

    async def act(publisher):
        for number in range(100):
            publisher._add(gone(number, 10_000))
        with zmq.Context() as context, context.socket(zmq.DEALER) as stuck:
            stuck.setsockopt(zmq.RCVHWM, 1)
            stuck.setsockopt(zmq.LINGER, 0)
            stuck.connect(at.replay or "")
            for _ in range(50):
                stuck.send_multipart([b"", bytes(8)])
            stuck.send_multipart([b"rubbish"])
            async with asyncio.timeout(publishing._PATIENCE_S / 2):
                numbers = [number for number, _ in await replayed(at, 0)]
        assert numbers == list(range(len(publisher._kept)))

    during(at, act)


def test_a_place_that_is_taken_is_an_error_before_engines_are_let_in():
    at = f"tcp://127.0.0.1:{free_port()}"
    first = publishing.Publisher(parse_stream(at))
    with pytest.raises(ConfigError, match="cannot listen at"):
        publishing.beside_server(Config().with_keys(server_events=at))
    first.close()


def test_every_address_that_other_users_reach_is_warned_of(caplog, at):
    for host, warned in (("127.0.0.1", True), ("[::1]", True), ("0.0.0.0", True), (None, False)):  # noqa: S104
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            try:
                one = publishing.Publisher(
                    parse_stream(f"tcp://{host}:{free_port()}") if host else at
                )
            except ConfigError:
                continue  # a host without IPv6
        one.close()
        assert ("reads the tokens and cache salts of all prompts" in caplog.text) == warned, host


def test_a_stream_in_a_folder_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        publishing.Publisher(parse_stream(f"ipc://{tmp_path}/events"))


def test_subscribers_are_told_that_a_server_ends(at):
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(at.endpoint)

        async def act(publisher):
            while not socket.poll(10):
                publisher._add(gone(1))
                await asyncio.sleep(0)

        during(at, act)
        heard: list[Any] = []
        while gone(1) not in heard or heard[-1] != AllBlocksCleared():
            assert socket.poll(int(1000 * DEADLINE_S)), heard[-2:]
            heard += kv_events.decode(socket.recv_multipart()[-1])
        assert not socket.poll(10)
