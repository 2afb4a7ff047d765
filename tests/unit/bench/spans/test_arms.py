"""The benchmark of spans without engines: prompts, the user's own too, salts, cache sizes,
agreement, sums, files, flags."""

import argparse
import json
import math
from collections import Counter
from typing import Any

import pytest

from kvtier.bench.processes.engine import Geometry
from kvtier.bench.requests.client import Client, Outcome
from kvtier.bench.spans import run as spans
from kvtier.bench.spans.arms import (
    ARMS,
    FULL,
    ONE_SERVER,
    RUN,
    Question,
    Retrieval,
    Sizes,
    server_args,
    server_env,
)
from kvtier.bench.spans.one_server import Prompts, read
from kvtier.bench.spans.report import Results, Run, agreement, answers, as_json
from kvtier.bench.spans.run import add_arguments
from kvtier.cli.main import main
from kvtier.core.errors import ConfigError

WORDS = range(100, 2000)


def work(**more):
    sizes: dict[str, Any] = {"pool": 6, "documents": 3, "requests": 40, "rounds": 2}
    sizes |= {"anchor_length": 16, "document_length": 32, "question_length": 8, "output_len": 4}
    return Retrieval(WORDS, **(sizes | more))


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "m", *words])


def test_a_question_has_different_documents_of_one_pool_in_any_order():
    questions = work().questions(0)
    assert len(questions) == 40
    found = [tuple(map(tuple, question.documents)) for question in questions]
    assert len({document for each in found for document in each}) == 6
    assert all(len(set(each)) == 3 for each in found)
    sets = Counter(frozenset(each) for each in found)
    assert max(sets.values()) > max(Counter(found).values()), "the same ones come in other orders"
    assert len({tuple(question.question) for question in questions}) == 40
    assert len({tuple(question.anchor) for question in questions}) == 1


def test_spans_are_asked_for_where_documents_lie_and_their_homes_are_warmed():
    asks, homes = work().asks(0, "given", 16), work().homes(0, 32)
    assert all(not ask.params for ask in work().asks(0, "given"))
    assert [ask.prompt for ask in asks] == [ask.prompt for ask in work().asks(0, "given")]
    assert len(homes) == 6 and {len(home.prompt) % 32 for home in homes} == {0}
    assert max(len(home.prompt) for home in homes) < work().longest_home + 32
    warm = [list(home.prompt) for home in homes]
    for ask in asks:
        anchor, *spans = ask.params["kvtier.spans"]
        assert ask.params["kvtier.span_first"] == 16
        for span in spans:
            home = [*ask.prompt[: anchor.end], *ask.prompt[span.begin : span.end]]
            assert any(one[: len(home)] == home for one in warm)


def sizes_of():
    return Sizes(work(), Geometry(16, 32, 2**16))


def test_arms_differ_in_who_keeps_what_and_in_the_order():
    sizes = sizes_of()
    request, asked = sizes.request_blocks, 80 * sizes.request_blocks
    for arm in RUN:
        args, env = server_args(arm, sizes), server_env(arm, sizes)
        assert ("--no-enable-prefix-caching" in args) == (arm.name == FULL)
        assert ("--kv-transfer-config" in args) == arm.kvtier == bool(env)
        assert request < sizes.gpu_blocks(arm), "a request runs"
        assert (sizes.gpu_blocks(arm) > asked) == (arm.name.startswith("vllm"))
        assert arm.order == ("stable" if arm.name.endswith("+stable") else "given")
        assert (env.get("KVTIER_SPANS") == "on") == arm.name.startswith("spans-")
    ram = int(server_env(ARMS["kvtier"], sizes)["KVTIER_RAM_BYTES"].removesuffix("MiB"))
    assert ram * 2**20 >= 80 * work().longest * sizes.geometry.token_bytes


def told(*tokens, **first):
    """An answer, and probabilities of first tokens."""
    made = outcome(0, 0, 1.0, list(tokens))
    made.first = {token: math.log(share) for token, share in first.items()}
    return made


def test_agreement_counts_first_tokens_answers_and_where_they_part():
    ours = {(0, 0): told(1, 2, 3), (0, 1): told(1, 2, 3), (0, 2): told(9, 2, 3), (0, 3): told(1)}
    theirs = {(0, 0): told(1, 2, 3), (0, 1): told(1, 2, 4), (0, 2): told(1, 2, 3)}
    theirs |= {(0, 3): told(1, 2)}
    found = agreement(ours | {(1, 0): told(5)}, theirs)
    assert (found.compared, found.same_first, found.same) == (4, 3, 1)
    assert found.first_differing == [2, 0, 1]
    assert found.as_json()["first_differing_token_median"] == 1
    assert found.as_json()["first_token_kl"] is None, "nothing was told"
    assert agreement(theirs, theirs).as_json()["first_differing_token_median"] is None


def outcome(request, number, ttft, tokens, cached=0):
    """An answered request of a prompt of 100 tokens."""
    counts = (True, 100, len(tokens), cached)
    return Outcome(request, number, 0.0, ttft, 2 * ttft, *counts, tokens=tokens)


def results(reused, known=None):
    """Two rounds of one request. ``reused``: what the arm with the stable order answers first."""
    full = [[outcome(0, 0, 1.0, [1, 2])], [outcome(0, 1, 3.0, [3, 4])]]
    stable = [[outcome(0, 0, 0.5, reused, 40)], [outcome(0, 1, 0.7, [8, 9], 80)]]
    orders: Any = {
        "given": answers([one for each in full for one in each]),
        "stable": {(0, 0): told(1, 7), (1, 0): told(8, 9)},
    }
    ran = [Run(ARMS[FULL], full, {"gpu": 0}), Run(ARMS["kvtier+stable"], stable, {"ram": 120.0})]
    return Results(ran, orders, known or {})


def test_an_arm_is_compared_with_full_prefill_of_its_own_prompts():
    found = results([1, 7])
    entry = as_json(found, found.runs[1])
    assert entry["as_full_prefill"]["same_answer"] == entry["as_full_prefill"]["compared"] == 2
    given = entry["as_full_prefill_in_the_given_order"]
    assert (given["same_first_token"], given["same_answer"]) == (1, 0)
    assert (entry["prompt_tokens"], entry["computed_tokens"]) == (200, 80)
    assert entry["hit_tokens"]["ram"] == 120
    full = as_json(found, found.runs[0])
    assert full["as_full_prefill"] is full["as_full_prefill_in_the_given_order"] is None
    assert found.exact
    assert not results([1, 2]).exact


def test_results_have_the_one_form_and_say_why_an_arm_cannot_run(tmp_path, capsys):
    given = arguments("--output-dir", str(tmp_path), "--model", str(tmp_path / "some-model"))
    assert spans.conclude(given, results([1, 7]), spans.own_shape(given)) == 0
    form = json.loads((tmp_path / "spans.json").read_text())
    assert form["benchmark"] == "spans" and form["machine"]["cores"] >= 1 and form["command"]
    assert form["workload"]["model"] == "some-model" and form["workload"]["zipf"] == 1.0
    assert "4131" in form["arms"]["lmcache-blend"]["cannot_run"]
    assert str(tmp_path) not in (tmp_path / "spans.json").read_text(), "results are committed"
    shown = capsys.readouterr().out
    assert "2 of 2" in shown and "lmcache-blend: " in shown and "5101" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "expected one of --model, --toy"),
        (["--toy", "--model", "m"], "expected one of --model, --toy"),
        (["--model", "m", "--prompts", "f"], "go together"),
        (["--base-url", "http://h:1"], "go together"),
        (["--toy", "--arms", "kvtier+stable"], "one server has the arms"),
        (["--model", "m", "--documents", "5", "--pool", "4"], "expected at most --pool 4"),
    ],
)
def test_flags_that_do_not_go_together_are_an_error_in_words(tmp_path, capsys, given, said):
    assert main(["bench", "spans", *given, "--output-dir", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


QUESTIONS = [Question([1, 2], [[3, 4], [5, 6]], [7]), Question([1, 2], [[5, 6], [3, 4]], [8])]
NOWHERE = Client("http://localhost:1", "m", vllm=True, timeout_s=1)


def arm(name):
    return next(one for one in ONE_SERVER if one.name == name)


def test_no_arm_sees_what_another_has_cached():
    made = Prompts(QUESTIONS, 4)
    cold, exact = made.asks(arm("none")), made.asks(arm("kvtier"))
    blended = [ask for k in (0, 16, 64) for ask in made.asks(arm(f"spans-k{k}"))]
    assert len({ask.salt for ask in cold}) == len(QUESTIONS), "a cold prompt meets no other"
    assert len({ask.salt for ask in exact}) == 1, "exact prompts meet each other"
    homes = made.homes(4)
    assert {ask.salt for ask in blended} == {home.salt for home in homes}
    assert all(not set("@/\\") & set(ask.salt) for ask in [*cold, *exact, *blended]), (
        "as vLLM wants"
    )
    salts = [{ask.salt for ask in asks} for asks in (cold, exact, blended)]
    assert sum(map(len, salts)) == len(set.union(*salts))
    assert all(ask.params == {"kvtier.cache": False} for ask in cold), "nor is it kept"
    assert [ask.prompt for ask in cold] == [ask.prompt for ask in exact]


def test_parts_in_token_ids_are_taken_as_they_are(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('{"anchor": [1], "documents": [[2], [3]], "question": [4]}\n\n')
    assert read(file, NOWHERE) == [Question([1], [[2], [3]], [4])]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a prompt a line"),
        ("{no", "line 1: JSON is malformed"),
        ('{"anchor": [1], "documents": [[2]], "question": [3]}\n{"anchor": [1]}', "line 2: "),
        ('{"anchor": [1], "documents": [], "question": [3]}', "line 1: a part is empty"),
        ('{"anchor": [1], "documents": [[]], "question": [3]}', "line 1: a part is empty"),
        ('{"anchor": [1], "documents": ["x", 7], "question": [3]}', "line 1: Expected"),
        ('{"anchor": [1], "documents": [[2]], "question": [3], "k": 1}', "unknown field `k`"),
    ],
)
def test_other_lines_are_refused_by_their_number(tmp_path, text, said):
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--prompts") as refused:
        read(file, NOWHERE)
    assert said in str(refused.value)
