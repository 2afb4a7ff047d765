"""kvtier: a cache tier for an inference engine's KV, in RAM, on NVMe, in Redis and in a bucket.

A cache may forget, may never lie, and may not make its host wait.

The names below are the public face. They are imported when first asked for, so that ``import
kvtier`` costs next to nothing in a process that only wants one of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.config.keys import Config
    from kvtier.core.chunk import ChunkKey, ChunkLayout
    from kvtier.core.errors import ConfigError, KVTierError, LayoutError, StateError, TierError
    from kvtier.core.lookup import Progress
    from kvtier.store.lease import LoadLease, SaveLease
    from kvtier.store.store import Store

__version__ = "0.1.0"

__all__ = [
    "ChunkKey",
    "ChunkLayout",
    "Config",
    "ConfigError",
    "KVTierError",
    "LayoutError",
    "LoadLease",
    "Progress",
    "SaveLease",
    "StateError",
    "Store",
    "TierError",
    "__version__",
]

_HOMES = {
    "kvtier.core.chunk": ("ChunkKey", "ChunkLayout"),
    "kvtier.config.keys": ("Config",),
    "kvtier.core.errors": ("ConfigError", "KVTierError", "LayoutError", "StateError", "TierError"),
    "kvtier.core.lookup": ("Progress",),
    "kvtier.store.lease": ("LoadLease", "SaveLease"),
    "kvtier.store.store": ("Store",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'kvtier' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
