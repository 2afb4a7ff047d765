"""``make bench`` runs every file of ``bench/micro``: each is a program that says what it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MICRO = Path(__file__).parents[3] / "bench" / "micro"
PROGRAMS = sorted(path.stem for path in MICRO.glob("[a-z]*.py"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_runs_by_its_name(program: str) -> None:
    command = [sys.executable, "-m", f"kvtier.bench.micro.{program}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:"), "it measures, and does not only define"
