"""The module that ``module_path`` names in an entry of ``secondary_tiers`` of vLLM's
OffloadingConnector. The class is in an extension, which is imported when vLLM asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVTierTier":
        return import_module("kvtier.extensions.vllm_tier").tier_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
