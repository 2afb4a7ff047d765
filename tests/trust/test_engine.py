"""Simulated engines: ``python -m tests.trust.engine`` runs more steps of every cell."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.conftest import vllm_versions
from tests.integration.engine_modes import OLDER
from tests.trust.engine.cells import CELLS, OVER_HOSTS, PHASES

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

HERE = vllm_versions()
NEXT = [version for version in HERE if version.startswith("0.33.")]
EVERYWHERE = ("aborted", "aborted loads", "resets", "resets under requests", "3 in flight")
RARE = ("tokens of an older life",)
"""What some cells of all show."""
SEVENTH, ALL = 7, 1
SHARES = [
    ("installed", SEVENTH),
    *(pytest.param(version, ALL, marks=pytest.mark.extended) for version in ("installed", *NEXT)),
]
"""One cell in so many, on each vLLM. Every kind is followed by its twin on the other runner, and
seven is odd."""
CROWDED = "windows alone, few blocks, failing loads"
REPLAYED = "replayed windows, few blocks, failing loads"
WHOLE = ("tails", "rings", "replayed", "drafts", "killed server", CROWDED)
"""Kinds of which ``make test-all`` runs every cell."""


@pytest.fixture(scope="module")
def installed():
    """What a seventh and whole kinds did, in one run: vLLM's import takes each of its processes
    longer than ten cells."""
    return _run("--steps", "500", "--jobs", "2", "--every", str(SEVENTH), "--also", *WHOLE)


@pytest.mark.parametrize(("version", "every"), SHARES)
def test_cells_are_in_force_and_answer_what_the_model_says(version, every, request):
    if every == SEVENTH:
        told = request.getfixturevalue("installed")
    else:
        env = os.environ | OLDER.environment(HERE.get(version))
        told = _run("--steps", "500", "--jobs", "2", env=env)
    assert version == "installed" or told["vllm"].startswith(version)
    cells = {cell.name: cell.v2 for cell in CELLS[::every]}
    assert told["cells"].keys() >= cells.keys()
    assert set(cells.values()) == {True, False}
    seen = sum((Counter(told["cells"][name]) for name in cells), Counter[str]())
    for mark in (*EVERYWHERE, *(RARE if every == ALL else ())):
        assert seen[mark], f"in no cell: {mark}"


def test_requests_that_were_granted_loads_do_not_wait_for_each_others_blocks(installed):
    """Each with the seed that showed it."""
    for cell, seed in (("long window beside full, few blocks", 11), (REPLAYED, 4)):
        told = _run("--steps", "400", "--only", cell, "--seed", str(seed))
        assert cell in told["cells"]
    assert installed["cells"].keys() >= {CROWDED, f"{CROWDED}, v2"}, "its first engine's is seed 1"


@pytest.mark.parametrize("kind", ["tails", "rings", "replayed"])
def test_tails_rings_and_replays_are_what_the_model_says(kind, installed):
    """Cache groups of DeepSeek V4 and V4.1."""
    cells = {cell.name for cell in CELLS if kind in cell.name}
    assert len(cells) > 1 and cells <= installed["cells"].keys()


def test_states_beside_drafts_are_those_of_accepted_tokens(installed):
    drafts = {cell.name for cell in CELLS if "drafts" in cell.name}
    with_states = {cell.name for cell in CELLS if cell.drafts and "state" in cell.groups}
    assert len(with_states) == 8 and with_states <= drafts <= installed["cells"].keys()
    for cell in with_states:
        seen = installed["cells"][cell]
        assert seen["states of drafts"] and seen["tokens from ram"]


def test_an_engine_over_two_hosts_is_right_whatever_becomes_of_their_servers():
    """One is killed, stopped or parted from the scheduler before each phase of saves and loads, or
    comes back with its disk of an earlier day."""
    told = _run("--hosts", "--steps", "250", "--jobs", "2")
    assert told["cells"].keys() == {cell.name for cell in OVER_HOSTS}
    assert told["tokens from ram"] and told["tokens from nvme"]
    for cell in OVER_HOSTS:
        assert bool(told["cells"][cell.name].get("faults")) == bool(cell.trouble)
    assert told["disks of an earlier day"]
    for phase in PHASES:
        assert told[f"save: before it is {phase}"], phase


def _run(*words, env=None):
    """What the engines did, without a violation."""
    command = [sys.executable, "-m", "tests.trust.engine", *words]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=2000, check=False
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["violations"] and done.returncode == 0, told["violations"]
    return told
