"""``kvtier launch`` of a real vLLM with two data-parallel ranks: they share a server that launch
starts. What one has computed is a hit of the other, which it is not where each has a store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from kvtier.bench.processes.engine import transfer
from tests.integration.test_vllm import DOCUMENT_HIT
from tests.integration.test_vllm_http import TRANSFER, Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]


class Launched(Server):
    """The same, as an operator starts it. ``shared``: the command names no connector, so launch
    adds it."""

    def __init__(self, model: Path, folder: Path, *, shared: bool, auto: bool) -> None:
        super().__init__(model, folder, "--data-parallel-size", "2")
        at = self._command.index("--kv-transfer-config")
        assert transfer(load_every_hit=True) == TRANSFER
        if shared:
            del self._command[at : at + 2]
        module = "vllm.entrypoints.openai.api_server"
        self._command[:3] = [sys.executable, "-m", "kvtier", "launch", "--"]
        self._command[5:5] = [sys.executable, "-m", module]
        ram = "64MiB" if shared else "32MiB"  # as much in all
        self._env |= {"KVTIER_RAM_BYTES": ram, "KVTIER_ADMIN": "off"}
        self._env |= {"KVTIER_SERVER_TIMEOUT_MS": "5000", "KVTIER_AUTO": str(auto)}


def hits(model: Path, folder: Path, *, shared: bool, auto: bool = False) -> list[int]:
    """How many tokens of each of four documents come from a cache at rank 1, after rank 0 was asked
    for it."""
    folder.mkdir()
    server = Launched(model, folder, shared=shared, auto=auto)
    with server:
        found = []
        for seed in range(4):
            cold = server.ask(seed, rank=0)
            warm = server.ask(seed, rank=1)
            assert (cold["cached"], warm["tokens"]) == (0, cold["tokens"])
            found.append(warm["cached"])
    return found


def test_what_one_rank_has_computed_is_a_hit_of_the_other(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", "tiny")
    shared = hits(model, tmp_path / "shared", shared=True)
    assert shared == [DOCUMENT_HIT] * 4
    own = hits(model, tmp_path / "own", shared=False)
    assert own == [0] * 4


def test_with_the_one_switch_the_ranks_share_a_server_and_plan_no_tier_themselves(
    tmp_path: Path,
) -> None:
    """The sizes are set by hand here, which the server alone says."""
    model = make_model(tmp_path / "tiny", "tiny")
    shared = hits(model, tmp_path / "auto", shared=True, auto=True)
    assert shared == [DOCUMENT_HIT] * 4
    said = (tmp_path / "auto/server.log").read_text()
    assert said.count("auto-config: ram_bytes 64 MiB (yours; the plan ") == 1
    assert said.count("auto-config: the tiers are the server's (unix://") == 2
