"""A real server that follows engines' event streams, which vLLM's own publisher writes: lookup
answers for each engine, and never with what is gone."""

import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kvtier.bench.processes.servers import free_port
from tests.admin_server import AdminServer, administered
from tests.child_process import wait_for
from tests.server_process import short_folder

kv_events = pytest.importorskip("vllm.distributed.kv_events")

BLOCK = 16
TOKENS = list(range(8 * BLOCK))


def stored(first, last, medium="GPU", **more):
    """Blocks of :data:`TOKENS`, as vLLM publishes them."""
    given: dict[str, Any] = {
        "block_hashes": [number.to_bytes(32, "big") for number in range(first, last)],
        "parent_block_hash": (first - 1).to_bytes(32, "big") if first else None,
        "token_ids": TOKENS[first * BLOCK : last * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    return kv_events.BlockStored(**(given | more))


def removed(first, last, medium="GPU"):
    return kv_events.BlockRemoved(block_hashes=stored(first, last).block_hashes, medium=medium)


class Lossy:
    """A publisher's socket that is full: what is sent is lost."""

    def send_multipart(self, frames):
        pass


class Publisher:
    """vLLM's, at a place that it keeps. What it published is sent when :meth:`say` returns."""

    def __init__(self, folder, name, *, replay=True):
        self.name = name
        self._at = f"ipc://{folder}/{name}"
        self._replay = f"{self._at}r" if replay else None
        self.start()

    @property
    def stream(self):
        return f"{self.name}={self._at}" + (f"?replay={self._replay}" if self._replay else "")

    def start(self):
        self._own = kv_events.ZmqEventPublisher(0, self._at, self._replay, buffer_steps=6)

    def stop(self):
        self._own.shutdown()

    def say(self, *events, lost=False):
        socket = self._own._pub
        if lost:
            self._own._pub = Lossy()
        self._own.publish(kv_events.KVEventBatch(ts=0.0, events=list(events)))
        wait_for(lambda: not self._own._event_queue.unfinished_tasks, "published")
        self._own._pub = socket


class _Nonsense(msgspec.Struct, array_like=True):
    ts: str = "?"
    data_parallel_rank: int | None = None


@contextmanager
def followed(*names, replay=True):
    with short_folder() as folder:
        publishers = [Publisher(folder, name, replay=replay) for name in names]
        try:
            with administered(admin_engines=",".join(one.stream for one in publishers)) as server:
                for publisher in publishers:
                    is_followed(server, publisher, replay=replay)
                yield server, publishers
        finally:
            for publisher in publishers:
                publisher.stop()


def is_followed(server, publisher, *, replay):
    """Nothing says that a publisher has taken a subscription in. Without a replay what it publishes
    before is lost, so it says nothing, until that is heard."""
    wait_for(lambda: seen(server, publisher.name)[2], "followed")

    def heard():
        publisher.say()
        events = "kvtier_engine_stream_events_total"
        return server.metric(events, engine=publisher.name, event="message") > 0

    if not replay:
        wait_for(heard, "its subscription is taken in")


def seen(server, name="engine-1", **asked):
    answer = server.lookup(**({"tokens": TOKENS} | asked))
    (engine,) = (one for one in answer["engines"] if one["engine"] == name)
    tiers = {one["tier"]: one["tokens"] // BLOCK for one in engine["tiers"] if one["tokens"]}
    return engine["tokens"] // BLOCK, tiers, engine["followed"]


def until(server, blocks, name="engine-1", **asked):
    wait_for(lambda: seen(server, name, **asked)[0] == blocks, f"{blocks} blocks")


def test_a_lookup_answers_for_each_engine_and_each_of_its_tiers():
    with followed("engine-1", "engine-2") as (server, (one, two)):
        one.say(stored(0, 4), stored(0, 6, "CPU"))
        two.say(stored(0, 2, extra_keys=[["tenant"], None]))
        until(server, 6)
        until(server, 2, "engine-2", salt="tenant")
        assert seen(server) == (6, {"gpu": 4, "cpu": 6}, True)
        assert seen(server, "engine-2") == (0, {}, True), "what is salted is another prompt's"
        one.say(removed(2, 4), removed(5, 6, "CPU"))
        until(server, 5)
        assert seen(server) == (5, {"gpu": 2, "cpu": 5}, True)
        assert seen(server, tokens=TOKENS[: 3 * BLOCK + 1])[0] == 3
        assert server.lookup(keys=[])["engines"] == []
        assert server.metric("kvtier_engine_followed", engine="engine-1") == 1
        assert server.metric("kvtier_engine_blocks", engine="engine-1", tier="cpu") == 5
        two.stop()
        wait_for(lambda: not seen(server, "engine-2", salt="tenant")[2], "the engine is gone")
        assert seen(server, "engine-2", salt="tenant") == (0, {}, False)
        assert seen(server)[0] == 5, "nobody else's picture is touched"


def test_what_an_engine_said_before_the_server_began_is_replayed():
    with short_folder() as folder:
        publisher = Publisher(folder, "engine-1")
        try:
            publisher.say(stored(0, 3))
            publisher.say(removed(2, 3))
            with administered(admin_engines=publisher.stream) as server:
                until(server, 2)
        finally:
            publisher.stop()


def test_an_engine_that_comes_again_is_known_by_what_it_has_now():
    with followed("engine-1") as (server, (one,)):
        one.say(stored(0, 5))
        until(server, 5)
        one.stop()
        until(server, 0)
        one.start()
        one.say(stored(0, 1))
        until(server, 1)


def test_a_message_that_was_lost_is_replayed_also_when_nothing_follows():
    with followed("engine-1") as (server, (one,)):
        one.say(stored(0, 3))
        until(server, 3)
        one.say(removed(1, 3), lost=True)
        one.say(stored(6, 7))
        until(server, 1)
        assert server.metric("kvtier_engine_stream_events_total", event="gap") == 1
        one.say(removed(0, 1), lost=True)
        until(server, 0)


@pytest.mark.parametrize("replay", [True, False])
def test_what_was_lost_for_good_makes_all_that_was_said_unsure(replay):
    with followed("engine-1", replay=replay) as (server, (one,)):
        one.say(stored(0, 3))
        until(server, 3)
        for _ in range(7):  # more than the replay buffer has
            one.say(removed(1, 3), lost=True)
        one.say(stored(7, 8, parent_block_hash=None, token_ids=[9] * BLOCK))
        until(server, 0)
        until(server, 1, tokens=[9] * BLOCK)


def test_a_message_without_sense_costs_the_picture_and_no_more():
    with followed("engine-1", "engine-2") as (server, (one, two)):
        two.say(stored(0, 3))
        for nonsense in (_Nonsense(), kv_events.KVEventBatch(0.0, [stored(0, 1, "x" * 100)])):
            one.say(stored(0, 3))
            until(server, 3)
            one._own.publish(nonsense)
            until(server, 0)
        assert server.metric("kvtier_engine_stream_events_total", event="refused") == 2
        one.say(stored(0, 2))
        until(server, 2)
        until(server, 3, "engine-2")


def test_a_message_that_is_too_long_is_not_read():
    with followed("engine-1") as (server, (one,)):
        one.say(stored(0, 2, session_id="x" * (33 << 20)))
        events = "kvtier_engine_stream_events_total"
        wait_for(lambda: server.metric(events, event="dropped") >= 1, "the connection has ended")
        wait_for(lambda: seen(server)[2], "it is followed again")
        assert seen(server)[0] == 0
        assert server.metric(events, event="message") == 0


_SILENT = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.PUB)
socket.bind(sys.argv[1])
for number in range(100000):
    socket.send_multipart([b"", number.to_bytes(8, "big"), bytes.fromhex(sys.argv[2])])
    time.sleep(0.05)
"""


def test_an_engine_that_is_stopped_is_not_known_any_more_and_then_again():
    payload = msgspec.msgpack.encode(kv_events.KVEventBatch(ts=0.0, events=[stored(0, 3)]))
    at = f"tcp://127.0.0.1:{free_port()}"
    with (
        subprocess.Popen([sys.executable, "-c", _SILENT, at, payload.hex()]) as engine,
        administered(admin_engines=f"engine-1={at}") as server,
    ):
        try:
            until(server, 3)
            engine.send_signal(signal.SIGSTOP)
            until(server, 0)
            assert not seen(server)[2]
            engine.send_signal(signal.SIGCONT)
            until(server, 3)
        finally:
            engine.kill()


def test_tokens_alone_are_asked_of_engines_only():
    with administered() as server:
        refused = server.ask("POST", "/v1/lookup", {"tokens": TOKENS})
        assert (refused.status, refused.body["what"]) == (400, "not one way to name chunks")
    with followed("engine-1") as (server, _):
        fingerprint = "ab" * 32
        answer = server.lookup(tokens=TOKENS, fingerprint=fingerprint, chunk_tokens=BLOCK)
        assert (answer["chunks"], len(answer["engines"])) == (8, 1)
        assert server.lookup(tokens=TOKENS, fingerprint=fingerprint, extra="00")["engines"] == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"admin_engines": "engine-1=http://10.0.0.1:5557"}, "name=tcp://host:port?replay=port"),
        ({"admin_engines": "a=tcp://h:1,a=tcp://h:2"}, "name=tcp://host:port?replay=port"),
        ({"admin_engines": "a=ipc:///x?replay=7"}, "name=tcp://host:port?replay=port"),
        ({"admin_engines": "a=tcp://h:1", "admin": "off"}, "lookup is a part of admin"),
        (
            {"admin_engines": "a=tcp://h:1", "admin_token_file": None},
            "has no effect without admin_token_file",
        ),
    ],
)
def test_what_makes_no_sense_ends_the_start_in_words(settings, says):
    with short_folder() as folder:
        assert says in AdminServer(folder, **settings).refusal()
