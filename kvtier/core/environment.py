"""The environment of this process. No other file reads it."""

from __future__ import annotations

import os


def environment(**more: str | None) -> dict[str, str]:
    """This process's environment and ``more`` (None: as it is), such as for a program that is
    started from here."""
    return {**os.environ, **{name: value for name, value in more.items() if value is not None}}
