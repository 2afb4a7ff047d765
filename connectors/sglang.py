"""Module that ``module_path`` names in the extra configuration of SGLang's HiCache. The class is in
an extension, which is imported when SGLang asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVTier":
        return import_module("kvtier.extensions.sglang.hicache").HiCachePages
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
