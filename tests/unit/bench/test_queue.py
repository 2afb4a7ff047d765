"""The queue's benchmark: its waits are those of queueing theory, its requests meet one shared
cache, and its command says what is wrong with its input."""

import json
import random
import statistics
from itertools import accumulate
from typing import Any

import pytest

from kvtier.bench.queue.report import first_come
from kvtier.bench.queue.run import Engines
from kvtier.bench.queue.traffic import KINDS, traffic
from kvtier.bench.traces.commands.simulate import ChunkPrefill
from kvtier.bench.traces.mooncake import BLOCK_TOKENS, Request, key_of
from kvtier.bench.traces.simulate import Cache, unique
from kvtier.cli.main import main
from kvtier.eviction.saved_compute import SavedCompute

FLAT = ChunkPrefill(SavedCompute(BLOCK_TOKENS, float("inf")), BLOCK_TOKENS)
"""A chunk takes a second, wherever it is in its prompt."""


def mean_wait(load, engines, service):
    """Of requests that come at random (a Poisson process), with service times of 1 in the mean."""
    draw = random.Random(7)
    gaps = (draw.expovariate(load * engines) for _ in range(100_000))
    waited = first_come(
        list(accumulate(gaps)), engines, lambda _number, _now: service(draw), lambda *_: None
    )
    return statistics.fmean(one.begun - one.came for one in waited)


@pytest.mark.parametrize(
    ("load", "engines", "service", "wait"),
    [
        (0.5, 1, lambda draw: draw.expovariate(1.0), 1.0),  # M/M/1: load / (1 - load)
        (0.5, 1, lambda draw: 1.0, 0.5),  # M/D/1: half of it
        (0.7, 1, lambda draw: 1.0, 0.7 / 0.6),
        (0.5, 2, lambda draw: draw.expovariate(1.0), 1 / 3),  # M/M/2: Erlang's C of 1/3, over 1
    ],
)
def test_requests_wait_as_long_as_queueing_theory_says(load, engines, service, wait):
    assert mean_wait(load, engines, service) == pytest.approx(wait, rel=0.05)


def prompt(at, *names):
    return Request(at, tuple(map(key_of, names)))


def answers(requests, engines):
    """Seconds to the first tokens. Half a chunk of each prompt is always computed."""
    served = Engines(requests, Cache(100, policy="lru"), FLAT).serve("lru", engines)
    return served.ttft


def test_a_prompt_is_a_hit_once_an_engine_has_computed_it():
    requests = [prompt(at, "a", "b", "c") for at in (0.0, 0.0, 3.0, 3.5)]
    assert answers(requests, 3) == [3.5, 3.5, 3.5, 0.5], "two that come at once are computed twice"
    assert answers(requests, 1) == [3.5, 4.0, 1.5, 1.5]


def test_traffic_is_the_same_for_the_same_arguments():
    trace = traffic(0.05, 3)
    assert trace == traffic(0.05, 3)
    assert trace != traffic(0.05, 4)
    kinds = [traffic(0.05, 3, kind=kind) for kind in KINDS]
    assert all(kind and kind != trace for kind in kinds[:-1]) and kinds[-1] == trace
    assert [one.at for one in trace] == sorted(one.at for one in trace)
    assert unique(trace) < sum(len(one.run) for one in trace) / 2, "much of it comes again"
    assert all(one.run and one.output for one in trace)


def a_loop_among_scans(folder, requests=1500):
    """Twelve prompts that come in turn among so many that come once that LRU holds none of them.
    Six come at once."""
    lines = []
    for number in range(requests):
        loop = number % 3 == 0
        first = 10 * (number // 3 % 12) if loop else 1000 + 10 * number
        ids = list(range(first, first + (3 if loop else 4)))
        tokens = BLOCK_TOKENS * len(ids)
        one = {"timestamp": 6000 * (number // 6), "input_length": tokens, "hash_ids": ids}
        lines.append(json.dumps(one))
    path = folder / "loop.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def results(folder, *words):
    """What ``kvtier bench queue`` writes."""
    path = folder / "out" / "queue.json"
    assert main(["bench", "queue", "--output", str(path), *words]) == 0
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_where_lru_hits_nothing_people_wait_less_under_auto(tmp_path, capsys):
    trace = a_loop_among_scans(tmp_path)
    words = ["--trace", trace, "--ram", "60", "--engines", "2", "--load", "0.9"]
    found = results(tmp_path, *words, "--policy", "lru", "keep90_4x", "auto")
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["lru: hits"]["value"] == 0 < rows["auto: hits"]["value"]
    assert rows["lru: engines busy"]["value"] == pytest.approx(0.9, abs=0.01)
    for name in ("TTFT mean", "TTFT p95", "in the queue, mean"):
        lru, keep, auto = (rows[f"{one}: {name}"]["value"] for one in ("lru", "keep90_4x", "auto"))
        assert keep <= auto < lru, name
    assert rows["auto: TTFT mean"]["ratio"] < 0.9
    assert found["workload"]["trace"] == "loop.jsonl" and found["workload"]["engines"] == 2
    assert {"command", "machine", "version"} <= set(found)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[3:6]] == ["lru", "keep90_4x", "auto"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--load", "0.5", "--prefill", "1000"], "--load and --prefill"),
        (["--ram", "5 GiB"], "is not a size"),
        (["--format", "mooncake"], "give --trace too"),
        (["--trace", "no-such-trace"], "no-such-trace"),
        (["--model", "no-such-model", "--hours", "0.01"], "no-such-model"),
    ],
)
def test_what_cannot_be_served_is_told_in_words(words, told, tmp_path, capsys):
    path = tmp_path / "queue.json"
    assert main(["bench", "queue", "--output", str(path), *words]) == 2
    assert told in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("time,obj_id\n1,a\n2,b\n", "counts objects and no tokens"),
        ('{"timestamp": 1, "input_length": 100, "hash_ids": [1]}\n', "has no full block"),
        ('{"input_length": 1024, "hash_ids": [1, 2]}\n' * 2, "all come at once"),
    ],
)
def test_a_trace_without_times_or_tokens_has_no_load(text, told, tmp_path, capsys):
    (tmp_path / "trace").write_text(text)
    assert main(["bench", "queue", "--trace", str(tmp_path / "trace")]) == 2
    assert told in capsys.readouterr().err
