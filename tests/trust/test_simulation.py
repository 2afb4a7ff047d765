"""A slice of the fault simulation. ``make trust`` runs five times as many seeds, and so does every
change's run in CI. ``python -m tests.trust.simulation --seeds 100000`` for a long run."""

from __future__ import annotations

import json
import subprocess
import sys

SEEDS = 500
EVENTS = {
    "saved",
    "aborted saves",
    "served",
    "served from below",
    "erased",
    "engines died",
    "crashes",
    "power cuts",
    "closed in the middle",
    "clean restarts",
    "kept over a restart",
    "filled again",
    "opening refused",
}
FAULTS = {
    "write fails",
    "write short",
    "write torn",
    "write repeated",
    "read fails",
    "read damaged",
    "find fails",
    "plain slow",
    "bit rot",
    "disk slow",
    "disk full",
    "sync fails",
    "disk write fails",
    "disk write short",
    "disk write damaged",
    "disk read fails",
    "disk read short",
    "disk read damaged",
    "record write fails",
    "record write short",
    "redis connection lost",
    "redis answers too late",
    "redis goes away",
    "redis full",
    "redis evicts",
}


def simulation(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.trust.simulation", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_hundreds_of_seeds_break_no_promise() -> None:
    done = simulation("--seeds", str(SEEDS))
    told = json.loads(done.stdout)
    assert done.returncode == 0, told["violations"]
    assert told["seeds"] == SEEDS
    assert not told["violations"]
    assert told["events"].keys() >= EVENTS, "what never happens is not tested"
    assert told["injected"].keys() >= FAULTS


def test_a_seed_replays_exactly() -> None:
    first, second = (simulation("--seed", "77") for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.count("\n") > 100
    assert simulation("--seed", "78").stdout != first.stdout
