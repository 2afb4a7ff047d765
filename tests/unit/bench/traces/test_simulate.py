"""The simulator says what the real Store does, and the words of its trace and its command are read
as promised. The curve of all sizes is exact, and its knee is enough for a Store."""

import itertools
import json
import random

import pytest

from kvtier.bench.traces.commands.simulate import chunks_of
from kvtier.bench.traces.curve import POINT, Curve
from kvtier.bench.traces.mooncake import Request, read
from kvtier.bench.traces.simulate import FIXED, Cache, belady, oracle, simulate, unhinted, unique
from kvtier.cli.main import main
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.lookup import Asker
from kvtier.core.pool import Pool
from kvtier.eviction.adaptive import ALL_LRU, Adaptive
from kvtier.eviction.hints import NO_HINT, Hint
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.clock import Clock

SLOT = 4096


def line(ids, at=0, **more):
    return json.dumps(
        {"timestamp": at, "input_length": 512 * len(ids), "hash_ids": list(ids), **more}
    )


def chats(requests, seed=1):
    """Conversations of some turns behind one system prompt, and prompts that come once."""
    draw, going, fresh, lines = random.Random(seed), list[list[int]](), 10, list[str]()
    for number in range(requests):
        ids = going.pop(draw.randrange(len(going))) if going and draw.random() < 0.6 else [1, 2]
        more = draw.randint(1, 6)
        ids = [*ids, *range(fresh, fresh + more)]
        fresh += more
        if draw.random() < 0.7:
            going.append(ids)
        lines.append(line(ids, number * 100))
    return list(read(lines))


@pytest.mark.parametrize("policy", ["lru", "auto"])
@pytest.mark.parametrize("hints", [False, True])
@pytest.mark.parametrize(
    ("nvme", "on_evict", "redis"),
    [(0, False, 0), (120, False, 0), (120, True, 0), (120, True, 400), (120, False, 400)],
)
def test_a_real_store_hits_and_writes_the_same(policy, hints, nvme, on_evict, redis):
    requests = chats(500)
    trace = unhinted(requests)
    if hints:  # the end of many sessions, and some prompts that are kept for a time
        keep = Hint(keep_s=2.0)
        trace = oracle(requests, 0.7, 0.2)
        trace[::7] = [hinted._replace(hint=keep) for hinted in trace[::7]]
    simulated = simulate(trace, Cache(60, nvme, policy, on_evict, redis))
    lane, spare, clock = ManualLane(bound=4096), ManualLane(bound=1), Clock()
    places = [
        TierSpec(DictTier(room, name=name, shared=name == "redis"), lane, on_evict=when)
        for name, room, when in (("nvme", nvme, on_evict), ("redis", redis, False))
        if room
    ]
    orders = Adaptive().orders() if policy == "auto" else ALL_LRU
    store = Store(Pool(60, SLOT), places, orders, spare=spare, clock=clock)
    spare.run()
    for request in trace:
        session, hint = request.session, request.hint
        clock.now = request.at
        with store.load(request.run, asker=Asker(session)) as load:
            lane.run()
            load.poll()
            spare.run()
        with store.save(request.run) as save:
            save.commit()
        lane.run()
        if hint != NO_HINT:
            store.hint(request.run, hint, session)
            spare.run()
    stats = store.stats()
    real = (
        stats["load_asked"],
        stats["ram_loaded"],
        *(stats.get(f"nvme_{what}", 0) for what in ("loaded", "stored")),
        *(stats.get(f"redis_{what}", 0) for what in ("loaded", "stored")),
    )
    lower = (simulated.lower, simulated.writes, simulated.redis, simulated.redis_writes)
    assert real == (simulated.asked, simulated.ram, *lower)
    assert not redis or simulated.redis > 0
    assert stats.get("nvme_spill_late", 0) == simulated.late
    assert simulated.hits > 0.2 * simulated.asked
    if policy == "auto":
        assert simulated.shadows == {name: stats[name] for name in simulated.shadows}
    store.check(idle=True)
    store.close()


def test_the_optimum_is_above_all_policies():
    requests = chats(700)
    best = belady(requests, 100)
    for policy in ("lru", "auto"):
        assert simulate(unhinted(requests), Cache(100, policy=policy)).hits < best.hits
    assert best.hits <= belady(requests, unique(requests)).hits
    everything = simulate(unhinted(requests), Cache(unique(requests), policy="lru"))
    assert belady(requests, unique(requests)).hits == everything.hits


def test_the_oracle_says_it_once_after_the_last_request_of_each_session():
    requests = list(
        read(
            [
                line([1, 2, 3]),
                line([1, 7, 8]),
                line([1, 2, 3, 4]),
                line([1, 7, 8, 9]),
                line([1, 2, 3, 4, 5]),
            ]
        )
    )
    assert [hinted.hint.over for hinted in oracle(requests)] == [False, False, False, True, True]
    assert not any(hinted.hint.over for hinted in oracle(requests, cover=0.0))
    wrong = [hinted.hint.over for hinted in oracle(requests, wrong=1.0)]
    assert wrong == [True] * 5


def test_recorded_sessions_and_ends_are_read():
    requests = list(
        read([line([1], session="a"), line([1, 2], session="a", over=True, colour="blue"), "\n"])
    )
    found = [(hinted.session, hinted.hint.over) for hinted in requests]
    assert found == [("a", False), ("a", True)]


@pytest.mark.parametrize(("keep_s", "hits"), [(60, 2), (5, 0), (0, 0), (-1, 0), ("soon", 0)])
def test_what_is_kept_for_a_time_is_kept_in_the_time_of_the_trace(keep_s, hits):
    lines = [line([1, 2]), line([], about=[1, 2], keep_s=keep_s)]
    lines += [line([10 + number], 1000 * number) for number in range(1, 12)]
    requests = list(read([*lines, line([1, 2], 12_000)]))
    for policy in ("lru", "auto"):
        assert simulate(requests, Cache(5, policy=policy)).hits == hits
        assert simulate(unhinted(requests), Cache(5, policy=policy)).hits == 0


def test_a_last_block_that_is_not_full_is_kept_only_when_asked_for():
    lines = [json.dumps({"input_length": 700, "hash_ids": [1, 2]})]
    assert [len(request.run) for request in read(lines)] == [1]
    assert [len(request.run) for request in read(lines, partial=True)] == [2]


def trace_file(folder, requests=300):
    path, ids = folder / "trace.jsonl", dict[ChunkKey, int]()
    lines = [
        line([ids.setdefault(key, len(ids)) for key in request.run]) for request in chats(requests)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_the_command_prints_a_row_for_each_size_and_policy(tmp_path, capsys):
    words = ["--ram", "5%", "40", "--policy", "lru", "auto", "belady"]
    assert main(["simulate", trace_file(tmp_path), *words]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("300 requests ask for ")
    names = [row.split()[0] for row in out[3:9]]
    assert names == [name for name in ("lru", "auto", "belady") for _ in range(2)]
    assert out[4].split()[1] == "40"
    assert out[7].startswith("belady (RAM alone)"), "a picture has the room of all tiers instead"


def model_file(folder, layers=2):
    """A small model's configuration."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    path = folder / "config.json"
    path.write_text(json.dumps({**config, **heads, "num_hidden_layers": layers, "vocab_size": 512}))
    return str(path)


def long_prompts_twice(folder):
    """A prompt of 4 chunks, one of 8 with the same beginning, and the first one again."""
    lines = [line(range(4)), line(range(8)), line(range(4))]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_late_chunk_saves_more_compute_than_an_early_one(tmp_path, capsys):
    words = ["--ram", "100%", "--policy", "lru", "belady", "--json"]
    assert main(["simulate", long_prompts_twice(tmp_path), *words]) == 0
    lru, belady = json.loads(capsys.readouterr().out)

    def compute(chunks):
        return sum(1 + (512 * chunk + 256) / 30_500 for chunk in range(chunks))

    assert lru["compute"] == belady["compute"] == pytest.approx(compute(8) + 2 * compute(4))
    assert lru["saved"] == belady["saved"] == pytest.approx(2 * compute(4))
    assert lru["saved"] / lru["compute"] < lru["ram"] / lru["asked"], "its hits are early ones"
    assert lru["saved_s"] is None


def test_saved_compute_is_the_models_and_in_seconds_where_its_speed_is_known(tmp_path, capsys):
    flags = ["--ram", "100%", "--policy", "lru", "--model", model_file(tmp_path)]
    trace = long_prompts_twice(tmp_path)
    assert main(["simulate", trace, *flags, "--prefill", "1000", "--json"]) == 0
    (small,) = json.loads(capsys.readouterr().out)
    assert small["saved_s"] == pytest.approx(small["saved"] * 512 / 1000)
    assert small["saved"] > 1.5 * 8, "beside few weights attention costs more"
    assert main(["simulate", trace, *flags, "--prefill", "1000"]) == 0
    out = capsys.readouterr().out
    assert "saved compute  in seconds" in out and f"{small['saved_s']:,.0f}" in out
    assert f"(of --model {tmp_path / 'config.json'})" in out


def test_beside_auto_stand_the_best_fixed_setting_and_what_auto_lacks(tmp_path, capsys):
    """From the rows where they are asked for, and from the shadows where they are not."""
    path = tmp_path / "trace.jsonl"
    places = [n // 3 % 6 if n % 3 == 0 else 1000 + n for n in range(1500)]
    lines = [line([place, 5000 + place], n) for n, place in enumerate(places)]
    path.write_text("\n".join(lines))
    words = ["simulate", str(path), "--ram", "20", "--keep-partial", "--policy"]
    assert main([*words, *FIXED, "auto", "--json"]) == 0
    found = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    percent = {name: 100 * row["ram"] / row["asked"] for name, row in found.items()}
    best = max(FIXED, key=percent.__getitem__)
    assert percent[best] > percent["lru"] + 5, "it is worth something here"
    assert main([*words, *FIXED, "auto"]) == 0
    regret = max(0.0, percent[best] - percent["auto"])
    assert f"best fixed {best}, regret {regret:.2f} points of hits" in capsys.readouterr().out
    assert main([*words, "auto"]) == 0
    assert f"best fixed {best} (by its shadow), regret " in capsys.readouterr().out


@pytest.mark.parametrize("size", ["", "-1", "x%", "nan%", "1e30%", "2.5"])
def test_what_is_no_size_is_told(size, tmp_path, capsys):
    assert main(["simulate", trace_file(tmp_path, 3), f"--ram={size}"]) == 2
    assert "is not a size" in capsys.readouterr().err


def test_a_size_in_bytes_needs_the_model(tmp_path, capsys):
    trace = trace_file(tmp_path, 3)
    assert main(["simulate", trace, "--ram", "64MiB"]) == 2
    assert "with --model bytes" in capsys.readouterr().err
    size = chunks_of
    assert size("64MiB", 9, 1 << 20) == size("64", 9, 1 << 20) == 64
    with pytest.raises(ConfigError, match="is not a size"):
        size("2.5", 9, 1 << 20)


def requests(runs):
    return [
        Request(float(at), tuple(ChunkKey(f"{each:040}".encode()) for each in run))
        for at, run in enumerate(runs)
    ]


def rounds(documents, times, chunks=4):
    """So many documents, each asked for in turn, so many times."""
    return [[1000 * each + at for at in range(chunks)] for each in range(documents)] * times


def conversations(count, seed):
    draw, fresh, runs = random.Random(seed), itertools.count(10), list[list[int]]()
    for _ in range(count):
        base = draw.choice(runs[-50:]) if runs and draw.random() < 0.7 else [1, 2]
        keep = draw.randint(1, len(base)) if draw.random() < 0.2 else len(base)
        runs.append([*base[:keep], *itertools.islice(fresh, draw.randint(1, 8))])
    return runs


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_hits_what_a_store_with_lru_of_each_size_hits(seed):
    trace = requests(conversations(400, seed))
    curve = Curve(trace)
    for slots in (1, 2, 7, 30, 100, 101, 500, curve.largest - 1, curve.largest, 10 * curve.unique):
        real = simulate(unhinted(trace), Cache(slots, policy="lru"))
        assert round(curve.ratio(slots) * curve.asked) == real.hits, slots
    assert curve.ratio(curve.largest - 1) < curve.ratio(curve.largest) == curve.ratio(10**9)


def test_documents_that_come_round_have_their_knee_at_the_room_for_all_of_them():
    curve = Curve(requests(rounds(50, 10)))
    assert (curve.knee(), curve.enough(10**9), curve.largest) == (200, 200, 200)
    assert curve.ratio(199) < curve.ratio(200) == pytest.approx(0.9)


def test_what_is_enough_is_enough_for_two_tiers_with_the_production_rules():
    trace = requests(conversations(4000, 5))
    curve = Curve(trace)
    ram = curve.enough(curve.knee() // 2)
    nvme = curve.enough(10**9, ram)
    real = simulate(unhinted(trace), Cache(ram, nvme))
    assert nvme > ram
    assert real.hits / real.asked >= curve.ratio(curve.knee(ram)) - 2 * POINT
