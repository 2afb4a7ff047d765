"""The multi-turn benchmark without engines: conversations, what clients send, sums, files, and
refusals in words."""

import argparse
import re
from typing import Any

import pytest

from kvtier.bench.multi_turn import run as multi_turn
from kvtier.bench.multi_turn.arms import BASE, STICKY_SHARED, Conversations
from kvtier.bench.multi_turn.report import Run, rows_of
from kvtier.bench.multi_turn.run import add_arguments
from kvtier.bench.multi_turn.talk import Pause, Talk, Turn
from kvtier.bench.requests.client import Client
from kvtier.core.errors import ConfigError
from tests.stub_engine import stub_engines

WORDS = range(100, 2000)


def work(**more):
    sizes: dict[str, Any] = {
        "words": WORDS,
        "think_seconds": 0.0,
        "sessions": 3,
        "turns": 3,
        "first_length": 64,
        "turn_length": 8,
        "output_len": 4,
    }
    return Conversations(**(sizes | more))


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def talk(engine, named, pause=None, **more):
    asker = Client(f"http://127.0.0.1:{engine.port}", "stub", True, 20.0)
    return Talk(asker, work(**more), named, lambda: None, pause).run()


def test_a_prompt_is_everything_that_was_said_before():
    with stub_engines(1) as (engine,):
        turns = talk(engine, True)
    assert [turn.question for turn in turns] == [1, 2, 3] * 3
    assert all(turn.successful and turn.ttft is not None and turn.tries == 1 for turn in turns)
    prompts: dict[str, list[list[int]]] = {}
    for body, headers in engine.asked:
        prompts.setdefault(headers["x-session-id"], []).append(body["prompt"])
    answers = {(turn.document, turn.question): turn.tokens for turn in turns}
    assert len(prompts) == 3
    for name, (first, second, third) in prompts.items():
        session = int(name.removeprefix("conversation-"))
        assert second == [*first, *answers[session, 1], *work().says(session, 2)]
        assert third == [*second, *answers[session, 2], *work().says(session, 3)]


def test_a_turn_that_fails_is_asked_again_and_its_time_counts_from_the_first_try():
    with stub_engines(1) as (engine,):
        engine.dies = True
        turns = talk(engine, False, sessions=1)
    assert [turn.tries for turn in turns] == [2, 1, 1] and all(turn.successful for turn in turns)
    assert turns[0].ttft is not None and turns[0].ttft > 0.5 > (turns[1].ttft or 0)


def test_all_conversations_pause_after_a_turn_and_what_happens_there_happens_once():
    acts: list[int] = []
    with stub_engines(1) as (engine,):
        turns = talk(engine, False, Pause(2, lambda: acts.append(len(engine.asked))))
    assert acts == [6], "after the second turn of all three, and before anybody's third"
    assert len(turns) == 9


def turn(session, number, ttft, engine="engine-1", cached=0):
    told = (True, 100, 2, cached, "", [number, session], "", engine)
    return Turn(session, number, 0.0, ttft, 1.0, *told, tries=1)


def runs():
    base = [turn(0, 1, 3.0), turn(0, 2, 4.0, "engine-2")]
    base += [turn(1, 1, 3.0), turn(1, 2, 2.0, "engine-2")]
    best = [turn(0, 1, 3.0), turn(0, 2, 0.5, "engine-2", 90)]
    best += [turn(1, 1, 3.0, "engine-2"), turn(1, 2, 0.7, "engine-2", 80)]
    return [Run(BASE, base, {"gpu": 0.0}), Run(STICKY_SHARED, best, {"ram": 170.0}, "engine-1", 1)]


def test_later_turns_are_held_against_round_robin_without_kvtier():
    rows = {row.name: row for row in rows_of(runs())}
    row = rows[f"{STICKY_SHARED}: ttft of turns >= 2"]
    assert [row.value, row.limit, row.ratio] == pytest.approx([0.6, 1.5, 0.2])
    base = rows[f"{BASE}: ttft of turns >= 2"]
    assert (base.ratio, base.limit) == (1, None)


def test_answers_that_differ_and_turns_that_failed_are_told(tmp_path, capsys):
    base, best = runs()
    best.turns[3].tokens = [9]
    args = arguments("--model", "m", "--output-dir", str(tmp_path))
    assert multi_turn.conclude(args, [base, best]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"round-robin .*- +-\n.*sticky.kvtier +0.6 s +0.20 x .* 1\n", shown)
    args.require_same_tokens = True
    assert multi_turn.conclude(args, [base, best]) == 1
    best.turns[3].successful = False
    args.require_same_tokens = False
    assert multi_turn.conclude(args, [base, best]) == 1
    assert "a turn failed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["multi_turn.json"]


def test_a_router_that_runs_is_measured_by_what_each_answer_says(tmp_path, capsys):
    with stub_engines(1) as (engine,):
        url = f"http://127.0.0.1:{engine.port}"
        words = ["--base-url", url, "--sessions=2", "--turns=2", "--first-length=8"]
        words.append("--think-seconds=0")
        assert multi_turn.run(arguments(*words, "--output-dir", str(tmp_path))) == 0
    assert "server" in capsys.readouterr().out
    named = ["x-session-id" in headers for body, headers in engine.asked if "stream" in body]
    assert len(named) == 4 and all(named)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model is missing"),
        (["--model", "m", "--turns", "3", "--kill-after-turn", "3"], "before the last, 3"),
        (["--base-url", "http://localhost:1", "--kill-after-turn", "1"], "started here"),
        (["--model", "m", "--router", "sh x"], r"leave cache-aware\+kvtier out of --arms"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(words, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        multi_turn.run(arguments(*words, "--output-dir", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
