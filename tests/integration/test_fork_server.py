"""The fork server of the tests on engines: what it runs is as if it had been started by its
name."""

from __future__ import annotations

import json
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Forks
from tests.integration.engine_modes import V1, V1_ASYNC, V2, V2_ASYNC, Mode, kept

pytestmark = pytest.mark.vllm

Run = Callable[..., int]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def run(forks: Forks, mode: Mode, log: Path) -> Run:
    """``run(*words, limit_s=60, **environment)`` of Python's timeit, which runs any statement."""

    def once(*words: str, limit_s: float = 60, **environment: str) -> int:
        return forks(mode).run("timeit", ["-n1", "-r1", *words], environment, log, limit_s)

    return once


def test_each_has_the_environment_that_was_asked_for_and_a_process_of_its_own(
    run: Run, mode: Mode, log: Path
) -> None:
    """Beside the mode's."""
    shown = (
        "-s",
        "import os, sys",
        "print(os.getpid(), sorted(os.environ), 'vllm' in sys.modules)",
    )
    assert run(*shown, ONE="1") == run(*shown, TWO="2") == 0
    (first, *one), (second, *two) = (
        line.split(" ", 1) for line in log.read_text().splitlines() if "[" in line
    )
    of_the_mode = list(mode.environment())
    assert one == [f"{sorted(['ONE', *of_the_mode])} True"]
    assert two == [f"{sorted(['TWO', *of_the_mode])} True"]
    assert first != second


def test_a_failure_and_a_hang_are_seen_and_the_next_runs(run: Run, log: Path) -> None:
    assert run("raise ValueError('no')") == 1
    assert "ValueError: no" in log.read_text()
    assert run("-s", "import time", "time.sleep(600)", limit_s=0.5) == -signal.SIGKILL
    assert run("pass") == 0


def test_a_test_that_is_ended_meanwhile_leaves_no_answer_for_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest's own limit comes as an exception, while the program runs."""

    def ended(*_: object) -> None:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(select, "select", ended)
        with pytest.raises(TimeoutError):
            run("-s", "import time", "time.sleep(600)")
    assert run("raise ValueError('no')") == 1


def test_another_vllm_has_a_cache_of_its_own_and_the_tests_vllm_that_of_the_user(
    tmp_path: Path,
) -> None:
    """What one has learned about a model would be stale to the other, each time they take turns."""
    one, other = (kept(V2_ASYNC.environment(tmp_path / name)) for name in ("one", "other"))
    assert one["VLLM_CACHE_ROOT"] != other["VLLM_CACHE_ROOT"]
    assert "VLLM_CACHE_ROOT" not in V2_ASYNC.environment()


@pytest.mark.parametrize("asked", [V1, V1_ASYNC, V2, V2_ASYNC], ids=lambda mode: mode.name)
def test_an_engine_that_ran_in_another_mode_fails_its_test(asked: Mode, tmp_path: Path) -> None:
    """vLLM turns modes off in silence. An engine that tells nothing is none of the mode's."""
    for ran in (V1, V1_ASYNC, V2, V2_ASYNC):
        kind = "AsyncScheduler" if ran.asynchronous else "Scheduler"
        lines = [
            {"scheduler": kind, "depth": ran.depth(2), "stages": 2},
            *[{"runner": ran.runner}] * 2,
        ]
        told = tmp_path / ran.name
        told.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if ran is asked:
            asked.check(told)
            continue
        with pytest.raises(AssertionError):
            asked.check(told)
    (tmp_path / "silent").touch()
    with pytest.raises(AssertionError, match="nothing ran"):
        asked.check(tmp_path / "silent")
