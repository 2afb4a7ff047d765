"""Simulated engines: ``python -m tests.trust.engine`` runs more steps of every cell."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.trust.engine.cells import CELLS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_every_cell_answers_what_the_model_says() -> None:
    command = [sys.executable, "-m", "tests.trust.engine", "--steps", "500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["violations"] and done.returncode == 0, told["violations"]
    assert told["cells"].keys() == {cell.name for cell in CELLS}
    for name, counts in told["cells"].items():
        assert counts["loads"] and counts["finished"], f"{name}: nothing was loaded or answered"
        assert "failing" not in name or counts["faults"], f"{name}: no load failed"
    assert sum(
        counts["preempted"] for name, counts in told["cells"].items() if "few blocks" in name
    )
