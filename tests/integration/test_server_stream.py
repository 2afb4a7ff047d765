"""A real server's own stream of KV events: who follows it by vLLM's format sees what the server
holds, to the block, also after a restart. Slow followers cost nobody anything."""

import random
from contextlib import contextmanager, suppress
from itertools import chain, takewhile
from typing import Any

import pytest
import zmq

from kvtier.bench.processes.servers import free_port
from kvtier.client.heard import Heard
from tests.admin_server import administered
from tests.announcing import BLOCK, CHUNK, Announcing, Asked, layout
from tests.child_process import DEADLINE_S, wait_for
from tests.integration.dynamo import DynamoIndexer
from tests.server_process import SLOT, ServerProcess, at_rest, attached, short_folder, told_all

kv_events = pytest.importorskip("vllm.distributed.kv_events")

LAYOUT = layout(SLOT)
PROMPTS, LENGTH = 12, 6
OPERATIONS = 3000
END = (2**64 - 1).to_bytes(8, "big")


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    """vLLM publishes 64 bits of each hash by default."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Engine(Announcing):
    """An engine's client, with what announces its chunks."""

    def __init__(self, client, number=0):
        super().__init__(client)
        self.client, self._number = client, number

    def asked(self, prompt, chunks=LENGTH):
        return Asked(prompt, chunks, self._number)

    def name(self, request):
        self.announcer.events()
        super().name(request)

    def act(self, rng):
        request, what = self.asked(rng.randrange(PROMPTS), rng.randint(1, LENGTH)), rng.random()
        if what < 0.45:
            self.save(request, fails=rng.random() < 0.1)
        elif what < 0.8:
            self.name(request)
            with self.client.load(request.keys) as load:
                load.poll()
        elif what < 0.99:
            self.client.invalidate(request.keys[-1:])
        else:
            self.client.invalidate_all()

    def settle(self):
        """Step until there is nothing to be heard or told, and the server has published all."""
        at_rest(self.client)
        told_all(self.watched, self.announcer.events)
        self.client.stats()  # it is answered after the announcements before it


class Subscriber:
    """As vLLM's example: by its own classes, and what is missing is asked for."""

    def __init__(self, stream):
        from msgspec.msgpack import Decoder

        endpoint, _, self._replay = stream.partition("?replay=")
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._decode = Decoder(kv_events.KVEventBatch).decode
        self._next = 0
        self.held: dict[tuple[str, str | None], set[bytes]] = {}
        self.odd = 0
        self.replay()

    def close(self):
        self._context.destroy(linger=0)

    def replay(self):
        with self._context.socket(zmq.DEALER) as asking:
            asking.connect(self._replay)
            asking.send_multipart([b"", self._next.to_bytes(8, "big")])
            while asking.poll(int(1000 * DEADLINE_S)):
                *_, number, payload = asking.recv_multipart()
                if number == END:
                    return
                self._apply(number, payload)
        raise AssertionError("a replay has not come to its end")

    def hear(self):
        while self._socket.poll(10):
            _, number, payload = self._socket.recv_multipart()
            seen = int.from_bytes(number, "big")
            if seen < self._next:  # another server
                self._next = 0
                self.held.clear()
            if seen > self._next:
                self.replay()
            if seen == self._next:
                self._apply(number, payload)
        return self

    def _apply(self, number, payload):
        assert int.from_bytes(number, "big") == self._next
        self._next += 1
        for event in self._decode(payload).events:
            if isinstance(event, kv_events.AllBlocksCleared):
                self.held.clear()
                continue
            held = self.held.setdefault((event.medium, event.ownership), set())
            named = set(event.block_hashes)
            if isinstance(event, kv_events.BlockRemoved):
                self.odd += not named <= held
                held -= named
            else:
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                self.odd += bool(named & held)
                held |= named

    @property
    def seen(self):
        return {medium: len(held) for (medium, _), held in self.held.items() if held}


def truth(engine, requests, *, gaps=True):
    """Blocks by medium, as the server says when it is asked for one chunk after the other. Without
    ``gaps``: those that a prompt reaches."""
    found: dict[str, int] = {}
    for request in requests:
        places = [engine.watched.places([key])[0] for key in request.keys]
        for place in chain.from_iterable(places if gaps else takewhile(bool, places)):
            medium = "CPU" if place == 0 else "STORAGE"
            found[medium] = found.get(medium, 0) + CHUNK // BLOCK
    return found


@contextmanager
def publishing(**settings):
    with short_folder() as folder:
        stream = f"ipc://{folder}/events?replay=ipc://{folder}/replay"
        given: dict[str, Any] = {"nvme_path": folder / "nvme", "nvme_bytes": 40 * SLOT}
        given |= {"server_events": stream} | settings
        given = {name: value for name, value in given.items() if value is not None}
        with ServerProcess(folder, **given) as server:
            yield server, stream


@contextmanager
def subscribed(stream):
    subscriber = Subscriber(stream)
    try:
        yield subscriber
    finally:
        subscriber.close()


def agree(subscriber, engine, requests, *, gaps=True):
    def same():
        subscriber.hear()
        return subscriber.seen == truth(engine, requests, gaps=gaps)

    with suppress(AssertionError):
        wait_for(same, "what is published is what the server holds")
    assert subscriber.seen == truth(engine, requests, gaps=gaps)


def named(engine, others=()):
    """Every prompt whole and named, so that no chunk has lost its parent."""
    requests = [engine.asked(prompt) for prompt in range(PROMPTS)]
    for request in requests:
        engine.save(request)
        for one in (engine, *others):
            one.settle()
    for request in requests:
        engine.name(request)
        engine.settle()
    return requests


def test_at_rest_a_subscriber_sees_what_the_server_holds_also_after_a_restart():
    rng = random.Random(5)
    with (
        publishing() as (server, stream),
        attached(server.access(LAYOUT)) as one,
        attached(server.access(LAYOUT)) as two,
        subscribed(stream) as early,
    ):
        engines = [Engine(one, 1), Engine(two, 2)]
        for number in range(OPERATIONS):
            engine = rng.choice(engines)
            engine.act(rng)
            if rng.random() < 0.5:
                engine.announcer.events()
            early.hear() if number % 50 == 0 else None
        requests = named(engines[0], engines[1:])
        agree(early, engines[0], requests)
        assert early.seen["CPU"] > 0 and early.seen["STORAGE"] > 0
        assert not early.odd, "nothing is published twice, or withdrawn unpublished"
        with subscribed(stream) as late:
            agree(late, engines[0], requests)
            assert late.held == early.held, "hashes are those of one engine"
        server.stop()
        wait_for(lambda: not early.hear().seen, "a server that ends says that nothing can be had")
        wait_for(lambda: one.stats().get("lost") == 1, "the engine has noticed")
        server.start()
        wait_for(lambda: one.pool is not None, "attached again")
        for request in requests:
            engines[0].name(request)
            engines[0].settle()
        agree(early, engines[0], requests, gaps=False)
        assert early.seen.keys() == {"STORAGE"}
        agree(early, engines[0], named(engines[0]))
        one.invalidate_all()
        one.stats()
        agree(early, engines[0], requests)
        assert not early.seen


def test_another_servers_lookup_finds_prompts_in_the_stream():
    stream = f"tcp://127.0.0.1:{free_port()}?replay={free_port()}"
    with publishing(server_events=stream) as (server, _), attached(server.access(LAYOUT)) as client:
        engine, request = Engine(client), Asked(1, LENGTH)
        engine.save(request)
        engine.settle()
        with administered(admin_engines=f"host-1={stream}") as follower:

            def found(tokens):
                (one,) = follower.lookup(tokens=tokens)["engines"]
                return {tier["tier"]: tier["tokens"] for tier in one["tiers"] if tier["tokens"]}

            whole = {"cpu": LENGTH * CHUNK, "storage": LENGTH * CHUNK}
            wait_for(lambda: found(request.all_token_ids) == whole, "both tiers are followed")
            assert found([7, *request.all_token_ids]) == {}
            server.stop()
            wait_for(lambda: not found(request.all_token_ids), "the server is gone")


def test_dynamos_indexer_follows_a_server_as_it_follows_an_engine(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
    with (
        DynamoIndexer(tmp_path) as dynamo,
        publishing() as (server, stream),
        attached(server.access(LAYOUT)) as client,
    ):
        engine, request = Engine(client), Asked(1, LENGTH)
        dynamo.indexer.register(7, stream.partition("?")[0], BLOCK)
        seeds = iter(range(20, 1000))

        def known():
            other = engine.asked(next(seeds) % 200, 1)
            engine.save(other)
            engine.settle()
            return 7 in dynamo.indexer.scores(other.all_token_ids)

        wait_for(known, "the indexer hears the server")
        engine.save(request)
        engine.settle()
        wait_for(
            lambda: (
                dynamo.indexer.scores(request.all_token_ids).get(7, {}).get("disk")
                == LENGTH * CHUNK
            ),
            "the prompt is found",
        )


def event(request, **more):
    given: dict[str, Any] = {
        "block_hashes": request.block_hashes[: CHUNK // BLOCK],
        "parent_block_hash": None,
        "token_ids": request.all_token_ids[:CHUNK],
        "block_size": BLOCK,
        "lora_id": None,
        "lora_name": None,
        "medium": "CPU",
    }
    return given | more


def test_what_clients_name_their_sessions_and_salts_costs_no_engine_its_server():
    with (
        publishing() as (server, stream),
        attached(server.access(LAYOUT)) as client,
        subscribed(stream) as subscriber,
    ):
        engine, request = Engine(client), Asked(1, LENGTH)
        with client.save(request.keys[:1]) as lease:
            lease.commit()
        for odd in (
            {"session_id": "\ud800"},
            {"extra_keys": [["x" * 3_000_000], None]},
            {"extra_keys": [[object()], None]},
            {"session_id": "s" * 100_000, "lora_name": "l" * 100_000},
        ):
            engine.watched.announce(request.keys[0], 0, event(request, **odd))
        engine.settle()
        wait_for(lambda: subscriber.hear().seen == {"CPU": 2}, "the last one is published")
        assert not client.stats().get("lost")


def test_more_than_a_server_reads_at_once_waits_and_is_bounded():
    with publishing() as (server, _), attached(server.access(LAYOUT)) as client:
        engine, request = Engine(client), Asked(1, LENGTH)
        assert isinstance(engine.watched, Heard)
        for _ in range(20_000):
            engine.watched.announce(request.keys[0], 0, event(request))
        waited = len(engine.watched._announced)
        assert engine.watched.has_changes, "an engine without work goes on"
        assert 8000 < len(engine.watched._announced) < waited < 8200

        def sent():
            engine.watched.changes()
            return not engine.watched._announced

        wait_for(sent, "all is sent")
        assert not client.stats().get("lost")


def test_a_server_without_a_stream_is_told_nothing():
    with publishing(server_events=None) as (server, _), attached(server.access(LAYOUT)) as client:
        engine = Engine(client)
        assert isinstance(engine.watched, Heard)
        engine.save(Asked(1, LENGTH))
        engine.settle()
        assert engine.announcer.events() == [] and not engine.watched._announced
        assert not client.stats().get("lost")
