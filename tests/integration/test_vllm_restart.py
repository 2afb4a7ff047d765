"""Real vLLM: the first prompts after ``kill -9`` and a restart are served whole, with the policy
that users have, where RAM holds a prompt, a third or an eighth of it. Most combinations are decided
on vLLM's own scheduler (tests/unit/connectors/test_vllm_restart.py)."""

import json
import os
import shutil
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.integration.engine_modes import V1, V2_ASYNC, Mode
from tests.integration.restart_scenarios import CHUNKS
from tests.integration.scenarios import BLOCK
from tests.integration.test_vllm import EngineFailed, assert_same, hits, start
from tests.integration.transfer import EVERY_HIT
from tests.spinning import spinning

pytestmark = pytest.mark.vllm

CHUNK_BYTES = 512 << 10
"""Of a model that computes a prompt for a second: a hit pays on a busy host too."""
HOLDS, THIRD, EIGHTH = 80, 11, 4
"""Slots of a RAM beside prompts of 32 chunks."""
WHOLE = [CHUNKS * BLOCK] * 2
MORE = pytest.mark.extended


@pytest.fixture(scope="session")
def lives(forks, tmp_path_factory):
    from kvtier.bench.model import make_model

    model = make_model(tmp_path_factory.mktemp("models") / "demo", "demo")

    def once(mode, scenario, **config):
        out = tmp_path_factory.mktemp("run") / "answers.json"
        keys = {"chunk_tokens": BLOCK} | config
        more = {EVERY_HIT: "0"}
        told = start(forks(mode), f"restart_scenarios {scenario}", out, model, keys, more=more)
        if scenario == "filled" and out.exists():
            assert isinstance(told, EngineFailed), "it was killed"
            return json.loads(out.read_text())
        assert not isinstance(told, EngineFailed), str(told)[-4000:]
        return told

    return once


@pytest.fixture(scope="session")
def killed(lives, tmp_path_factory):
    """``killed(mode)``: the answers of an engine that was killed, and the folder that it left."""

    @cache
    def once(mode):
        folder = tmp_path_factory.mktemp("life") / "nvme"
        disk = {"nvme_path": folder, "nvme_bytes": "128MiB"}
        return lives(mode, "filled", ram_bytes=f"{HOLDS * CHUNK_BYTES}B", **disk), folder

    return once


class Case(NamedTuple):
    mode: Mode
    slots: int
    busy: bool
    config: dict[str, Any]


def case(mode, slots, *, busy=False, more=True, **config):
    words = [mode.name, str(slots), *(["busy"] if busy else []), *config]
    marks = [*([MORE] if more else []), *([pytest.mark.alone] if busy else [])]
    return pytest.param(Case(mode, slots, busy, config), id=" ".join(words), marks=marks)


@pytest.mark.parametrize(
    "one",
    [
        case(V2_ASYNC, EIGHTH, more=False),
        case(V1, EIGHTH, busy=True, more=False),
        case(V1, THIRD),
        case(V1, HOLDS, busy=True, auto="true"),
    ],
)
def test_the_first_prompts_after_a_kill_come_whole_from_nvme(lives, killed, tmp_path, one):
    computed, left = killed(one.mode)
    shutil.copytree(left, tmp_path / "nvme")
    os.sync()  # the start measures a few first reads, which would wait until this copy is written
    disk = {"nvme_path": tmp_path / "nvme", "nvme_bytes": "128MiB"}
    with spinning() if one.busy else nullcontext():
        ram = one.slots * CHUNK_BYTES
        again = lives(one.mode, "asked", ram_bytes=f"{ram}B", **disk, **one.config)
    assert hits(again) == WHOLE
    assert_same(again, computed, tolerance=1e-4)
