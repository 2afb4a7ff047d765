"""The comparison's arithmetic and arms, without any server."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.bench.compare.__main__ import about
from kvtier.bench.compare.arm_result import arm_results
from kvtier.bench.compare.measures import Run
from kvtier.bench.compare.peers.contenders import CONTENDERS, Contender, names, rendered
from kvtier.bench.compare.rows import rows, write
from kvtier.bench.long_doc_qa.arms import ARMS, Sizes
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.requests.client import Outcome

SIZES = Sizes(Workload([1], 4, 8192, 128, 8), 1, 128, 256, 28 << 10)
VALUES = names(SIZES, Path("/place"), Path("/run"), (1001, 1002, 1003))


def outcomes(*ttft: float, tokens: int = 7, cached: int = 50) -> list[Outcome]:
    return [
        Outcome(place, 0, False, 0.0, one, sum(ttft), True, 100, 1, cached, tokens=[tokens])
        for place, one in enumerate(ttft)
    ]


def arms(*named: str) -> list[Contender]:
    return [CONTENDERS[name] for name in named]


ALL = arms("none", "vllm-prefix-cache", "lmcache-ram", "lmcache-redis", "kvtier-ram")
RUNS = [
    Run("none", outcomes(10.0, 12.0, cached=0)),
    Run("vllm-prefix-cache", outcomes(1.0, 1.2)),
    Run("lmcache-ram", outcomes(1.5, 1.7), pairs=outcomes(1.4, 1.0, 1.8, 1.2)),
    Run("kvtier-ram", outcomes(1.2, 1.4), pairs=outcomes(1.2, 1.0, 2.4, 2.2)),
    Run("vllm-prefix-cache", outcomes(1.0, 1.2)),
    Run("lmcache-ram", outcomes(1.5, 1.7, tokens=8), pairs=outcomes(1.5, 1.0)),
    Run("kvtier-ram", outcomes(1.3, 1.5), pairs=outcomes(1.3, 1.0, 9.25, 9.0)),
]


def test_load_cost_is_what_a_hit_costs_more_than_a_warm_one_in_the_same_process() -> None:
    found = arm_results(ALL, RUNS)
    assert found["vllm-prefix-cache"].load_cost is None
    assert found["lmcache-ram"].load_cost == pytest.approx(0.5)
    assert found["kvtier-ram"].load_cost == pytest.approx(0.225), "the median of .2 .2 .3 .25"
    assert found["lmcache-ram"].times_ours == pytest.approx(0.5 / 0.225)
    assert found["none"].times_ours is None
    assert found["lmcache-ram"].throughput == pytest.approx(200 / 3.2)


def test_wrong_answers_and_misses_show() -> None:
    found = arm_results(ALL, RUNS)
    assert (
        found["lmcache-ram"].differing,
        found["kvtier-ram"].differing,
        found["none"].differing,
    ) == (2, 0, None)
    assert (found["none"].cached, found["kvtier-ram"].cached) == (0.0, 0.5)


def test_an_arm_that_did_not_run_is_a_row_that_says_why(tmp_path: Path) -> None:
    write(tmp_path / "compare.json", ALL, RUNS, {"lmcache-redis": "no redis-server"}, workload={})
    told = json.loads((tmp_path / "compare.json").read_text())
    values = {row["name"]: row["value"] for row in told["rows"]}
    assert values["lmcache-redis: load cost"] is None and values[
        "lmcache-ram: load cost"
    ] == pytest.approx(0.5)
    assert told["arms"]["lmcache-redis"]["cannot_run"] == "no redis-server"
    assert told["arms"]["lmcache-ram"]["note"] and told["arms"]["lmcache-ram"]["runs"] == 2


def test_load_costs_are_held_against_the_same_kind_of_place() -> None:
    by_name = {row.name: row for row in rows(ALL, RUNS)}
    assert by_name["lmcache-ram: load cost"].limit == pytest.approx(0.225)
    assert (
        by_name["lmcache-ram: load cost"].min,
        by_name["lmcache-ram: load cost"].max,
    ) == pytest.approx((0.4, 0.6))
    assert by_name["kvtier-ram: ttft mean"].limit == pytest.approx(1.1)
    assert {one.like for one in CONTENDERS.values()} - {None} <= CONTENDERS.keys()


@pytest.mark.parametrize("one", CONTENDERS.values(), ids=lambda one: one.name)
def test_every_template_can_be_filled_in(one: Contender) -> None:
    text = json.dumps(
        [rendered(part, VALUES) for part in (one.connector, one.yaml, one.env, one.beside) if part]
    )
    assert "{ram" not in text and "{port" not in text and "{run" not in text


def test_numbers_are_numbers_in_a_peers_file() -> None:
    yaml = rendered(CONTENDERS["lmcache-disk"].yaml, VALUES)
    assert yaml["chunk_size"] == 256 and isinstance(yaml["max_local_cpu_size"], float)
    assert yaml["local_disk"] == "/place/nvme/" and yaml["local_cpu"] is False
    assert rendered({"a": ["{port}", "x", True]}, VALUES) == {"a": [1001, "x", True]}


def test_one_memory_budget_for_all() -> None:
    given = SIZES.names(Path("/place/nvme"), Path("/run"))
    for ram, name in (
        ("lmcache-ram", "ram_all"),
        ("lmcache-disk", "ram_few"),
        ("lmcache-redis", "ram_few"),
    ):
        yaml = rendered(CONTENDERS[ram].yaml, VALUES)
        assert yaml["max_local_cpu_size"] == pytest.approx(
            int(given[name].removesuffix("MiB")) / 1024, abs=0.02
        )
    assert CONTENDERS["kvtier-nvme"].env == ARMS["kvtier-nvme"].kvtier


def test_a_peer_that_is_not_installed_says_how_to_install_it() -> None:
    missing = replace(CONTENDERS["lmcache-ram"], peer="lmcache-0.0.0")
    assert missing.obstacle == "lmcache-0.0.0 is not installed: make peers"
    assert "hung" in CONTENDERS["lmcache-redis-native"].obstacle
    assert not CONTENDERS["kvtier-ram"].obstacle


@pytest.mark.parametrize(("rounds", "words"), [(1, "1 round"), (3, "3 rounds")])
def test_the_picture_says_how_many_rounds_there_were(rounds: int, words: str) -> None:
    given = argparse.Namespace(num_documents=8, document_length=8000, rounds=rounds)
    assert about(given) == f"8 documents of 8,000 tokens, {words}"
