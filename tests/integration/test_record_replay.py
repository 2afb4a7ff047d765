"""A day is recorded, simulated and replayed, as README says: ``engine.record``, ``kvtier simulate``
and ``kvtier replay``."""

import json
import random
import re
from typing import Any

import pytest

from kvtier.bench.traces.mooncake import lines_of
from kvtier.bench.traces.replay import Replay
from kvtier.cli.main import main
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker, Ended
from kvtier.eviction.hints import Hint
from tests.child_process import wait_for
from tests.server_process import LAYOUT, SLOT, attached, run, save, serving
from tests.stores import keys, over

pytestmark = pytest.mark.usefixtures("patient")

CHUNKS = 64


def chats(turns, seed=3):
    """Conversations by number, each turn with all tokens so far."""
    draw, going, found = random.Random(seed), dict[int, list[int]](), list[tuple[int, list[int]]]()
    for number in range(turns):
        if going and draw.random() < 0.7:
            chat = draw.choice(list(going))
        else:
            chat, going[number] = number, [0, number + 1]
        going[chat] = going[chat] + [draw.randrange(1000) for _ in range(draw.randint(1, 3))]
        found.append((chat, going[chat]))
        if len(going[chat]) > 15:
            del going[chat]
    return found


def trace_file(folder, turns):
    ids, lines = dict[ChunkKey, int](), list[str]()
    for at, (_, tokens) in enumerate(chats(turns)):
        keys = [ids.setdefault(key, len(ids)) for key in LAYOUT.keys(tokens)]
        asked = {"timestamp": 100 * at, "input_length": 512 * len(keys), "hash_ids": keys}
        lines.append(json.dumps(asked))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def said(capsys, *words, status=0):
    capsys.readouterr()
    assert main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def ask(client, chat, tokens):
    keys, session = LAYOUT.keys(tokens), f"chat {chat}"
    with client.load(keys, asker=Asker(session, 512 * len(keys))) as lease:
        hits = lease.poll().ready
    client.load(keys, most=hits, asker=Asker(session, 512 * len(keys), again=True)).close()
    save(client, keys)
    return hits


def test_what_a_server_records_is_simulated_to_its_own_counters(tmp_path, capsys):
    record = tmp_path / "record"
    asked = hits = 0
    with serving(ram_bytes=CHUNKS * SLOT, policy="lru", record=record) as server:
        with attached(server.access()) as client:
            for chat, tokens in chats(300):
                hits += ask(client, chat, tokens)
                asked += len(tokens)
            wait_for(lambda: client.stats()["recorded"] == 300, "recorded")
            stats = client.stats()
        assert stats["unrecorded"] == 0
        # Each request asked twice. The second time it asked for all of it, and claimed its hits.
        assert (stats["load_asked"], stats["ram_loaded"]) == (2 * asked, 2 * hits)
    assert 0.2 * asked < hits < 0.9 * asked
    found = said(capsys, "simulate", str(record), "--ram", str(CHUNKS), "--policy", "lru")
    assert [found[0][name] for name in ("requests", "asked", "ram")] == [300, asked, hits]


def test_hints_are_recorded_and_simulated(tmp_path, capsys):
    record, hits, often = tmp_path / "record", 0, list(range(7))
    with (
        serving(ram_bytes=24 * SLOT, policy="lru", record=record) as server,
        attached(server.access()) as client,
    ):
        for once in range(1, 41):
            if once % 2:
                hits += ask(client, 0, often)
            hits += ask(client, once, [once + 100, *range(9)])
            client.hint((), Hint(over=True), f"chat {once}")
            wait_for(lambda: client.stats()["hints_followed"] == once, "followed")  # noqa: B023
        wait_for(lambda: client.stats()["recorded"] == 20 + 40 + 40, "recorded")
    words = ("simulate", str(record), "--ram", "24", "--policy", "lru")
    plain, hinted = (said(capsys, *words, "--hints", hints)[0] for hints in ("none", "recorded"))
    assert plain["requests"] == hinted["requests"] == 60
    assert plain["ram"] < hinted["ram"] == hits == 19 * 7
    with serving(ram_bytes=24 * SLOT, policy="lru", slot_bytes=SLOT) as server:
        replayed = ["replay", str(record), "--connect", str(server.address)]
        assert said(capsys, *replayed, "--hints", "recorded")["hits"] == {"ram": hits}
        assert said(capsys, *replayed)["hits"] == {"ram": plain["ram"]}


@pytest.mark.parametrize("speed", [None, "100"])
def test_what_is_kept_for_a_time_is_replayed(speed, tmp_path, capsys):
    def line(at_s, ids, **more):
        asked = {"timestamp": 1000 * at_s, "input_length": 512 * len(ids), "hash_ids": ids}
        return json.dumps(asked | more)

    often, lines = [1, 2, 3], list[str]()
    for number in range(20):
        lines.append(line(2 * number, often if number % 10 == 0 else [10 * number, 7, 8, 9]))
        if not number:
            lines.append(line(0.5, [], about=often, keep_s=3600))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    paced = ["--speed", speed] if speed else []
    with serving(ram_bytes=10 * SLOT, slot_bytes=SLOT) as server:
        words = ["replay", str(path), "--connect", str(server.address), *paced]
        replayed = said(capsys, *words, "--hints", "recorded")
        assert said(capsys, *words)["hits"] == {}
    (simulated,) = said(
        capsys, "simulate", str(path), "--ram", "10", "--hints", "recorded", "--policy", "auto"
    )
    assert replayed["hits"] == {"ram": 3} and simulated["ram"] == 3


@pytest.mark.parametrize(("policy", "below"), [("lru", 0), ("auto", 256)])
def test_a_replay_hits_what_the_simulator_says(policy, below, tmp_path, capsys):
    trace = trace_file(tmp_path, 500)
    lower: Any = {"nvme_path": tmp_path / "nvme", "nvme_bytes": below * SLOT} if below else {}
    sizes = ["--ram", str(CHUNKS), "--policy", policy]
    with serving(ram_bytes=CHUNKS * SLOT, policy=policy, slot_bytes=SLOT, **lower) as server:
        connect = ["--connect", str(server.address)]
        replayed = said(capsys, "replay", str(trace), *connect)
        room = re.search(r"nvme (\d+) chunks", server.log.read_text())
        more = ["--concurrency", "4", "--requests", "9", "--speed", "100"]
        again = said(capsys, "replay", str(trace), *connect, *more)
    sizes += ["--nvme", room[1] if room else "0", "--write", "save"]
    (simulated,) = said(capsys, "simulate", str(trace), *sizes)
    percent = 100 * (simulated["ram"] + simulated["lower"]) / simulated["asked"]
    assert replayed["requests"] == 500 and replayed["wrong_bytes"] == 0
    assert abs(replayed["hit_percent"] - percent) <= 0.5
    assert 20 < percent < 90
    if below:
        assert replayed["hits"]["nvme"] > 0
        assert abs(replayed["writes"]["nvme"] - simulated["writes"]) < 0.02 * simulated["writes"]
    assert (again["requests"], again["wrong_bytes"]) == (9, 0)


def test_a_wrong_byte_is_counted():
    store, _ = over()
    replay, run = Replay([store]), keys(1, 2)
    assert replay._save(store, run)["saved"] == 2
    with store.load(run) as lease:
        lease.poll()
        lease.views()[1][9] ^= 1
    assert replay._load(store, run, "")["wrong"] == 1


def test_a_server_records_how_requests_ended(tmp_path, capsys):
    with (
        serving(record=tmp_path) as server,
        attached(server.access()) as one,
        attached(server.access()) as two,
    ):
        for client, prompt in ((one, 1), (two, 2)):
            client.load(run(prompt, 4), asker=Asker("s", 2048, request=1)).close()
        client.load(run(3, 4), asker=Asker("s", 2048, request=2)).close()
        client.stats()
        two.ended(Ended(1, 300, "stop"))
        two.stats()  # the server has read it before the other engine's message
        one.ended(Ended(1, 100, "length"))
        wait_for(lambda: one.stats()["recorded"] == 2, "recorded")
        server.stop()
    lines = [json.loads(line) for line in lines_of(str(tmp_path))]
    told = [(line.get("output_length"), line.get("stop")) for line in lines]
    assert told == [(300, "stop"), (100, "length"), (None, None)]
    assert main(["simulate", str(tmp_path), "--ram", "50%"]) == 0
    said = capsys.readouterr().out
    assert "2 answers have 200 tokens on average; they ended by: length 50 %, stop 50 %" in said
