"""kvtier's connector, whose loads in parts can be kept out while the engine runs.

The engine imports this module as ``kv_connector_module_path``. While there is a file that
``WHOLE`` names, a hit comes as where vLLM keeps nothing of a load that was cut: when RAM has all of
it. The file that ``BEGUN`` names gets a byte for each load in parts, and the file that ``POOL``
names says where the slots lie into which they are read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvtier.bench.compare.in_parts.engine import BEGUN, POOL, WHOLE
from kvtier.connectors.vllm.connector import KVTierConnector
from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads

__all__ = ["KVTierConnector"]


def _switch() -> None:
    promise, allocated = EarlyLoads.promise, EarlyLoads.allocated
    whole, begun, where = (Path(os.environ[name]) for name in (WHOLE, BEGUN, POOL))

    def promised(early: EarlyLoads, *given: Any, **more: Any) -> int | None:
        return 0 if whole.exists() else promise(early, *given, **more)

    def noted(early: EarlyLoads, prompt: Any, *given: Any) -> bool:
        asked: Any = prompt.notes.get(early)
        leases = asked.leases if asked is not None else []
        is_begun = allocated(early, prompt, *given)
        if is_begun:
            with begun.open("ab") as file:
                file.write(b".")
            pool = leases[0].pool
            where.write_text(json.dumps([pool.path, pool.slots, pool.slot_bytes]))
        return is_begun

    EarlyLoads.promise, EarlyLoads.allocated = promised, noted  # type: ignore[method-assign, assignment]


if WHOLE in os.environ:
    _switch()
