"""Commands of make for tests and their set-up: what runs where, in two workers, on test files made
up for it, and what is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import BOTH_RUNNERS
from tests.rooms import rooms
from tests.workers import DECIDING, LONGEST, WHOLE

ROOT = Path(__file__).parents[2]
NEEDS = """
import pytest
@pytest.mark.redis
def test_redis(): pass
def test_haproxy(): pytest.skip("there is no haproxy")
def test_module(): pytest.importorskip("kvtier.no_such_module")
@pytest.mark.skip(reason="there is no NVIDIA GPU")
def test_gpu(): pass
"""
TURNS = """
import pytest, time
from pathlib import Path
LOG = Path(__file__).with_name("log")
def say(word):
    with LOG.open("a") as log: log.write(word + " ")
@pytest.mark.parametrize("turn", range(8))
{mark}
def test_turn(turn):
    say("{word}")
    time.sleep(0.03)
    say("{word}")
"""


def run(folder, *words, **environment):
    """What pytest says of the tests in a folder, with what ``tests/conftest.py`` does to them."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *words, "."],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_what_make_test_sets_up_is_not_skipped_there(tmp_path):
    (tmp_path / "test_needs.py").write_text(NEEDS)
    assert "4 skipped" in run(tmp_path)
    said = run(tmp_path, TEST_ALL_SET_UP="1")
    assert "2 failed, 1 skipped, 1 error" in said
    assert "there is no haproxy: make test sets it up" in said


def test_a_test_that_is_alone_runs_beside_no_other(tmp_path):
    for name, word, mark in (
        ("test_a.py", "beside", ""),
        ("test_b.py", "alone", "@pytest.mark.alone"),
        ("test_c.py", "beside", ""),
    ):
        (tmp_path / name).write_text(TURNS.format(word=word, mark=mark))
    assert "24 passed" in run(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    words = (tmp_path / "log").read_text().split()
    begun = [at for at, word in enumerate(words) if word == "alone"][::2]
    assert len(begun) == 8 and all(words[at + 1] == "alone" for at in begun)


def test_the_files_that_are_named_are_there():
    assert [name for name in (*LONGEST, *WHOLE, *DECIDING) if not (ROOT / name).exists()] == []


PARTS = """
import pytest
def test_plain(): pass
@pytest.mark.core
def test_core(): pass
@pytest.mark.whole
def test_whole(): pass
@pytest.mark.extended
def test_extended(): pass
"""


@pytest.mark.parametrize(
    ("words", "many"),
    [
        ("not whole and not extended", 1 + 3 + 2),
        ("whole and not extended", 2 + 0 + 1),
        ("not extended", 3 + 3 + 3),
    ],
)
def test_what_make_test_leaves_out_runs_in_the_rest_and_all_has_both(words, many, tmp_path):
    """A file of the whole, one of those that decide, and one of the unit tests."""
    for name in ("tests/integration/test_any.py", DECIDING[0], "tests/unit/test_any.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PARTS if name not in DECIDING else PARTS.replace("mark.whole", "mark.core"))
    assert f"{many} passed" in run(tmp_path, "-m", words)


def test_make_shows_saves_loads_a_restart_and_failed_loads_on_both_runners():
    core = [mode for mode in BOTH_RUNNERS.args[1] if "core" in [mark.name for mark in mode.marks]]
    assert [mode.values[0].name for mode in core] == ["V2 async", "V1"]
    text = (ROOT / "tests/integration/test_vllm.py").read_text()
    for name in ("second_round_is_served", "a_restarted_engine_is_warm", "failed_loads_are"):
        assert f"@BOTH_RUNNERS\ndef test_{name}" in text


def make(*words):
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_room_has_its_tests_and_one_that_is_none_is_an_error_that_lists_them():
    assert [path for files in rooms().values() for path in files if not path.exists()] == []
    assert {"store", "eviction", "server", "tiers/nvme", "tiers/redis"} <= rooms().keys()
    done = make("test-room", "ROOM=stroe", f"BIN={Path(sys.executable).parent}", "READY=")
    said = done.stderr.splitlines()
    assert done.returncode and said[0].startswith("make test-room: ROOM=stroe is no room; expected")
    assert "eviction, " in said[0] and "tiers/nvme" in said[0]
    assert len(said) == 2 and re.match(r"make(\[\d+\])?: \*\*\*", said[1])


def test_help_is_by_kind_and_fits_in_100_columns():
    lines = make("help").stdout.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    kinds = [line for line in lines if line and not line.startswith(" ")]
    assert kinds == ["Try it", "Test", "Check", "Measure", "Set up and build"]
    named = {line.split()[1] for line in lines if line.startswith("  make ")}
    assert {"demo", "demo-all", "test", "test-all", "test-room", "lint", "wheel"} <= named


def step(log, *command):
    words: list[str] = [str(ROOT / "requirements/step"), str(log), "the thing", *command]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_step_of_a_set_up_is_a_line_and_its_noise_is_in_a_file(tmp_path):
    log = tmp_path / "set-up/thing.log"
    done = step(log, "bash", "-c", "echo WARNING: Location; echo more >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "set-up: the thing ... 0 s\n", "")
    assert log.read_text() == "WARNING: Location\nmore\n"


def test_a_step_that_fails_shows_the_end_of_its_log_and_its_name(tmp_path):
    log = tmp_path / "thing.log"
    done = step(log, "bash", "-c", "seq 100; echo no such package >&2; exit 3")
    assert done.returncode == 3
    first, *shown = done.stdout.splitlines()
    assert first.startswith("set-up: the thing ... failed after ") and first.endswith(f", {log}:")
    assert shown == [*(str(line) for line in range(87, 101)), "no such package"]


def test_the_recipes_of_set_up_leave_no_output_of_pip_or_apt_to_the_terminal():
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    noisy = [line for line in lines if re.match(r"\t.*(-m pip |\(PIP\)|\(APT\))", line)]
    assert noisy and [line for line in noisy if "$(STEP)/" not in line] == []


def test_no_file_that_comes_first_has_a_test_that_waits_for_the_host():
    """The other worker would be in the middle of minutes then."""
    assert [name for name in LONGEST if "mark.alone" in (ROOT / name).read_text()] == []


MAKE = """#!/bin/bash
echo "${@: -1}" >> ran
case "${@: -1}" in
test) echo "==== 1 failed, 7 passed in 3.21s ===="; echo "nanobind: leaked 4 instances!"; exit 2 ;;
test-rest) echo "==== 9 passed in 75.02s (0:01:15) ====";;
esac
"""


def test_the_last_lines_of_a_whole_run_are_the_summaries(tmp_path):
    """The rest runs where something has failed already, and the failure is the status."""
    run, tool = tmp_path / ".ci/run", tmp_path / "bin/make"
    for file, text in ((run, (ROOT / ".ci/run").read_text()), (tool, MAKE)):
        file.parent.mkdir()
        file.write_text(text)
        file.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [run], env={"PATH": path}, capture_output=True, text=True, check=False, cwd="/"
    )
    assert (tmp_path / "ran").read_text().split() == ["set-up", "test", "test-rest"]
    assert done.returncode == 2
    assert done.stdout.splitlines()[-2:] == [
        "==== 1 failed, 7 passed in 3.21s ====",
        "==== 9 passed in 75.02s (0:01:15) ====",
    ]
