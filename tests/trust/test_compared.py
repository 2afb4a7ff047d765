"""The README's figures of the trust suites are those of the code beside it: ``--compare``, and
``tests/trust/test_slice.py`` in every run of the tests."""

import json
import sys

import pytest

import tests.trust.__main__ as trust
from tests.conftest import ROOT
from tests.trust.compared import EXACT, MEND

FOUND = trust.Finding("simulation", 1000, "steps", 10, 50)
SAME = {"suite": "simulation", "cases": 1000, "seeds": 10, "faults": 50, "seconds": 1.0}


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(found, told):
        file = tmp_path / "trust.json"
        file.write_text(json.dumps({"suites": [told, {"suite": "fuzz"}]}))
        monkeypatch.setitem(trust.SUITES, "simulation", lambda extent: found)
        words = ["trust", "--only", "simulation", "--compare", str(file)]
        monkeypatch.setattr(sys, "argv", words)
        return int(trust.main())

    return run


def test_another_figure_fails_and_names_the_command_that_mends_it(run, capsys):
    assert run(FOUND, SAME) == 0
    assert MEND not in capsys.readouterr().err
    assert run(FOUND, SAME | {"seeds": 7}) == 1
    said = capsys.readouterr().err
    assert "simulation: 10 seeds, but " in said and "tells 7" in said
    assert f"Measure again: {MEND}" in said
    assert run(FOUND, {"suite": "another"}) == 1


@pytest.mark.parametrize(
    "found",
    [
        trust.Finding("kill -9", 100, "restarts", 4, 248),
        trust.Finding("corruption: Redis", detail={"skipped": "there is no redis-server"}),
    ],
    ids=lambda found: found.suite,
)
def test_what_time_decides_or_was_skipped_is_not_compared(run, found):
    assert run(found, {"suite": found.suite, "cases": 1, "seeds": 4, "faults": 2}) == 0


def test_the_readme_is_made_of_results_that_have_each_exact_suite():
    suites = json.loads((ROOT / "bench" / "results" / "trust.json").read_text())["suites"]
    assert EXACT.keys() - {"mutants"} <= {suite["suite"] for suite in suites}
