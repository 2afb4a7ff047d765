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
    """Empty when there is nothing to do."""

    @classmethod
    def of(cls, check: str, wrong: str, seen: str, do: str) -> Finding:
        """A fail where something is ``wrong``. Else, with what was ``seen``, all is well."""
        return cls(check, "fail", wrong, do) if wrong else cls(check, "ok", seen)


def refused(look: Callable[[], object]) -> str:
    """A fault in words: the error of a look that raises ConfigError. "" when it does not."""
    try:
        look()
    except ConfigError as error:
        return str(error)
    return ""
