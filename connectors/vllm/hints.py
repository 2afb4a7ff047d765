"""``--middleware kvtier.connectors.vllm.hints.Middleware``, imported when vLLM asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Middleware":
        return import_module("kvtier.extensions.hint_dialects.middleware").Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
