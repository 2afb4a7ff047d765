"""The comparison's arithmetic, its arms and its files, without any server."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvtier.bench import readme
from kvtier.bench.compare.__main__ import draw, write
from kvtier.bench.compare.calls import Step
from kvtier.bench.compare.peers.contenders import CONTENDERS, names, rendered
from kvtier.bench.compare.result import Again, Effort, Pair, Run, about, cpu_row, efforts, rows
from kvtier.bench.long_doc_qa.arms import Sizes
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.processes.engine import Geometry
from kvtier.bench.report import Row
from kvtier.bench.requests.client import Outcome

GIB = 1 << 30
SIZES = Sizes(Workload([1], 4, 8192, 128, 8, 1), Geometry(128, 256, 28 << 10))
VALUES = names(SIZES, Path("/place"), Path("/run"), 1001)


def outcomes(*ttft, tokens=7, cached=50):
    return [
        Outcome(place, 0, False, 0.0, one, sum(ttft), True, 100, 1, cached, tokens=[tokens])
        for place, one in enumerate(ttft)
    ]


def arms(*named):
    return [CONTENDERS[name] for name in named]


ALL = arms("none", "vllm-prefix-cache", "lmcache-ram", "lmcache-redis", "kvtier-ram", "kvtier-nvme")
RUNS = [
    Run("none", outcomes(10.0, 12.0, cached=0), fill=100.0),
    Run("vllm-prefix-cache", outcomes(1.0, 1.2)),
    Run("lmcache-ram", outcomes(1.5, 1.7), 50.0, pairs=outcomes(1.4, 1.0, 1.8, 1.2)),
    Run("kvtier-ram", outcomes(1.2, 1.4), pairs=outcomes(1.2, 1.0, 2.4, 2.2)),
    Run("vllm-prefix-cache", outcomes(1.0, 1.2)),
    Run("lmcache-ram", outcomes(1.5, 1.7, tokens=8), pairs=outcomes(1.5, 1.0)),
    Run("kvtier-ram", outcomes(1.3, 1.5), pairs=outcomes(1.3, 1.0, 9.25, 9.0)),
]
BY_NAME = {row.name: row for row in rows(ALL, RUNS)}


def test_load_cost_is_what_a_hit_costs_more_than_a_warm_one_in_the_same_process():
    assert "vllm-prefix-cache: load cost" not in BY_NAME
    ours, theirs = BY_NAME["kvtier-ram: load cost"], BY_NAME["lmcache-ram: load cost"]
    assert ours.value == pytest.approx(0.225), "the median of .2 .2 .3 .25"
    held = [theirs.value, theirs.limit, theirs.ratio, theirs.min, theirs.max]
    assert held == pytest.approx([0.5, 0.225, 0.5 / 0.225, 0.4, 0.6])
    assert BY_NAME["kvtier-ram: ttft mean"].limit == pytest.approx(1.1)
    assert BY_NAME["lmcache-ram: throughput, nothing reused"].ratio == 0.5
    assert {one.like for one in CONTENDERS.values()} - {None} <= CONTENDERS.keys()


def test_other_answers_are_told_of_every_round():
    told = about(ALL, RUNS, {})
    assert [told[one]["answers_unlike_none"] for one in ("lmcache-ram", "kvtier-ram")] == [2, 0]
    assert told["none"]["answers_unlike_none"] is None
    after = Again(outcomes(0.4, 0.4, tokens=9))
    more = [*RUNS, Run("kvtier-ram", outcomes(0.2), restart=after)]
    assert about(ALL, more, {})["kvtier-ram"]["answers_unlike_none"] == 2


def test_a_second_engine_and_a_restart_tell_what_they_found():
    again = Again(outcomes(0.6, 0.3, cached=60))
    run = Run("lmcache-redis", outcomes(0.3), second=again, restart=Again(error="no port"))
    found = {row.name: row.value for row in rows(ALL, [run])}
    assert found["lmcache-redis: second engine, ttft mean"] == pytest.approx(0.45)
    assert found["lmcache-redis: second engine, cached"] == pytest.approx(60.0)
    assert found["lmcache-redis: after a restart, ttft mean"] is None
    assert "lmcache-redis: after a restart, cached" not in found


# -- efforts ---------------------------------------------------------------------------------------

NOTES = [(10.0, 100.0), (11.0, 100.5), (12.0, 102.0)]
STEPS = [
    Step(9.9, {"early": 9.0}, [9.0]),
    Step(10.5, {"load": 0.25, "meta": 0.5}, [0.125]),
    Step(11.0, {"load": 0.5}, []),
    Step(11.5, {"meta": 1.0}, []),
    Step(13.0, {"save": 2.0}, []),
]


def test_a_step_belongs_to_the_answer_before_whose_note_it_ended():
    assert efforts(NOTES, STEPS) == [
        Effort(0.5, {"load": 0.75, "meta": 0.5}, 0.125),
        Effort(1.5, {"meta": 1.0, "save": 2.0}),
    ]
    assert efforts(NOTES, None) == [Effort(0.5), Effort(1.5)], "without calls there is CPU time"
    assert efforts([(1.0, 5.0), (2.0, None)], STEPS[:0]) == [Effort(None)]


def pair(cpu, *, cached=GIB // 4, **loads):
    loaded = Outcome(0, 0, False, 0.0, 0.5, 1.0, True, 100, 1, cached)
    warm = Outcome(0, 1, False, 0.0, 0.25, 1.0, True, 100, 1, cached)
    return Pair(loaded, warm, Effort(2.0 + cpu, loads, 0.002), Effort(2.0, {"load": 1.0}, 0.001))


def test_cpu_time_is_a_median_over_pairs_with_its_error():
    """Tokens of one byte: four hits are a GiB. Of 36 pairs the 12th and the 25th bound the
    median."""
    found = cpu_row([pair(0.001 * one) for one in (*range(1, 36), 1000)], 1)
    assert found is not None
    assert [found.value, found.min, found.max] == pytest.approx([0.074, 0.048, 0.1])
    missed = cpu_row([pair(0.01), pair(0.03), pair(9.0, cached=0), pair(0.08, cached=GIB)], 2)
    assert missed is not None and missed.value == pytest.approx(0.04), "a miss is no hit's CPU time"
    unknown = replace(pair(0.5), rest=Effort(None))
    for few in ([], [pair(0.5)], [pair(0.5, cached=0)] * 2, [unknown] * 4):
        assert cpu_row(few, 1) is None


def run(arm, scale, *, known=True):
    """A second in the fill's connector, and a load of half a second, for ``scale`` = 1."""
    twos = [pair(0.02 * scale, load=1.0 + 0.5 * scale), pair(0.06 * scale, load=1.0 + 0.5 * scale)]
    made = [effort for two in twos for effort in (two.load, two.rest)]
    fill = [Effort(1.0, {"save": 0.75 * scale}, 0.001), Effort(1.0, {"save": 0.25 * scale}, 0.003)]
    return Run(
        arm,
        outcomes(0.5),
        50.0,
        pairs=[one for two in twos for one in (two.loaded, two.warm)],
        pair_efforts=made if known else [Effort(one.cpu_s) for one in made],
        fill_tokens=200,
        fill_efforts=fill if known else [Effort(1.0)] * 2,
    )


def test_rows_hold_the_engines_time_and_cpu_time_against_kvtiers():
    found = {
        row.name: row for row in rows(ALL, [run("kvtier-ram", 1.0), run("lmcache-ram", 3.0)], 1)
    }
    load = found["lmcache-ram: connector, a load"]
    assert [load.value, load.limit, load.ratio, load.min] == [1500.0, 500.0, 3.0, 1500.0]
    share = found["kvtier-ram: connector, of the fill"]
    assert share.value == pytest.approx(25.0), "5 ms a token at 50 tokens/s"
    look, cold = found["kvtier-ram: look-up"], found["kvtier-ram: look-up, cold"]
    assert [look.value, cold.value, cold.min, cold.max] == pytest.approx([2.0, 2.0, 1.0, 3.0])
    cpu = found["lmcache-ram: CPU a GiB of hits"]
    assert [cpu.value, cpu.limit, cpu.ratio] == pytest.approx([0.48, 0.16, 3.0])
    unread = {row.name for row in rows(ALL, [run("kvtier-ram", 1.0, known=False)], 1)}
    assert not [name for name in unread if "look-up" in name or "connector" in name]
    assert "kvtier-ram: CPU a GiB of hits" in unread


# -- arms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", CONTENDERS.values(), ids=lambda one: one.name)
def test_every_template_can_be_filled_in(one):
    parts = (one.connector, one.yaml, one.env, one.beside)
    text = json.dumps([rendered(part, VALUES) for part in parts if part])
    assert "{ram" not in text and "{port" not in text and "{run" not in text


def test_a_peer_that_is_not_installed_says_how_to_install_it():
    missing = replace(CONTENDERS["lmcache-ram"], peer="lmcache-0.0.0")
    assert missing.obstacle == "lmcache-0.0.0 is not installed: make peers"
    assert not CONTENDERS["kvtier-ram"].obstacle


# -- files -----------------------------------------------------------------------------------------


def test_a_run_survives_its_file():
    again = Again(outcomes(0.6), "no port")
    for one in (*RUNS, replace(run("kvtier-ram", 1.0), second=again, mode="V2")):
        told = msgspec.json.decode(msgspec.json.encode(one), type=Run)
        assert msgspec.json.encode(told) == msgspec.json.encode(one)
        assert told.fill_efforts == list(one.fill_efforts) and told.second == one.second


def test_the_page_tells_what_was_measured_and_why_an_arm_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    shape = {"num_documents": 8, "document_length": 8000, "question_length": 1, "output_len": 1}
    given = argparse.Namespace(arms=ALL, output=tmp_path / "compare.json", rounds=1, **shape)
    mode = "Model Runner V2, async scheduling"
    nvme = Run("kvtier-nvme", outcomes(0.2), restart=Again(outcomes(0.3, cached=0)), mode=mode)
    made = write(given, [*RUNS, nvme], {"lmcache-redis": "no redis-server"}, 1)
    assert Row("lmcache-redis: ttft mean", None, "s") in made
    answers, besides, out, origin = readme.compare().split("\n\n")
    assert "| `lmcache-ram` | 1.6 s | 500 ms | 2.22 x |" in answers
    assert "| `kvtier-nvme` | - | - | - | - | cold | 0 |" in besides
    assert out == "`lmcache-redis` cannot run: no redis-server." and mode in origin
    assert draw(given, made).read_bytes().startswith(b"\x89PNG")
