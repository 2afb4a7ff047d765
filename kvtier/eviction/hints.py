"""Hint: what a client knows of a prompt's future. Pure.

Hints change the order in which chunks leave, and whether a chunk that leaves is written to a lower
tier. A wrong hint costs a recompute and never more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

LONGEST_KEEP_S = 86_400.0
_SALT_BYTES = 8
_MARK = "@"
PRIORITY_KEEP_S = 300.0
"""Time after its last use for which a prompt of a higher priority is kept."""


class Hint(NamedTuple):
    over: bool = False
    """Whether the session has ended: its own chunks leave first, and are not written below."""
    keep_s: float = 0.0
    """Seconds after its last use within which the run will be used again. 0 if nothing is known."""
    salt: str = ""
    """:func:`salt_name` of the client that keeps the run. Its keeps count together."""


NO_HINT = Hint()


def session_name(salt: str | None, session: str) -> str:
    """Return a session's name in a Store, of fixed length. Sessions with different cache salts are
    different, even with the same name. Empty if there is no name."""
    if not session:
        return ""
    return hashlib.blake2b(json.dumps([salt or "", session]).encode(), digest_size=16).hexdigest()


def salt_name(salt: str | None) -> str:
    """Return a word of fixed length that stands for a cache salt. Empty if there is none."""
    text = (salt or "").encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=_SALT_BYTES).hexdigest() if salt else ""


def with_salt(session: str, salt: str) -> str:
    """Join a session's name and a salt's into one word, of at most 64 letters, for a server."""
    return session[: 64 - 1 - 2 * _SALT_BYTES] + _MARK + salt if salt else session[:64]


def without_salt(word: str) -> tuple[str, str]:
    session, _, salt = word.partition(_MARK)
    return session, salt


def read(given: Mapping[str, object]) -> tuple[Hint, int]:
    """Return the hint in a request's words, and how many words are bad or unknown, which are
    ignored.

    - ``over``: true or false.
    - ``keep_s``: seconds, at most a day.
    - ``priority``: a number. Above 0 the prompt is kept for a while."""
    over, keep_s, bad = False, 0.0, 0
    for word, value in given.items():
        number = _number(value)
        if word == "over" and isinstance(value, bool):
            over = value
        elif word == "keep_s" and number is not None and number >= 0:
            keep_s = max(keep_s, min(number, LONGEST_KEEP_S))
        elif word == "priority" and number is not None:
            keep_s = max(keep_s, PRIORITY_KEEP_S if number > 0 else 0.0)
        else:
            bad += 1
    return Hint(over, keep_s), bad


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
