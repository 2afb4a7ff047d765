"""Module that ``module_path`` names in LMCache's configuration. The class is in an extension, which
is imported when LMCache asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVTier":
        return import_module("kvtier.extensions.lmcache_remote.plugin").KVTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
