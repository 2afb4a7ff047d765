"""Engines under vLLM's own OffloadingConnector with a secondary tier: run as ``python -m
tests.integration.tier_scenarios NAME OUT MODEL``, as :mod:`tests.integration.scenarios` is, whose
engine they use."""

import json
import os
from functools import partial

from tests.integration.group_scenarios import made
from tests.integration.scenarios import Engine, answered, document, rounds

TIER = "TEST_TIER"
"""A variable of the tests: an entry of ``secondary_tiers``, as JSON. ``null``: vLLM alone."""
STATEFUL_TOKENS = 1500


def once(model):
    """Each document once. Ends when every job of the tier has been reported."""
    engine = Engine(model, **transfer())
    return reported(engine, rounds(engine, times=1))


def stateful(model):
    """The same of a model with states, whose blocks are as long as a state is large."""
    engine = made(model, **transfer(blocks_per_chunk=1))
    prompts = [document(seed, STATEFUL_TOKENS) for seed in range(3)]
    return reported(engine, [engine.ask([prompt])[0] for prompt in prompts])


def transfer(**more):
    tier = json.loads(os.environ[TIER])
    if tier is None:
        return {}
    extra = {
        "spec_name": "TieringOnCPU",
        "spec_module_path": "kvtier.bench.compare.peers.offloading_cpu",
        "cpu_bytes_to_use": 64 << 20,
        "blocks_per_chunk": 2,
        "secondary_tiers": [tier],
    }
    found = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": found | {"kv_connector_extra_config": extra | more}}


def reported(engine, answers):
    core = engine.llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    for _ in range(1000):
        if connector is None or not connector.has_pending_push_work():
            break
        engine.ask([[1, 2, 3]], max_tokens=1)
    return answers


main = partial(answered, globals())
if __name__ == "__main__":
    main()
