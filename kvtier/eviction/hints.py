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
"""For a higher priority, after the prompt's last use."""


class Hint(NamedTuple):
    over: bool = False
    """The session has ended: chunks that it alone has leave first, and are not written below."""
    keep_s: float = 0.0
    """The run will be used again within so many seconds after its last use. 0: nothing is known."""
    salt: str = ""
    """:func:`salt_name` of the client that keeps it: clients share what one tenant may keep."""


NO_HINT = Hint()


def session_name(salt: str | None, session: str) -> str:
    """A session's name in a Store, of fixed length. Sessions with different cache salts are
    different, even with the same name. Empty: no name."""
    if not session:
        return ""
    return hashlib.blake2b(json.dumps([salt or "", session]).encode(), digest_size=16).hexdigest()


def salt_name(salt: str | None) -> str:
    """Stands for a cache salt in a Store, with a fixed length. Empty: the client has none."""
    text = (salt or "").encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=_SALT_BYTES).hexdigest() if salt else ""


def with_salt(session: str, salt: str) -> str:
    """A session's name and a salt's in one word, of at most 64 letters, as a server is told."""
    return session[: 64 - 1 - 2 * _SALT_BYTES] + _MARK + salt if salt else session[:64]


def without_salt(word: str) -> tuple[str, str]:
    session, _, salt = word.partition(_MARK)
    return session, salt


def read(given: Mapping[str, object]) -> tuple[Hint, int]:
    """The hint in a request's words, and how many words are bad or unknown. Those are ignored.

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
