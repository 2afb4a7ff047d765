"""Engines under vLLM's own OffloadingConnector with a secondary tier: run as ``python -m
tests.integration.tier_scenarios NAME OUT MODEL``, as :mod:`tests.integration.scenarios` is, whose
engine they use."""

import json
import os
import sys
from pathlib import Path

from tests.integration.scenarios import Engine, rounds

TIER = "TEST_TIER"
"""A variable of the tests: an entry of ``secondary_tiers``, as JSON. ``null``: vLLM alone."""


def once(model):
    """Each document once. Ends when every job of the tier has been reported."""
    tier = json.loads(os.environ[TIER])
    if tier is None:
        return rounds(Engine(model), times=1)
    extra = {
        "spec_name": "TieringOnCPU",
        "spec_module_path": "kvtier.bench.compare.peers.offloading_cpu",
        "cpu_bytes_to_use": 64 << 20,
        "blocks_per_chunk": 2,
        "secondary_tiers": [tier],
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    engine = Engine(model, kv_transfer_config=transfer | {"kv_connector_extra_config": extra})
    answers = rounds(engine, times=1)
    core = engine.llm.llm_engine.engine_core.engine_core
    for _ in range(1000):
        engine.ask([[1, 2, 3]], max_tokens=1)
        if not core.scheduler.connector.has_pending_push_work():
            break
    return answers


def main():
    name, out, model = sys.argv[1:]
    Path(out).write_text(json.dumps({"once": once}[name](model)))


if __name__ == "__main__":
    main()
