"""Parts of the engine's step, each alone under pytest-benchmark: this shows which part got slower.

``make bench-suite`` runs it and compares it with the committed baseline. ``make
bench-suite-baseline`` makes a new one. A baseline is of one machine: on another one look at the
*ratios* to :func:`test_yardstick`, which runs no line of kvtier. ``make test`` does not run it,
because tests never time anything.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.micro import index, step
from kvtier.bench.model import make_model

CASES = index.lookup_cases() | index.call_cases()


def test_yardstick(benchmark: Any) -> None:
    """SHA-256 of 1 MiB by Python's own library: how fast this core is today."""
    data = bytes(1 << 20)
    benchmark(lambda: hashlib.sha256(data).digest())


@pytest.mark.parametrize("name", CASES)
def test_index(benchmark: Any, name: str) -> None:
    benchmark(CASES[name])


ADDED_S = [0.0]
"""CPU time of the connector's hooks, after each step."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.benchmark(timer=lambda: ADDED_S[-1])
def test_connector_in_a_step_of_64_that_decode(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks under vLLM's own Scheduler, whose own time is left out. A round is 32 steps, in which
    eight requests finish a chunk."""
    for name, value in step.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = make_model(tmp_path / "model", "tiny")
    engine = step.SchedulingLoop(model, "kvtier", "", {})
    engine.decode(64, random.Random(1))

    def go_on() -> None:
        ADDED_S.append(ADDED_S[-1] + engine.step().added_s)

    benchmark.pedantic(go_on, rounds=20, iterations=32)
    engine.scheduler.shutdown()
