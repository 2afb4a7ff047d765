"""``kvtier launch`` of a real vLLM with two data-parallel ranks: they share a server that launch
starts, so what one has computed is a hit of the other."""

import sys

import pytest

from kvtier.bench.model import make_model
from tests.integration.test_vllm import DOCUMENT_HIT
from tests.integration.test_vllm_http import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]


def test_with_the_one_switch_the_ranks_share_a_server_and_plan_no_tier_themselves(tmp_path):
    server = Server(make_model(tmp_path / "tiny", "tiny"), tmp_path, "--data-parallel-size", "2")
    at = server._command.index("--kv-transfer-config")
    del server._command[at : at + 2]
    module = "vllm.entrypoints.openai.api_server"
    launch = [sys.executable, "-m", "kvtier", "launch", "--", sys.executable, "-m", module]
    server._command[:3] = launch
    server._env |= {"KVTIER_ADMIN": "off", "KVTIER_SERVER_TIMEOUT_MS": "5000", "KVTIER_AUTO": "1"}
    with server:
        for seed in range(4):
            cold, warm = (server.ask(seed, rank=rank) for rank in range(2))
            assert (cold["cached"], warm["cached"]) == (0, DOCUMENT_HIT)
            assert warm["tokens"] == cold["tokens"]
    said = server.log.read_text()
    assert said.count("auto-config: ram_bytes 64 MiB (yours; the plan ") == 1
    assert said.count("auto-config: the tiers are the server's (unix://") == 2
