"""The README's figures of the trust suites are those of the code beside it: ``--compare``, and
``tests/trust/test_slice.py`` in every run of the tests."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.trust.__main__ as trust
from tests.trust.compared import EXACT, MEND

ROOT = Path(__file__).parents[2]
FOUND = trust.Finding("simulation", 1000, "steps", 10, 50)
SAME = {"suite": "simulation", "cases": 1000, "seeds": 10, "faults": 50, "seconds": 1.0}
Run = Callable[[trust.Finding, dict[str, object]], int]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trust.json"


@pytest.fixture
def run(file, monkeypatch):
    def run(found, told):
        file.write_text(json.dumps({"suites": [told, {"suite": "fuzz"}]}))
        monkeypatch.setitem(trust.SUITES, "simulation", lambda extent: found)
        words = ["trust", "--only", "simulation", "--compare", str(file)]
        monkeypatch.setattr(sys, "argv", words)
        return int(trust.main())

    return run


def test_the_same_figures_are_right_whatever_else_the_file_has(run, capsys):
    assert run(FOUND, SAME) == 0
    assert MEND not in capsys.readouterr().err


@pytest.mark.parametrize("figure", ["cases", "seeds", "faults"])
def test_another_figure_fails_and_names_the_command_that_mends_it(run, file, capsys, figure):
    assert run(FOUND, SAME | {figure: 7}) == 1
    said = capsys.readouterr().err
    assert f"simulation: {getattr(FOUND, figure):,} {figure}, but {file} tells 7" in said
    assert f"Measure again: {MEND}" in said


def test_a_suite_that_the_file_does_not_have_fails(run):
    assert run(FOUND, {"suite": "another"}) == 1


@pytest.mark.parametrize(
    "found",
    [
        trust.Finding("kill -9", 100, "restarts", 4, 248),
        trust.Finding("wire fuzz", 50_001, "frames", 1, 190),
        trust.Finding("power cuts", 1, "images", 4, 363_000),
        trust.Finding("corruption: Redis", detail={"skipped": "there is no redis-server"}),
    ],
    ids=lambda found: found.suite,
)
def test_what_time_decides_or_was_skipped_is_not_compared(run, found):
    assert run(found, {"suite": found.suite, "cases": 1, "seeds": 4, "faults": 2}) == 0


def test_the_readme_is_made_of_results_that_have_each_exact_suite():
    suites = json.loads((ROOT / "bench" / "results" / "trust.json").read_text())["suites"]
    assert EXACT.keys() - {"mutants"} <= {suite["suite"] for suite in suites}
