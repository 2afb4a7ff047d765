"""The comparison of latencies without engines: which gaps count, what is made of them, and how it
is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.bench import readme
from kvtier.bench.compare.calls import Step
from kvtier.bench.compare.latency import __main__ as latency
from kvtier.bench.compare.latency.streams import Work, pairs
from kvtier.bench.compare.latency.windows import Pair, Window
from kvtier.bench.compare.peers.contenders import CONTENDERS
from kvtier.bench.report import write_results
from kvtier.bench.requests.client import Client, RequestError
from tests.stub_engine import stub_engines

WORK = Work(range(100, 2000), document_length=4096, question_length=16, streams=2, quiet=4)


def test_it_runs_by_its_name() -> None:
    command = [sys.executable, "-m", "kvtier.bench.compare.latency", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


# -- which gaps count ------------------------------------------------------------------------------


def test_a_gap_counts_where_it_lies_in_the_window_at_least_in_part() -> None:
    """The long request came at 3.5 and had its first token at 6.2."""
    times = [[0.0, 9.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0], [0.0, 0.0, 2.5, 3.5, 4.5, 6.5, 7.5]]
    window = Window.of(times, 2, 3.5, 2.7, 4096)
    assert list(window.quiet) == [1.0, 1.0, 1.0]
    assert [list(one) for one in window.gaps] == [[2.0, 1.0, 1.0], [1.0, 2.0]]
    assert (window.ttft, window.cached) == (2.7, 4096)


def test_time_lost_is_what_the_gaps_of_a_request_have_beyond_quiet_ones() -> None:
    window = Window([0.25, 0.0, 0.5], [[1.0, 0.25], [0.5, 0.5]], 1.0, 0)
    assert (window.quiet_gap, window.gap, window.longest) == (0.25, 0.5, 1.0)
    assert window.lost == pytest.approx((0.75 + 0.5) / 2)
    short = Window([0.25], [[0.25, 0.125]], 1.0, 0)
    assert short.lost == pytest.approx(-0.125), "what was gained counts too"


def test_in_the_engine_a_gap_is_between_the_ends_of_two_of_the_workers_steps() -> None:
    ends = [8.0, 9.0, 9.5, 10.0, 10.75, 11.0, 11.25, 11.5]
    steps = [Step(at, {"clear_connector_metadata": 0.0}, []) for at in ends]
    scheduler = [Step(10.5, {"take_events": 0.0, "load": 0.125}, [])]
    window = Window([0.25], [[1.0]], 0.9, 4096, since=9.0, began=10.25)
    told = window.of_engine([*steps[:4], *scheduler, *steps[4:]])
    assert list(told.quiet) == [0.5, 0.5]
    assert [list(one) for one in told.gaps] == [[0.75, 0.25, 0.25]]
    assert told.lost == pytest.approx(-0.25) and told.cached == 4096
    assert list(told.spent) == [0.125, 0.0, 0.0]


def test_a_pair_tells_what_the_load_alone_took() -> None:
    loaded, warm = Window([0.25], [[1.0]], 1.5, 0), Window([0.25], [[0.5]], 0.5, 0)
    assert Pair(loaded, warm).lost == 0.5 and Pair(loaded, warm).cost == 1.0


# -- what is asked ---------------------------------------------------------------------------------


def test_short_documents_push_the_long_one_out() -> None:
    short = WORK.short()
    assert sum(len(ask.prompt) for ask in short) > 1.5 * (4096 + 16) + 1024
    assert len({tuple(ask.prompt) for ask in short}) == len(short)


def test_two_questions_have_their_document_in_common_and_nothing_else() -> None:
    one, other = WORK.long(0).prompt, WORK.long(1).prompt
    assert one[:4096] == other[:4096] and one[4096:] != other[4096:] and len(one) == 4112
    decoding = [tuple(ask.prompt) for turn in (0, 1) for ask in WORK.decoding(turn)]
    assert len(set(decoding)) == 4


def test_a_request_that_stops_decoding_is_an_error_in_words() -> None:
    with stub_engines(1) as (engine,):
        asker = Client(f"http://127.0.0.1:{engine.port}", "stub", True, 20.0)
        work = Work(range(100, 2000), 4096, 16, streams=2, quiet=2500)
        with pytest.raises(RequestError, match="ended too early: no error"):
            pairs(asker, work, 1)


# -- how it is told --------------------------------------------------------------------------------


def pair(longest: float, ttft: float) -> Pair:
    gaps = [[longest, 0.01], [longest, 0.01]]
    loaded = Window([0.01, 0.01], gaps, ttft, 4096, spent=[0.005, 0.004])
    return Pair(loaded, Window([0.01, 0.01], [[0.02, 0.01], [0.02, 0.01]], 0.5, 4096))


ARMS = [CONTENDERS[name] for name in ("vllm-offloading-ram", "kvtier-ram")]
PEERS = [pair(0.06, 0.75), pair(0.08, 0.75), pair(0.07, 0.75)]
OURS = [pair(0.035, 0.7)]
FOUND = {
    "vllm-offloading-ram": latency.Found(PEERS, PEERS),
    "kvtier-ram": latency.Found(OURS, OURS),
}


def test_an_arm_stands_beside_the_kvtier_arm_of_its_kind() -> None:
    rows = {row.name: row for row in latency.rows(ARMS, FOUND)}
    peer = rows["vllm-offloading-ram: longest gap"]
    assert peer.value == pytest.approx(70) and (peer.min, peer.max) == pytest.approx((60, 80))
    assert peer.limit == pytest.approx(35) and peer.ratio == pytest.approx(2)
    own = rows["kvtier-ram: time lost to the load"]
    assert own.value == pytest.approx(15) and own.ratio is None
    assert rows["kvtier-ram: load cost"].value == pytest.approx(200)
    assert rows["kvtier-ram: steps lost to the load"].value == own.value
    assert rows["kvtier-ram: longest in the connector"].value == pytest.approx(5)
    assert rows["kvtier-ram: in the connector"].value == pytest.approx(9)
    assert rows["no load: longest gap"].value == pytest.approx(20)
    assert rows["no load: longest step"].value == pytest.approx(20)


def test_an_arm_that_did_not_run_has_no_rows() -> None:
    rows = latency.rows(ARMS, FOUND | {"vllm-offloading-ram": latency.Found()})
    assert {row.name.partition(":")[0] for row in rows} == {"kvtier-ram", "no load"}
    assert latency.rows(ARMS, dict.fromkeys(FOUND, latency.Found())) == []


def test_readmes_table_tells_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    arms = {one.name: {"cannot_run": None} for one in ARMS}
    made = latency.rows(ARMS, FOUND)
    write_results(tmp_path / "latency.json", latency.NAME, made, arms=arms)
    head, _, *lines = readme.latency().split("\n\n")[0].splitlines()
    cells = {line.split(" | ")[0]: line.split(" | ") for line in lines}
    columns = head.split(" | ")
    told = dict(zip(columns, cells["| `kvtier-ram`"], strict=True))
    assert told["longest gap"] == "35 ms (35 to 35)"
    assert told["time lost to the load"] == "15 ms (15 to 15)"
    assert dict(zip(columns, cells["| no load"], strict=True))["time lost to the load"] == "-"
