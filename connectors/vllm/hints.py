"""Module of ``--middleware kvtier.connectors.vllm.hints.Middleware``, loaded when vLLM asks."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Middleware":
        return import_module("kvtier.extensions.hint_dialects.middleware").Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
