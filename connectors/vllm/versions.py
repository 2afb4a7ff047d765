"""Everything that differs between the vLLM versions kvtier supports, in one place.

Tested: 0.29.0 and 0.32.0 (README, "Supported versions").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.30: hits are not split by source
    CacheHitSource = None


def hit_sources(tokens: Mapping[str, int]) -> dict[Any, int]:
    """Tokens by kvtier place (``ram``, ``nvme``, ``redis``) as vLLM's own split; empty where it has none."""
    if CacheHitSource is None:
        return {}
    known = {"ram": CacheHitSource.HOST, "nvme": CacheHitSource.DISK, "redis": CacheHitSource.P2P}
    result: dict[Any, int] = {}
    for place, count in tokens.items():
        source = known.get(place, CacheHitSource.EXTERNAL_UNSPECIFIED)
        result[source] = result.get(source, 0) + count
    return result


def log_like_vllm(level: str) -> None:
    """kvtier's log lines go where vLLM's go, in its format, from ``level`` on; set up once a process."""
    ours = logging.getLogger("kvtier")
    ours.setLevel(level)
    if not ours.handlers:
        ours.handlers = list(logging.getLogger("vllm").handlers)
        ours.propagate = not ours.handlers


def set_failure_policy(vllm_config: Any) -> None:
    """Sets what vLLM does with a request whose cached KV cannot be loaded.

    ``recompute`` is right as long as one batch is in flight. With async scheduling, pipeline stages or Model Runner V2
    vLLM has planned or run the next step over the blocks that were not loaded, and gives out its tokens. There such a
    request must end with an error (``fail``): no answer is better than a wrong one.
    """
    transfer = vllm_config.kv_transfer_config
    several = vllm_config.max_concurrent_batches > 1 or getattr(vllm_config, "use_v2_model_runner", False)
    policy = "fail" if several else "recompute"
    if transfer.kv_load_failure_policy != policy:
        transfer.kv_load_failure_policy = policy
        logging.getLogger("kvtier.connectors.vllm").info(
            "kv_load_failure_policy=%s: %s",
            policy,
            "several batches are in flight, so a request whose cached KV cannot be loaded ends with an error"
            if several
            else "a request whose cached KV cannot be loaded is computed",
        )
