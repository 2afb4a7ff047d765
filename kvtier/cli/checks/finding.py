"""What a check of ``kvtier doctor`` has found."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    check: str
    state: State
    seen: str
    do: str = ""
    """Empty when there is nothing to do."""
