"""Real vLLM with kvtier and vLLM's own MooncakeStoreConnector in one MultiConnector, or with kvtier
alone, whose tier is what the environment says: ``python -m tests.integration.mooncake_vllm OUT
MODEL both|alone``.

Asks all documents three times: cold, from vLLM's own prefix cache, and when that has been emptied.
OUT gets the answers as JSON, and how many prompt tokens came from where.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.integration.scenarios import PLENTY, Engine, rounds
from tests.integration.transfer import transfer

CONNECTORS = ROOT / "deploy/mooncake/connectors.json"


def both():
    """The connectors of deploy/mooncake. A model this small may be computed sooner than it is
    loaded."""
    made: dict[str, Any] = json.loads(CONNECTORS.read_text())
    ours, other = made["kv_connector_extra_config"]["connectors"]
    assert other["kv_connector"] == "MooncakeStoreConnector"
    ours.update(transfer())
    return made


def by_source(engine):
    """Prompt tokens so far that came from each source, in vLLM's words."""
    name = "vllm:prompt_tokens_cached_by_source"
    found = [metric for metric in engine.llm.get_metrics() if metric.name == name]
    return {metric.labels["source"]: int(metric.value) for metric in found if metric.value}


def main():
    connector = both() if sys.argv[3] == "both" else transfer()
    engine = Engine(sys.argv[2], PLENTY, kv_transfer_config=connector, disable_log_stats=False)
    told: dict[str, Any] = {}
    for name in ("first", "own", "again"):
        if name == "again":
            engine.forget()
        told[name] = {"answers": rounds(engine, times=1), "sources": by_source(engine)}
    engine.llm.llm_engine.engine_core.shutdown()  # what waits to be written below is written
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
