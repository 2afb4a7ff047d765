"""The doors that are open beside the engines' own: HTTP and event streams, against who has no right
there, and engines that lie."""

import gzip
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.admin import forms, http
from kvtier.bench.processes.servers import free_port
from kvtier.core.chunk import ChunkLayout
from kvtier.core.pool import Pool
from kvtier.core.steps import whole
from kvtier.extensions.engine_index import follow
from kvtier.protocol import admin_proof
from kvtier.store.store import Store
from tests.admin_server import TOKEN, administered
from tests.attack import admin_bodies, event_streams
from tests.attack.event_streams import RogueEngine
from tests.child_process import DEADLINE_S, most_lines, wait_for
from tests.server_process import ServerProcess, short_folder

kv_events = pytest.importorskip("vllm.distributed.kv_events")

MIB = 1 << 20


def memory(server):
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def test_a_packed_or_broken_body_with_the_token_is_refused_in_words():
    with administered() as server:
        for body in (gzip.compress(b'{"keys": []}'), b"\x1f\x8bbroken"):
            refused = server.ask("POST", "/v1/lookup", body, Content_Encoding="gzip")
            assert (refused.status, refused.body["what"]) == (415, "Content-Encoding: gzip")
        head = f"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert admin_bodies.answered(server.url, head.encode() + b"zz\r\n", DEADLINE_S) == 400
        assert "a bug" not in server.said()


def test_a_lookup_of_many_chunks_is_answered_in_turns():
    turns = []

    def counted(steps):
        turns.append(0)
        while True:
            try:
                yield next(steps)
            except StopIteration as done:
                return done.value
            turns[-1] += 1

    tokens = [number % 1000 for number in range(forms.MAX_TOKENS)]
    asked = forms.Lookup(fingerprint="ab" * 32, tokens=tokens, chunk_tokens=1)
    keys = whole(counted(http._keys(asked)))
    layout = ChunkLayout(bytes.fromhex("ab" * 32), 1, 1, (1,))
    assert keys == layout.keys(tokens)
    store = Store(Pool(512, 4096))
    with store.save(keys[:300]) as lease:
        lease.commit()
    assert whole(counted(http._by_tier(store, keys))) == [300] == store.lookup_by_tier(keys)
    assert whole(counted(http._by_tier(store, keys[:300]))) == [300]
    assert whole(counted(http._by_tier(store, []))) == [0]
    assert turns[0] >= 100 and turns[1] == 2, "at most 2,048 keys are made, 128 are looked for"


def test_a_token_for_metrics_reads_metrics_and_nothing_else():
    reader, port = admin_proof.metrics_token(TOKEN.encode() + b"\n"), free_port()
    with administered(admin=f"http://0.0.0.0:{port}") as server:
        server.port = port
        told = {
            path: server.ask(method, path, body, token=reader).status
            for method, path, body in (
                ("GET", "/metrics", None),
                ("GET", "/v1/stats", None),
                ("GET", "/v1/configuration", None),
                ("GET", "/v1/namespaces", None),
                ("POST", "/v1/lookup", {"keys": []}),
                ("POST", "/v1/clear", {"everything": True}),
            )
        }
        assert told.pop("/metrics") == 200
        assert set(told.values()) == {401}
        assert server.ask("GET", "/metrics").status == 200, "the other token is good for all"
        assert server.ask("GET", "/metrics", token=reader[:-1]).status == 401


def test_a_stream_is_for_its_own_user_alone():
    with short_folder() as folder:
        endpoints = [folder / "run" / name for name in ("events", "replay")]
        events, replay = (f"ipc://{path}" for path in endpoints)
        with ServerProcess(folder, server_events=f"{events}?replay={replay}"):
            for path in endpoints:
                assert path.stat().st_mode & 0o777 == 0o600
                assert path.parent.stat().st_mode & 0o777 == 0o700


def _visited(liar):
    return liar.visits > 0


def stored(count=1):
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(range(count)),
        "parent_block_hash": None,
    }
    event |= {"token_ids": [1] * 4 * count, "block_size": 4, "lora_id": None, "medium": "GPU"}
    return msgspec.msgpack.encode([0.0, [event | {"lora_name": None}]])


EVENTS = "kvtier_engine_stream_events_total"
LONG = msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "token_ids": [1] * (7 * MIB)}]])
LIES = {
    "the last number there is": (event_streams.told(event_streams.numbered(-2, stored())), None),
    "the number of an end": (event_streams.told(event_streams.numbered(-1, stored())), None),
    "nonsense": (event_streams.told(event_streams.numbered(0, b"\xc1" * 100)), None),
    "one frame": (event_streams.told(event_streams.frame(b"x")), None),
    "a long event without sense": (event_streams.told(event_streams.numbered(0, LONG)), None),
    "frames without end": (event_streams.frames_without_end(100 * MIB), None),
    "hangs up": (event_streams.told(seconds=0), None),
    "an answer of one frame": (event_streams.told(seconds=2),
        event_streams.told(event_streams.frame(b"x"))),
    "an answer with the last number": (event_streams.told(seconds=2),
        event_streams.told(event_streams.numbered(-2, stored()))),
    "an answer without end": (event_streams.told(seconds=2),
        event_streams.frames_without_end(100 * MIB)),
}  # fmt: skip


def test_a_number_that_cannot_be_counted_on_from_is_none():
    for frame in (event_streams.END, (2**63).to_bytes(8, "big"), b"", b"x", bytes(9)):
        assert follow._number(bytearray(frame)) is None
    assert follow._number(bytearray((2**63 - 1).to_bytes(8, "big"))) == 2**63 - 1


def test_engines_that_lie_are_followed_again_when_they_are_well():
    begun = time.monotonic()
    with short_folder() as folder, ExitStack() as honest, ExitStack() as rogue:
        at = [f"ipc://{folder}/{number}" for number in range(len(LIES) + 1)]
        asked = [
            f"engine-{number}={one}" + (f"?replay={one}r" if answers else "")
            for number, (one, (_, answers)) in enumerate(
                zip(at, [*LIES.values(), (None, True)], strict=True)
            )
        ]

        def engine(number):
            own = kv_events.ZmqEventPublisher(0, at[number], f"{at[number]}r")
            honest.callback(own.shutdown)
            return own

        good = engine(len(LIES))
        with administered(admin_engines=",".join(asked)) as server:
            before = memory(server)
            rogues = []
            for one, (lies, answers) in zip(at[:-1], LIES.values(), strict=True):
                rogues.append(rogue.enter_context(RogueEngine(one, "PUB", lies)))
                if answers:
                    rogues.append(rogue.enter_context(RogueEngine(f"{one}r", "ROUTER", answers)))
            for liar in rogues:
                wait_for(partial(_visited, liar), "it was asked")
            is_heard(server, len(LIES), good)
            assert memory(server) - before < 128 * MIB
            rogue.close()
            for number, one in enumerate(at[:-1]):
                for path in (one, f"{one}r"):
                    Path(path.removeprefix("ipc://")).unlink(missing_ok=True)
                is_heard(server, number, engine(number))
            said = server.said()
        assert "a bug" not in said and "Traceback" not in said
        assert 1 <= said.count("WARNING kvtier.admin.engines") <= 20 + most_lines(20, 60.0, begun)


def is_heard(server, number, engine):
    name = f"engine-{number}"
    wait_for(lambda: server.metric("kvtier_engine_followed", engine=name) == 1, f"{name} again")
    understood = server.metric(EVENTS, engine=name, event="message")

    def is_understood():
        engine.publish(kv_events.KVEventBatch(ts=0.0, events=[]))
        return server.metric(EVENTS, engine=name, event="message") > understood

    wait_for(is_understood, f"{name} is heard")
