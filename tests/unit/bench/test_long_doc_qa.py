"""Long Doc QA's parts that need no engine: prompts, cache sizes, counters, sums, files, the client,
server refusal."""

from __future__ import annotations

import argparse
import csv
import json
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from kvtier.bench import report
from kvtier.bench.flags import chosen
from kvtier.bench.long_doc_qa import run as long_doc_qa
from kvtier.bench.long_doc_qa.arms import ARMS, GPU_HIT, NONE, Sizes, filled, server_args
from kvtier.bench.long_doc_qa.report import Round, Summary, draw, rows_of, summarise, verdict
from kvtier.bench.long_doc_qa.run import add_arguments
from kvtier.bench.long_doc_qa.work import PRESETS as SHAPES
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.model import PRESETS, generated_text, kv_token_bytes
from kvtier.bench.processes import servers
from kvtier.bench.processes.engine import Geometry
from kvtier.bench.processes.servers import ServerError, VllmServer
from kvtier.bench.report import percentile
from kvtier.bench.requests.client import Client, Outcome, RequestError, connect, parse_hits
from kvtier.bench.requests.prompts import Ask

DOCUMENT, QUESTION = 64, 8


def work(**more: Any) -> Workload:
    sizes: dict[str, Any] = {
        "num_documents": 3,
        "document_length": DOCUMENT,
        "question_length": QUESTION,
    }
    return Workload(range(100, 2000), output_len=4, **({"repeat_count": 1} | sizes | more))


def shared_prefix(one: Ask, other: Ask) -> int:
    same = [left == right for left, right in zip(one.prompt, other.prompt, strict=True)]
    return same.index(False) if False in same else len(same)


# -- workload --------------------------------------------------------------------------------------


def test_a_query_shares_its_document_and_nothing_more_with_the_warm_up() -> None:
    warm = {ask.document: ask for ask in work().warm_up()}
    for ask in work(repeat_count=2).queries():
        assert len(ask.prompt) == DOCUMENT + QUESTION
        assert DOCUMENT <= shared_prefix(ask, warm[ask.document]) < DOCUMENT + QUESTION
        assert all(shared_prefix(ask, warm[other]) < 4 for other in warm if other != ask.document)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("tile", [0, 1, 2, 0, 1, 2]), ("interleave", [0, 0, 1, 1, 2, 2]), ("random", None)],
)
def test_repeat_modes_order_the_documents(mode: str, expected: list[int] | None) -> None:
    asks = work(repeat_count=2, repeat_mode=mode).queries()
    order = [ask.document for ask in asks]
    assert expected is None or order == expected
    assert Counter(order) == {0: 2, 1: 2, 2: 2}
    assert (
        len({(ask.document, ask.question) for ask in asks})
        == len({tuple(ask.prompt) for ask in asks})
        == 6
    )


def test_random_order_follows_the_seed() -> None:
    shuffled = [work(repeat_count=9, repeat_mode="random", shuffle_seed=s) for s in (1, 1, 2)]
    orders = [[ask.document for ask in one.queries()] for one in shuffled]
    assert orders[0] == orders[1] != orders[2]


def test_hit_miss_ratio_puts_unseen_documents_between_the_queries() -> None:
    asks = work(num_documents=4, hit_miss_ratio=(2, 1)).queries()
    assert [ask.is_miss for ask in asks] == [False, False, True, False, False, True]
    assert len({ask.document for ask in asks}) == 6
    assert not any(ask.is_miss for ask in work().queries())


def test_words_make_text_where_a_server_takes_no_ids() -> None:
    ask = Workload(["ba", "do"], 1, DOCUMENT, QUESTION, 4, 1).queries()[0]
    assert isinstance(ask.prompt, str) and len(ask.prompt.split(" ")) == DOCUMENT + QUESTION


# -- arms ------------------------------------------------------------------------------------------


def sizes_of() -> Sizes:
    return Sizes(work(num_documents=8, repeat_count=2), Geometry(16, 32, 2**16))


def mib(text: str) -> int:
    return int(text.removesuffix("MiB"))


def test_only_the_bound_arm_keeps_the_documents_on_the_gpu() -> None:
    sizes = sizes_of()
    documents = 8 * DOCUMENT // 16
    for arm in ARMS.values():
        blocks = sizes.gpu_blocks(arm)
        assert blocks > 2 * sizes.request_blocks, "the requests in flight must run"
        assert (blocks > documents) == (arm.name == GPU_HIT)
    assert len({sizes.gpu_blocks(arm) for arm in ARMS.values() if arm.name != GPU_HIT}) == 1


def test_ram_of_the_nvme_arm_holds_the_requests_in_flight_but_not_the_documents(
    tmp_path: Path,
) -> None:
    sizes = sizes_of()
    names = sizes.names(tmp_path, tmp_path)
    ram = mib(filled(ARMS["kvtier-ram"].kvtier or {}, names)["KVTIER_RAM_BYTES"])
    nvme = filled(ARMS["kvtier-nvme"].kvtier or {}, names)
    documents = 8 * DOCUMENT * sizes.geometry.token_bytes / 2**20
    assert ram >= documents and mib(nvme["KVTIER_NVME_BYTES"]) >= documents
    assert (
        2 * DOCUMENT * sizes.geometry.token_bytes / 2**20
        <= mib(nvme["KVTIER_RAM_BYTES"])
        < documents / 2
    )
    assert nvme["KVTIER_NVME_PATH"] == str(tmp_path)


def test_arms_without_kvtier_have_no_connector() -> None:
    connected = {
        name for name, arm in ARMS.items() if "--kv-transfer-config" in server_args(arm, sizes_of())
    }
    assert (
        connected
        == {name for name in ARMS if name.startswith("kvtier")}
        == set(ARMS) - {NONE, GPU_HIT}
    )


def test_kv_bytes_of_a_token_follow_the_geometry() -> None:
    assert kv_token_bytes(PRESETS["qwen"], 2) == 28 * 2**10
    assert kv_token_bytes(PRESETS["mla"], 2) == 3 * (512 + 64) * 2


# -- counters and sums -----------------------------------------------------------------------------

BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
METRICS = "\n".join(
    [
        f'{BY_SOURCE}{{engine="0",model_name="m",source="device"}} 128.0',
        f'{BY_SOURCE}{{engine="1",model_name="m",source="device"}} 64.0',
        f'{BY_SOURCE}{{engine="0",model_name="m",source="host"}} 1.024e+03',
        f'{BY_SOURCE}{{engine="0",model_name="m",source="disk"}} 512.0',
        f'{BY_SOURCE}{{engine="0",model_name="m",source="p2p"}} 256.0',
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 192.0',
        'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 1792.0',
    ]
)


def test_hits_are_read_by_tier_and_summed_over_engines() -> None:
    assert parse_hits(METRICS) == {"gpu": 192, "ram": 1024, "nvme": 512, "redis": 256}


def test_hits_of_an_older_vllm_tell_own_cache_from_connector() -> None:
    assert parse_hits("\n".join(METRICS.splitlines()[5:])) == {"gpu": 192, "unknown": 1792}
    assert parse_hits("other_total 1") is None


@pytest.mark.parametrize("percent", [0, 37, 50, 99, 100])
def test_percentile_is_numpys(percent: float) -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def outcome(document: int, ttft: float, tokens: list[int], start: float = 0.0) -> Outcome:
    return Outcome(
        document, 0, False, start, ttft, start + 2 * ttft, True, 72, len(tokens), 64, tokens=tokens
    )


def two_rounds(second_tokens: list[int]) -> list[Round]:
    none = Round(NONE, [outcome(0, 1.0, [5, 6]), outcome(1, 3.0, [7, 8], 2.0)], {"gpu": 0.0})
    ram = Round(
        "kvtier-ram", [outcome(0, 0.1, [5, 6]), outcome(1, 0.3, second_tokens, 0.2)], {"ram": 128.0}
    )
    return [none, ram]


def test_summary_takes_times_hits_and_answers_from_the_query_round() -> None:
    none, ram = summarise(two_rounds([7, 8]))
    assert (none.ttft_mean, none.total, none.latency_mean) == (2.0, 8.0, 4.0)
    told = ram.as_json()
    assert told["hit_tokens"] == {"gpu": 0, "ram": 128, "nvme": 0, "redis": 0}
    assert told["prompt_tokens"] == 144
    assert (none.same_tokens_as_none, ram.same_tokens_as_none) == (None, True)


def test_an_answer_that_differs_or_is_missing_is_said_by_arm() -> None:
    for tokens in ([7, 9], []):
        rounds = two_rounds(tokens)
        rounds[1].outcomes[1].successful = bool(tokens)
        summaries = summarise(rounds)
        assert summaries[1].same_tokens_as_none is False
        same, words = verdict(summaries)
        assert not same and "kvtier-ram (1)" in words
    assert verdict(summarise(two_rounds([7, 8])))[0]


# -- files -----------------------------------------------------------------------------------------


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return chosen(parser.parse_args(list(given)), Workload, SHAPES)


def test_results_have_the_one_form_and_the_arms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments("--output-dir", str(tmp_path), "--model", str(tmp_path / "some-model"))
    none, ram = two_rounds([7, 8])
    mode = "Model Runner V2, async scheduling"
    assert long_doc_qa.conclude(args, [none, replace(ram, mode=mode)]) == 0
    shown = capsys.readouterr().out
    assert "same greedy tokens as none: kvtier-ram" in shown
    assert f"The engines ran by {mode}." in shown
    form = json.loads((tmp_path / "long_doc_qa.json").read_text())
    assert form["engines"] == mode
    assert form["benchmark"] == "long_doc_qa" and form["machine"]["cores"] >= 1
    assert set(form) >= {"benchmark", "command", "version", "machine", "rows", "arms"}
    assert {tuple(row) for row in form["rows"]} == {
        ("name", "value", "unit", "limit", "ratio", "min", "max")
    }
    assert form["rows"][3]["name"] == "kvtier-ram: ttft mean" and form["rows"][3][
        "ratio"
    ] == pytest.approx(0.1)
    assert set(form["arms"]["kvtier-ram"]) >= {
        *(
            "ttft_mean_s",
            "ttft_p50_s",
            "ttft_p99_s",
            "latency_mean_s",
            "total_s",
            "hit_tokens",
            "prompt_tokens",
        ),
        "same_tokens_as_none",
    }
    assert str(tmp_path) not in (tmp_path / "long_doc_qa.json").read_text(), (
        "results are committed: no paths"
    )
    lines = list(csv.DictReader((tmp_path / "long_doc_qa.csv").read_text().splitlines()))
    times = {"request_start", "ttft", "request_end", "successful", "is_miss"}
    assert times <= set(lines[0])
    assert [(line["arm"], line["document"]) for line in lines] == [
        *((NONE, "0"), (NONE, "1")),
        *(("kvtier-ram", "0"), ("kvtier-ram", "1")),
    ]
    width = struct.unpack(">I", (tmp_path / "long_doc_qa.png").read_bytes()[16:20])[0]
    assert width == 1200


def test_different_answers_and_failed_requests_fail_the_run(tmp_path: Path) -> None:
    given = ["--output-dir", str(tmp_path)]
    assert long_doc_qa.conclude(arguments(*given), two_rounds([1, 1])) == 0
    assert long_doc_qa.conclude(arguments(*given, "--require-same-tokens"), two_rounds([1, 1])) == 1
    rounds = two_rounds([7, 8])
    rounds[0].outcomes[0].successful = False
    assert long_doc_qa.conclude(arguments(*given), rounds) == 1


def test_a_row_against_the_gpu_hit_carries_its_limit() -> None:
    summary = {
        name: Summary(name, [time], time, time, 1, 1, 0, None, 0)
        for name, time in ((GPU_HIT, 1.0), ("kvtier-nvme", 1.2))
    }
    row = rows_of(list(summary.values()))[-1]
    assert row.limit == 1.5 and row.ratio == pytest.approx(1.2)


def test_what_another_engine_computed_is_held_against_asking_again() -> None:
    asks = [
        outcome(0, 0.22, [1]),
        outcome(1, 0.24, [1]),
        outcome(0, 0.2, [1]),
        outcome(1, 0.2, [1]),
    ]
    for again in asks[2:]:
        again.question = 1
    rows = {row.name: row for row in rows_of(summarise([Round("kvtier-server", asks, None)]))}
    row = rows["kvtier-server: ttft of what another engine computed, against asked again"]
    assert row.value == pytest.approx(1.15) and row.limit == 1.15


def test_the_command_of_a_result_holds_no_absolute_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "x.py"), f"--out={tmp_path}/a/b", "/elsewhere/c", "--n", "3"]
    )
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert report.own_command() == "python x.py --out=a/b c --n 3"


@pytest.mark.parametrize(
    "given", [["--arms", "none,nope"], ["--hit-miss-ratio", "0:1"], ["--num-documents", "0"]]
)
def test_wrong_flags_are_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(*given)


# -- client, against a real HTTP server ------------------------------------------------------------


class Plain(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that knows none of vLLM's additions. Refuses prompts that hold
    the word bad."""

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self._reply(200 if known else 404, {"data": [{"id": "m"}]} if known else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (
            self.path != "/v1/completions"
            or "ignore_eos" in body
            or body["prompt"].startswith("bad")
        ):
            self._reply(404 if self.path == "/tokenize" else 400, {"error": "no"})
            return
        events: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in ("", "x", "y")]
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(200, data.encode())

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def plain_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_plain_server_is_asked_with_text_and_a_refusal_is_an_outcome(plain_server: str) -> None:
    client, words = connect(plain_server + "/v1", None, 30)
    assert (client.model, client.vllm) == ("m", False)
    assert isinstance(words[0], str)
    done: list[None] = []
    asks = [Ask(0, 0, "good one", 2), Ask(1, 0, "bad one", 2)]
    good, bad = client.run(asks, 2, lambda: done.append(None))
    assert (
        good.successful
        and good.answer == "xy"
        and (good.prompt_tokens, good.output_tokens) == (9, 2)
    )
    assert good.ttft is not None and 0 < good.ttft <= good.latency
    assert not bad.successful and "HTTP 400" in bad.error
    assert len(done) == 2


def test_no_server_is_an_error_that_names_the_address() -> None:
    port = servers.free_port()
    with pytest.raises(RequestError, match=f"127.0.0.1:{port}"):
        connect(f"http://127.0.0.1:{port}", None, 5)


def test_a_measured_round_of_a_running_server_ends_in_files(
    plain_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = [
        "--num-documents",
        "2",
        "--document-length",
        "12",
        "--repeat-count",
        "2",
        "--settle-seconds",
        "0",
    ]
    assert (
        long_doc_qa.main(["--base-url", plain_server, "--output-dir", str(tmp_path), *shape]) == 0
    )
    form = json.loads((tmp_path / "long_doc_qa.json").read_text())
    assert form["arms"]["server"]["requests"] == 4
    assert form["arms"]["server"]["hit_tokens"] == {
        "gpu": None,
        "ram": None,
        "nvme": None,
        "redis": None,
    }
    assert form["arms"]["cold"]["requests"] == 2, "each document's first answer is the base"
    ratios = {row["name"]: row["ratio"] for row in form["rows"]}
    assert ratios["cold: ttft mean"] == 1.0 and ratios["server: ttft mean"] > 0
    lines = list(csv.DictReader((tmp_path / "long_doc_qa.csv").read_text().splitlines()))
    assert [line["arm"] for line in lines] == ["cold"] * 2 + ["server"] * 4
    assert form["workload"]["model"] == "m" and "running" in form["workload"]["server"]
    shown = capsys.readouterr().out
    assert (
        "TTFT vs cold" in shown and "x faster" in shown and "answers" not in shown.splitlines()[1]
    )


def test_of_a_running_server_only_what_it_says_itself_is_told() -> None:
    running = Client("http://127.0.0.1:1", "Qwen/Qwen2.5-7B", True, 1.0, "9.9.9")
    told = long_doc_qa._subtitle(arguments("--base-url", "http://127.0.0.1:1"), running)
    assert "model Qwen2.5-7B; vLLM 9.9.9; a server that ran already" in told
    silent = long_doc_qa._subtitle(arguments(), Client("http://127.0.0.1:1", "m", False, 1.0))
    assert "vLLM" not in silent and "cores" not in silent
    assert "model ;" not in long_doc_qa._subtitle(arguments(), None)


def test_a_server_that_was_warm_before_is_told() -> None:
    cold = Round("cold", [outcome(0, 1.0, [1])], {"gpu": 64.0})
    again = Round("server", [outcome(0, 0.1, [1])], {"gpu": 64.0})
    assert "--shuffle-seed" in verdict(summarise([cold, again]))[1]


@pytest.mark.parametrize(
    ("hits", "told"),
    [
        ({"gpu": 64.0}, "All hits came from vLLM's own prefix cache, none from kvtier"),
        ({"gpu": 16.0, "ram": 48.0}, "Of the hit tokens 25% came from vLLM's own prefix cache."),
        ({}, "needs servers started here, the arm none and another arm."),
    ],
)
def test_of_a_running_server_it_is_told_whose_hits_they_were(
    hits: dict[str, float], told: str
) -> None:
    cold = Round("cold", [outcome(0, 1.0, [1])], {})
    again = Round("server", [outcome(0, 0.1, [1])], hits)
    words = verdict(summarise([cold, again]))[1]
    assert told in words and (bool(hits) or words.endswith(told))


def test_the_preset_is_the_published_shape_and_flags_beat_it() -> None:
    preset = arguments("--preset", "lmi")
    assert (preset.num_documents, preset.document_length, preset.max_inflight_requests) == (
        46,
        10000,
        4,
    )
    assert (preset.repeat_count, preset.output_len, preset.repeat_mode, preset.shuffle_seed) == (
        2,
        100,
        "tile",
        0,
    )
    for given in (
        ("--num-documents", "8", "--preset", "lmi"),
        ("--preset", "lmi", "--num-documents", "8"),
    ):
        assert (arguments(*given).num_documents, arguments(*given).document_length) == (8, 10000)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    assert "documents (default: 8; lmi: 46)" in shown and "(default: 20000; lmi: 10000)" in shown


# -- the picture -----------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[Summary]], Any]:
    """The figure of a picture, as it was written."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)

    def drawing(summaries: list[Summary]) -> Any:
        draw(tmp_path, summaries, "what was asked")
        return kept[-1]

    return drawing


SHOWN = [
    Summary("none", [4.0, 4.4], 4.6, 9, 100, 10, 0, {}, None),
    Summary("kvtier-ram", [0.1, 0.12], 0.2, 1, 100, 10, 0, {"ram": 90}, 0),
    Summary("kvtier-nvme-restart", [0.2, 9.0], 0.4, 1, 100, 10, 0, {"ram": 45, "nvme": 45}, 0),
    Summary("kvtier-redis", [0.3, 0.3], 0.5, 1, 100, 10, 0, None, 0),
]


def test_a_colour_means_one_source(drawn: Callable[[list[Summary]], Any]) -> None:
    figure = drawn(SHOWN)
    (legend,) = figure.legends
    named = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.texts, legend.get_patches(), strict=True)
    }
    assert set(named) == {"ram", "nvme", "computed", "not told"}
    for axis in figure.axes[:2]:
        bars = [patch.get_facecolor() for patch in axis.patches]
        assert bars == [named["computed"], named["ram"], named["nvme"], named["not told"]]


def test_labels_stay_inside_their_panels_and_off_each_other(
    drawn: Callable[[list[Summary]], Any],
) -> None:
    figure = drawn(SHOWN)
    figure.canvas.draw()
    for axis in figure.axes[:2]:
        right = axis.get_window_extent().x1
        boxes = [text.get_window_extent() for text in axis.texts]
        assert boxes and all(box.x1 <= right for box in boxes)
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    names = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(box.x0 >= 0 for box in names)


# -- servers ---------------------------------------------------------------------------------------


def test_a_server_that_does_not_come_up_is_refused_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_SERVER", "http.server")  # takes no --model, so it ends at once
    with pytest.raises(ServerError, match=r"ended with status 2(.|\n)*invalid int value"):
        VllmServer("m", [], {"A": "1"}, tmp_path / "log").start()


def test_a_server_that_never_answers_is_stopped_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text("import time\nprint('deaf', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(servers, "_SERVER", "deaf")
    server = VllmServer("m", [], {"PYTHONPATH": str(tmp_path)}, tmp_path / "log", deadline_s=2)
    with pytest.raises(ServerError, match=r"within 2 s(.|\n)*deaf"):
        server.start()
    assert server._process is None


def test_generated_text_is_the_same_again_and_sentences() -> None:
    assert generated_text(500, 3) == generated_text(500, 3) != generated_text(500, 4)
    lengths = [len(sentence.split()) for sentence in generated_text(5000, 0).split(". ")]
    assert 4 < sum(lengths) / len(lengths) < 40


def test_pre_warm_up_prompts_share_nothing_with_the_documents() -> None:
    everything = [*work().pre_warm_up(), *work().warm_up()]
    assert len({tuple(ask.prompt[:8]) for ask in everything}) == len(everything)
    assert all(one.document != other.document for one, other in pairwise(everything))
