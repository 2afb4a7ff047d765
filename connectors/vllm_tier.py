"""Module that ``module_path`` names in an entry of ``secondary_tiers`` of vLLM's own
OffloadingConnector. The class is in an extension (kvtier/extensions/vllm_tier/README.md), which is
imported when vLLM asks for it. A vLLM that was not tested is refused, in words."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvtier.connectors.vllm.versions import running
from kvtier.core.errors import ConfigError

TESTED = ("0.32", "0.33")
"""Releases of vLLM that this tier is tested with. They differ only in what it does not use: 0.33
may poll a tier from another thread where the tier says so (this one does not), and asks for labels
of an info metric (it has none)."""


def __getattr__(name: str) -> Any:
    if name != "KVTierTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    version = running()
    if not version.startswith(tuple(f"{one}." for one in TESTED)):
        raise ConfigError(
            f"vLLM {version}: KVTierTier is tested with {' and '.join(TESTED)}, and vLLM changes "
            "the interface of secondary tiers from release to release. Use one of these, or "
            "kvtier's own connector (KVTierConnector), which takes more of them"
        )
    return import_module("kvtier.extensions.vllm_tier.tier").KVTierTier
