"""Commands of make for tests and their set-up: what runs where, in several workers, on test files
made up for it, and what is printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ran
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


def make(*words):
    return ran(["make", "--no-print-directory", *words])


def test_a_room_has_its_tests_and_one_that_is_none_is_an_error_that_lists_them():
    assert [path for files in rooms().values() for path in files if not path.exists()] == []
    assert {"store", "eviction", "server", "tiers/nvme", "tiers/redis"} <= rooms().keys()
    done = make("test-room", "ROOM=stroe", f"BIN={Path(sys.executable).parent}", "READY=")
    said = done.stderr.splitlines()
    assert done.returncode and said[0].startswith("make test-room: ROOM=stroe is no room; expected")
    assert "eviction, " in said[0] and "tiers/nvme" in said[0]
    assert len(said) == 2 and re.match(r"make(\[\d+\])?: \*\*\*", said[1])
