"""Words of hints about a prompt's future in ``kv_transfer_params``, where :func:`of_request` finds
them in the scheduler. Pure: it imports no vLLM.

Clients that send hints in other forms need vLLM's ``--middleware`` with
``kvtier.connectors.vllm.hints.Middleware``, an extension's class, imported when vLLM asks for it.
Bad and unknown hints are counted and have no effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvtier.eviction.hints import LONGEST_KEEP_S, NO_HINT, Hint, read, salt_name, session_name

SESSION = "kvtier.session"
OVER = "kvtier.over"
"""Word for the end of the session with this request: a truth value."""
KEEP = "kvtier.keep_s"
"""Word for how long after its last use the prompt shall be kept: seconds, or ``5m``."""
PRIORITY = "kvtier.priority"
BAD = "kvtier.bad_hints"
"""Word for the number of the request's hints that the middleware could not read."""
KINDS = ("over", "keep", "priority", "bad")
_PREFIX = "kvtier."
_NO_HINT = "kvtier.cache"
_LMCACHE_KEEP = "lmcache_retention_ttl_sec"
_SESSION_LETTERS = 256
MOST_ACTIONS = 64
_DURATION = re.compile(r"(\d{1,9})([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_ACTIONS = {"kv.end": OVER, "kv.keep": KEEP, "kv.priority": PRIORITY}


def __getattr__(name: str) -> Any:
    if name == "Middleware":
        return import_module("kvtier.extensions.hint_dialects.middleware").Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Words:
    """Values by word, of which the first one wins, and the number of bad ones."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.bad = 0

    def say(self, word: str, value: Any) -> None:
        """Add a value, or count a bad one (None)."""
        if value is None:
            self.bad += 1
        else:
            self.said.setdefault(word, value)


def say_action(words: Words, kind: Any, payload: Any) -> None:
    word = _ACTIONS.get(kind) if isinstance(kind, str) else None
    if word is None or not isinstance(payload, Mapping):
        words.bad += 1
    elif word == OVER:
        words.say(OVER, True)
    elif word == KEEP:
        words.say(KEEP, seconds(payload.get("ttl")))
    else:
        words.say(PRIORITY, finite(payload.get("priority")))


@dataclass(frozen=True, slots=True)
class Said:
    session: str = ""
    """Session's name, of fixed length, different for each cache salt. Empty if none was given."""
    hint: Hint = NO_HINT
    kinds: Sequence[str] = ()
    """Kinds of the hints, from :data:`KINDS`, each as often as it was said."""


_NOTHING_SAID = Said()


def of_request(request: Any) -> Said:
    given = request.kv_transfer_params
    given = given if isinstance(given, Mapping) else {}
    actions = getattr(getattr(request, "kv_hints", None), "actions", ())[:MOST_ACTIONS]
    own_session = getattr(request, "session_id", None)
    if not (given or actions or own_session):  # as nearly all
        return _NOTHING_SAID
    words = Words()
    for name, value in given.items():
        if name in _READERS:
            words.say(name, _READERS[name](value))
        elif name == BAD:
            words.bad += value if type(value) is int and 0 <= value <= MOST_ACTIONS else 1
        elif isinstance(name, str) and name.startswith(_PREFIX) and name != _NO_HINT:
            words.bad += 1
    if _LMCACHE_KEEP in given:
        words.say(KEEP, seconds(given[_LMCACHE_KEEP]))
    for action in actions:
        say_action(words, action.action_type, action.payload)
    session = words.said.pop(SESSION, None) or short_name(own_session) or ""
    hint, bad = read({word.removeprefix(_PREFIX): value for word, value in words.said.items()})
    kinds = [
        kind
        for kind, word in zip(KINDS, (OVER, KEEP, PRIORITY), strict=False)
        if words.said.get(word)
    ]
    if hint.keep_s:
        hint = hint._replace(salt=salt_name(request.cache_salt))
    return Said(
        session_name(request.cache_salt, session), hint, kinds + ["bad"] * (words.bad + bad)
    )


# ---- values --------------------------------------------------------------------------------------


def seconds(value: Any) -> float | None:
    """Return the seconds of ``300``, ``"300"``, ``"5m"`` or ``"1h"``: at most a day, or None."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        return min(float(match[1]) * _UNITS[match[2]], LONGEST_KEEP_S) if match else None
    number = finite(value)
    return min(number, LONGEST_KEEP_S) if number is not None and number >= 0 else None


def finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    return float(value)


def short_name(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _SESSION_LETTERS else None


_READERS: dict[str, Callable[[Any], Any]] = {
    SESSION: short_name,
    OVER: lambda value: value if isinstance(value, bool) else None,
    KEEP: seconds,
    PRIORITY: finite,
}
