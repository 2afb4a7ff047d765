"""Every error kvtier raises on purpose.

::

    KVTierError
    |-- ConfigError        a value, key, file or combination from the operator is wrong
    |   |-- LayoutError    an engine's KV cache cannot be described, or is refused by name
    |   `-- RefusedSize    a server keeps no chunks of that size, and tells which it keeps
    |-- TierError          a tier cannot be opened, or does not fit where it is
    `-- StateError         the calling code broke its contract: a bug, never an operator's fault

A miss, a refusal ("not now") and a failed read are *values*, never exceptions.
Messages say what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """The operator's input is wrong. The message names the key and what to do."""


class LayoutError(ConfigError):
    """The engine's KV cache layout is unsupported or inconsistent."""


class RefusedSize(ConfigError):  # noqa: N818 - it is what a server says, and LayoutError's sibling
    """A server keeps no chunks of the size that was asked for."""

    def __init__(self, message: str, kept: Sequence[int]) -> None:
        super().__init__(message)
        self.kept = list(kept)


class TierError(KVTierError):
    """A tier cannot be opened or reserved. Nothing was changed."""


class StateError(KVTierError, RuntimeError):
    """An internal contract was broken. It is always a bug and never an input error."""
