"""The comparison's arithmetic, its arms and its files, without any server."""

import argparse
import json
from pathlib import Path

import pytest

from kvtier.bench import readme
from kvtier.bench.compare.__main__ import draw, write
from kvtier.bench.compare.peers.contenders import CONTENDERS, names, rendered
from kvtier.bench.compare.result import Again, Run, rows
from kvtier.bench.long_doc_qa.arms import Sizes
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.processes.engine import Geometry
from kvtier.bench.report import Row
from kvtier.bench.requests.client import Outcome

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


# -- arms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", CONTENDERS.values(), ids=lambda one: one.name)
def test_every_template_can_be_filled_in(one):
    parts = (one.connector, one.yaml, one.env, one.beside)
    text = json.dumps([rendered(part, VALUES) for part in parts if part])
    assert "{ram" not in text and "{port" not in text and "{run" not in text


# -- files -----------------------------------------------------------------------------------------


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
