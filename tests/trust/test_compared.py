"""The README's figures of the trust suites are those of the code beside it: ``--compare``, and
``tests/trust/test_slice.py`` in every run of the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.trust.__main__ as trust
from tests.trust.compared import EXACT, MEND

ROOT = Path(__file__).parents[2]
FOUND = trust.Finding("simulation", 1000, "steps", 10, 50)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "trust.json"


def run(monkeypatch: pytest.MonkeyPatch, found: trust.Finding, *words: object) -> int:
    monkeypatch.setitem(trust.SUITES, "simulation", lambda extent: found)
    monkeypatch.setattr(sys, "argv", ["trust", "--only", "simulation", *map(str, words)])
    return int(trust.main())


def told(results: Path, *suites: dict[str, Any]) -> None:
    results.write_text(json.dumps({"suites": suites}))


def test_the_same_figures_are_right_whatever_else_the_file_has(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told(
        results,
        {"suite": "simulation", "cases": 1000, "seeds": 10, "faults": 50, "seconds": 1.0},
        {"suite": "fuzz"},
    )
    assert run(monkeypatch, FOUND, "--compare", results) == 0
    assert MEND not in capsys.readouterr().err


@pytest.mark.parametrize("figure", ["cases", "seeds", "faults"])
def test_another_figure_fails_and_names_the_command_that_mends_it(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], figure: str
) -> None:
    told(results, {"suite": "simulation", "cases": 1000, "seeds": 10, "faults": 50} | {figure: 7})
    assert run(monkeypatch, FOUND, "--compare", results) == 1
    said = capsys.readouterr().err
    assert f"simulation: {getattr(FOUND, figure):,} {figure}, but {results} tells 7" in said
    assert f"Measure again: {MEND}" in said


def test_a_suite_that_the_file_does_not_have_fails(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(results, {"suite": "fuzz"})
    assert run(monkeypatch, FOUND, "--compare", results) == 1


@pytest.mark.parametrize(
    "found",
    [
        trust.Finding("kill -9", 100, "restarts", 4, 248),
        trust.Finding("wire fuzz", 50_001, "frames", 1, 190),
        trust.Finding("corruption: Redis", detail={"skipped": "there is no redis-server"}),
    ],
    ids=lambda found: found.suite,
)
def test_what_time_decides_or_was_skipped_is_not_compared(
    results: Path, monkeypatch: pytest.MonkeyPatch, found: trust.Finding
) -> None:
    told(results, {"suite": found.suite, "cases": 1, "seeds": 4, "faults": 2})
    assert run(monkeypatch, found, "--compare", results) == 0


def test_how_many_sectors_a_cut_takes_is_not_compared(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(results, {"suite": "power cuts", "cases": 4000, "seeds": 16, "faults": 1})
    assert (
        run(
            monkeypatch,
            trust.Finding("power cuts", 4000, "images", 16, 363_000),
            "--compare",
            results,
        )
        == 0
    )


def test_the_readme_is_made_of_results_that_have_each_exact_suite() -> None:
    suites = json.loads((ROOT / "bench" / "results" / "trust.json").read_text())["suites"]
    assert EXACT.keys() - {"mutants"} <= {suite["suite"] for suite in suites}
