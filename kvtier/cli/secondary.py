"""``kvtier launch --tier``: vLLM's own OffloadingConnector over a kvtier server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.config.keys import CACHE_KEYS, Config
from kvtier.core.terminal import size_text

OFFLOADING = "OffloadingConnector"
_TIER = "KVTierTier"
_POOL = "cpu_bytes_to_use"


def offloading(config: Config, server: str, pool_bytes: int) -> dict[str, Any]:
    """Make vLLM's ``--kv-transfer-config`` for its own pool of ``pool_bytes`` above ``server``."""
    entry = {"type": _TIER, "module_path": "kvtier.connectors.vllm_tier", "server": server}
    entry |= passed(config)
    extra = {"spec_name": "TieringOffloadingSpec", _POOL: pool_bytes}
    extra |= {"block_size": config.engine.chunk_tokens, "secondary_tiers": [entry]}
    return {"kv_connector": OFFLOADING, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def passed(config: Config) -> dict[str, Any]:
    """Return the given keys that a cache over the server has too."""
    return {key: config.value(key) for key in CACHE_KEYS if key in config.sources}


def said(transfer: Mapping[str, Any]) -> str:
    """Return a log line about a ``--kv-transfer-config``; empty unless it names kvtier's tier."""
    extra = transfer.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping) or f"'{_TIER}'" not in str(extra.get("secondary_tiers")):
        return ""
    pool = extra.get(_POOL)
    size = size_text(pool) if isinstance(pool, int) else "no size"
    return (
        f"{OFFLOADING} over kvtier's server: vLLM brings back no more of a prompt than its own "
        f"pool holds ({_POOL}, {size}), however large the tiers below it are"
    )
