"""``make bench`` runs every file of ``bench/micro``: each is a program that says what it does."""

import runpy
import sys
from pathlib import Path

import pytest

MICRO = Path(__file__).parents[3] / "bench" / "micro"
PROGRAMS = sorted(path.stem for path in MICRO.glob("[a-z]*.py"))


@pytest.mark.filterwarnings("ignore")  # of torch, and of a module that another test has imported
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_runs_by_its_name(program, monkeypatch, capsys):
    """In this process: one of its own would import vLLM and torch for a line of help."""
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"kvtier.bench.micro.{program}", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage:"), "it measures, and does not only define"
