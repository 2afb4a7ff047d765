"""A run of the tests in two workers, on test files made up for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.workers import LONGEST

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


def run(folder: Path, *words: str, **environment: str) -> str:
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


def test_what_make_test_sets_up_is_not_skipped_there(tmp_path: Path) -> None:
    (tmp_path / "test_needs.py").write_text(NEEDS)
    assert "4 skipped" in run(tmp_path)
    said = run(tmp_path, TEST_ALL_SET_UP="1")
    assert "2 failed, 1 skipped, 1 error" in said
    assert "there is no haproxy: make test sets it up" in said


def test_a_test_that_is_alone_runs_beside_no_other(tmp_path: Path) -> None:
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


def test_the_longest_files_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_no_file_that_comes_first_has_a_test_that_waits_for_the_host() -> None:
    """The other worker would be in the middle of minutes then."""
    assert [name for name in LONGEST if "mark.alone" in (ROOT / name).read_text()] == []
