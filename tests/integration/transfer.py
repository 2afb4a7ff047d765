"""How tests ask vLLM for kvtier."""

import os
from typing import Any

from kvtier.connectors.vllm import LOAD_EVERY_HIT

EVERY_HIT = "TEST_LOAD_EVERY_HIT"
"""A variable of the tests. ``1``: an engine loads every hit, because the test asks what is served,
not how fast it would have been computed."""


def transfer(**more):
    """``kv_transfer_config`` for an engine with kvtier. ``more`` replaces parts of it."""
    made: dict[str, Any] = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
    }
    if os.environ.get(EVERY_HIT) == "1":
        made["kv_connector_extra_config"] = {LOAD_EVERY_HIT: True}
    return made | more
