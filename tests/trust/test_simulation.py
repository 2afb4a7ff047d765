"""A simulated history replays exactly: what a seed broke can be looked at. How many seeds break
nothing: ``tests/trust/test_slice.py``."""

import subprocess
import sys


def simulation(*words):
    command = [sys.executable, "-m", "tests.trust.simulation", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_a_seed_replays_exactly():
    first, second = (simulation("--seed", "77") for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.count("\n") > 100
    assert simulation("--seed", "78").stdout != first.stdout
