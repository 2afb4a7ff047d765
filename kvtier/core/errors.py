"""Every error kvtier raises on purpose.

::

    KVTierError
    |-- ConfigError        a value, key, file or combination the operator gave is wrong
    |   |-- LayoutError    an engine's KV cache cannot be described (or is refused by name)
    |   `-- RefusedSize    a server keeps no chunks of that size, and tells which it keeps
    |-- TierError          a tier cannot be opened, or does not fit its place
    `-- StateError         the caller broke a promise (a bug, never an operator's fault)

A miss, a refusal ("not now") and a failed read are *values*, never exceptions.
Messages say what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVTierError(Exception):
    """Root of every deliberate kvtier error."""


class ConfigError(KVTierError, ValueError):
    """The operator's input is wrong; the message names the key and the remedy."""


class LayoutError(ConfigError):
    """The engine's KV cache layout is unsupported or inconsistent."""


class RefusedSize(ConfigError):  # noqa: N818 - it is what a server says, and LayoutError's sibling
    """A server keeps no chunks of the size that was asked for."""

    def __init__(self, message: str, kept: Sequence[int]) -> None:
        super().__init__(message)
        self.kept = list(kept)
        """Sizes in bytes of the chunks that it keeps now."""


class TierError(KVTierError):
    """A tier cannot be opened or reserved; nothing was changed."""


class StateError(KVTierError, RuntimeError):
    """An internal promise was broken; always a bug, never an input error."""
