"""Long Doc QA's parts that need no engine: prompts, cache sizes, counters, sums, files, the client,
server refusal."""

import argparse
import json
import re
import struct
from dataclasses import replace
from typing import Any

import pytest

from kvtier.bench.flags import chosen
from kvtier.bench.long_doc_qa import run as long_doc_qa
from kvtier.bench.long_doc_qa.arms import NONE, PRESETS, Workload
from kvtier.bench.long_doc_qa.report import Round, summarise, verdict
from kvtier.bench.long_doc_qa.run import add_arguments
from kvtier.bench.processes import servers
from kvtier.bench.processes.servers import ServerError, VllmServer
from kvtier.bench.requests.client import Ask, Outcome, connect, parse_hits
from kvtier.cli.main import main
from tests.http_server import answered_by

DOCUMENT, QUESTION = 64, 8


def work(documents=3, **more):
    shape = {"repeat_count": 1, **more}
    return Workload(range(100, 2000), documents, DOCUMENT, QUESTION, 4, **shape)


def shared_prefix(one, other):
    same = [left == right for left, right in zip(one.prompt, other.prompt, strict=True)]
    return same.index(False) if False in same else len(same)


def test_a_query_shares_its_document_and_nothing_more_with_the_warm_up():
    warm = {ask.document: ask for ask in work().warm_up()}
    for ask in work(repeat_count=2).queries():
        assert len(ask.prompt) == DOCUMENT + QUESTION
        assert DOCUMENT <= shared_prefix(ask, warm[ask.document]) < DOCUMENT + QUESTION
        assert all(shared_prefix(ask, warm[other]) < 4 for other in warm if other != ask.document)


@pytest.mark.parametrize(
    ("mode", "expected"), [("tile", [0, 1, 2, 0, 1, 2]), ("interleave", [0, 0, 1, 1, 2, 2])]
)
def test_repeat_modes_order_the_documents(mode, expected):
    asks = work(repeat_count=2, repeat_mode=mode).queries()
    assert [ask.document for ask in asks] == expected
    assert len({(ask.document, ask.question) for ask in asks}) == 6
    assert len({tuple(ask.prompt) for ask in asks}) == 6


BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
OLDER = (
    'vllm:prefix_cache_hits_total{engine="0"} 192.0\n'
    'vllm:external_prefix_cache_hits_total{engine="0"} 1792.0\n'
)


def test_hits_are_read_by_tier_and_summed_over_engines():
    places = [("0", "device", "128.0"), ("1", "device", "64.0"), ("0", "host", "1.024e+03")]
    places += [("0", "disk", "512.0"), ("0", "p2p", "256.0")]
    lines = [f'{BY_SOURCE}{{engine="{one}",source="{at}"}} {n}\n' for one, at, n in places]
    told = {"gpu": 192, "ram": 1024, "nvme": 512, "redis": 256}
    assert parse_hits("".join(lines) + OLDER) == told
    assert parse_hits(OLDER) == {"gpu": 192, "unknown": 1792}
    assert parse_hits("other_total 1") is None


def outcome(document, ttft, tokens, start=0.0):
    end, count = start + 2 * ttft, len(tokens)
    return Outcome(document, 0, start, ttft, end, True, 72, count, 64, tokens=tokens)


def two_rounds(second_tokens):
    none = [outcome(0, 1.0, [5, 6]), outcome(1, 3.0, [7, 8], 2.0)]
    ram = [outcome(0, 0.1, [5, 6]), outcome(1, 0.3, second_tokens, 0.2)]
    return [Round(NONE, none, {"gpu": 0.0}), Round("kvtier-ram", ram, {"ram": 128.0})]


def test_an_answer_that_differs_or_is_missing_is_said_by_arm():
    for tokens in ([7, 9], []):
        rounds = two_rounds(tokens)
        rounds[1].outcomes[1].successful = bool(tokens)
        same, words = verdict(summarise(rounds))
        assert not same and "kvtier-ram (1)" in words
    assert verdict(summarise(two_rounds([7, 8])))[0]


def arguments(*given):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return chosen(parser.parse_args(list(given)), Workload, PRESETS)


def test_results_have_the_one_form_and_the_arms(tmp_path, capsys):
    args = arguments("--output-dir", str(tmp_path), "--model", str(tmp_path / "some-model"))
    none, ram = two_rounds([7, 8])
    mode = "Model Runner V2, async scheduling"
    assert long_doc_qa.conclude(args, [none, replace(ram, mode=mode)]) == 0
    shown, text = capsys.readouterr().out, (tmp_path / "long_doc_qa.json").read_text()
    assert "same greedy tokens as none: kvtier-ram" in shown
    assert re.search(r"kvtier-ram +0.2 s +\S+ s +10.0 x +128 ram +yes", shown)
    assert f"The engines ran by {mode}." in shown
    form = json.loads(text)
    assert form["engines"] == mode and form["machine"]["cores"] and form["command"]
    rows = {row["name"]: row for row in form["rows"]}
    assert rows["kvtier-ram: ttft mean"]["ratio"] == pytest.approx(0.1)
    told = form["arms"]["kvtier-ram"]
    assert told["hit_tokens"] == {"gpu": 0, "ram": 128, "nvme": 0, "redis": 0}
    assert (told["prompt_tokens"], told["same_tokens_as_none"]) == (144, True)
    assert form["arms"][NONE]["latency_mean_s"] == 4.0
    assert str(tmp_path) not in text, "results are committed: no paths"
    width = struct.unpack(">I", (tmp_path / "long_doc_qa.png").read_bytes()[16:20])[0]
    assert width == 1200


def test_different_answers_and_failed_requests_fail_the_run(tmp_path):
    given = ["--output-dir", str(tmp_path)]
    assert long_doc_qa.conclude(arguments(*given), two_rounds([1, 1])) == 0
    assert long_doc_qa.conclude(arguments(*given, "--require-same-tokens"), two_rounds([1, 1])) == 1
    rounds = two_rounds([7, 8])
    rounds[0].outcomes[0].successful = False
    assert long_doc_qa.conclude(arguments(*given), rounds) == 1


@pytest.mark.parametrize("given", ["--arms=none,nope", "--settle-seconds=-1", "--num-documents=0"])
def test_wrong_flags_are_refused(given):
    with pytest.raises(SystemExit):
        arguments(given)


def plain(exchange):
    """An OpenAI-compatible server that knows none of vLLM's additions. Refuses prompts that hold
    the word bad."""
    if exchange.path == "/v1/models":
        return exchange.answer(b'{"data": [{"id": "m"}]}')
    if exchange.path != "/v1/completions":
        return exchange.answer(b"{}", 404)
    body = json.loads(exchange.body)
    if "ignore_eos" in body or body["prompt"].startswith("bad"):
        return exchange.answer(b'{"error": "no"}', 400)
    events: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in ("", "x", "y")]
    events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return exchange.answer(data.encode())


@pytest.fixture
def plain_server():
    with answered_by(plain) as url:
        yield url


def test_a_plain_server_is_asked_with_text_and_a_refusal_is_an_outcome(plain_server):
    client, words = connect(plain_server + "/v1", None, 30)
    assert (client.model, client.vllm) == ("m", False) and isinstance(words[0], str)
    done: list[None] = []
    asks = [Ask(0, 0, "good one", 2), Ask(1, 0, "bad one", 2)]
    good, bad = client.run(asks, 2, lambda: done.append(None))
    assert (good.successful, good.answer) == (True, "xy")
    assert (good.prompt_tokens, good.output_tokens, len(done)) == (9, 2, 2)
    assert good.ttft is not None and 0 < good.ttft <= good.latency
    assert not bad.successful and "HTTP 400" in bad.error


def test_a_measured_round_of_a_running_server_ends_in_files(plain_server, tmp_path, capsys):
    shape = ["--num-documents=2", "--document-length=12", "--repeat-count=2", "--settle-seconds=0"]
    words = ["--base-url", plain_server, "--output-dir", str(tmp_path), *shape]
    assert main(["bench", "long-doc-qa", *words]) == 0
    form = json.loads((tmp_path / "long_doc_qa.json").read_text())
    arms = form["arms"]
    assert arms["server"]["requests"] == 4 and set(arms["server"]["hit_tokens"].values()) == {None}
    assert arms["cold"]["requests"] == 2, "each document's first answer is the base"
    ratios = {row["name"]: row["ratio"] for row in form["rows"]}
    assert ratios["cold: ttft mean"] == 1.0 and ratios["server: ttft mean"] > 0
    assert form["workload"]["model"] == "m" and "running" in form["workload"]["server"]
    shown = capsys.readouterr().out
    assert "against cold" in shown and "1.0 x" in shown


@pytest.mark.parametrize(
    ("first", "hits", "told"),
    [
        ({}, {"gpu": 64.0}, "All hits came from vLLM's own prefix cache, none from kvtier"),
        ({}, {"gpu": 16.0, "ram": 48.0}, "Of the hit tokens 25% came from vLLM's own prefix cache"),
        ({}, {}, "needs servers started here, the arm none and another arm."),
        ({"gpu": 64.0}, {"gpu": 64.0}, "Another --shuffle-seed gives new ones."),
    ],
)
def test_of_a_running_server_it_is_told_whose_hits_they_were(first, hits, told):
    cold = Round("cold", [outcome(0, 1.0, [1])], first)
    again = Round("server", [outcome(0, 0.1, [1])], hits)
    assert told in verdict(summarise([cold, again]))[1]


def test_the_preset_is_the_published_shape_and_flags_beat_it():
    preset = arguments("--preset", "lmi")
    lmi = (preset.num_documents, preset.document_length, preset.max_inflight_requests)
    assert lmi == (46, 10000, 4)
    assert (preset.repeat_count, preset.output_len, preset.repeat_mode) == (2, 100, "tile")
    given = arguments("--num-documents", "8", "--preset", "lmi")
    assert (given.num_documents, given.document_length) == (8, 10000)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    assert "documents (default: 8; lmi: 46)" in shown and "(default: 20000; lmi: 10000)" in shown


def test_a_server_that_does_not_come_up_is_refused_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "_SERVER", "http.server")  # takes no --model, so it ends at once
    with pytest.raises(ServerError, match=r"ended with status 2(.|\n)*invalid int value"):
        VllmServer("m", [], {"A": "1"}, tmp_path / "log").start()
