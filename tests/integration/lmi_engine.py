"""A vLLM as LMI starts it, with LMCache's connector: ``python -m tests.integration.lmi_engine OUT
MODEL``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.integration.scenarios import Engine, rounds

if __name__ == "__main__":
    out, model = sys.argv[1:]
    engine = Engine(
        model, kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    )
    Path(out).write_text(json.dumps(rounds(engine)))
