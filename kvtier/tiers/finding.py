"""Finding: one line of ``kvtier doctor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from kvtier.core.errors import ConfigError

State = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    check: str
    state: State
    seen: str
    do: str = ""

    @classmethod
    def of(cls, check: str, wrong: str, seen: str, do: str) -> Finding:
        """A fail if ``wrong`` is not empty, else ok with ``seen``."""
        return cls(check, "fail", wrong, do) if wrong else cls(check, "ok", seen)


def refused(look: Callable[[], object]) -> str:
    """The text of ``look``'s ConfigError, "" without one."""
    try:
        look()
    except ConfigError as error:
        return str(error)
    return ""
