"""Answers of an engine over other engines' chunks beside those of the same engine alone.

Two answers are compared by the log-probabilities of the best tokens of every step, which follow the
KV of the whole prompt to the last bits. After a hit that is as long as one of the engine's own
cache the two are computed alike, so they have to be equal to the bit. Where a hit ends elsewhere,
or a prefill was split elsewhere, they may differ by what computing it anew gives, which is
measured (:func:`noise`).
"""

import math
from collections.abc import Mapping
from typing import Any

Answer = Mapping[str, Any]
MARGIN = 8.0
"""How many times the measured noise two answers may lie apart."""
_LEAST = 1e-6
"""Of float32, where nothing was measured."""


def distance(one, other):
    """The largest difference of two log-probabilities, up to the first token that differs.
    Infinite where nothing can be compared; 0.0: equal to the bit."""
    found = 0.0
    for left, right, here, there in zip(
        one["top"], other["top"], one["tokens"], other["tokens"], strict=True
    ):
        shared = left.keys() & right.keys()
        if not shared:
            return math.inf
        for token in shared:
            if left[token] != right[token]:
                apart = abs(left[token] - right[token])
                found = math.inf if math.isnan(apart) else max(found, apart)
        if here != there:
            # As near as two candidates can be they swap: then the rest has another beginning.
            swapped = abs(left[str(here)] - left.get(str(there), math.inf))
            return float(max(found, swapped, 5e-324))
    return found


def farthest(one, other):
    return max(map(distance, one, other), default=0.0)


def noise(alone, split=None):
    """What computing the same anew gives: a prompt at once, after a hit of the engine's own cache,
    and in short steps (``split``)."""
    cold, own = alone["answers"]
    found = farthest(cold, own)
    return max(found, farthest(cold, split["answers"][0])) if split else found


def apart(ours, alone):
    """How far answers lie from those of the engine alone, each from the nearer one that it can be
    compared with: computed at once, or after a hit of the same length."""
    cold, own = alone["answers"]
    worst = 0.0
    for told in ours["answers"]:
        for one, plain, hit in zip(told, cold, own, strict=True):
            worst = max(worst, min(distance(one, plain), distance(one, hit)))
    return worst


def allowed(*noises):
    return MARGIN * max(_LEAST, *noises)


def hits(told):
    """Cached tokens of the first asking: nobody but kvtier can have had them."""
    return [answer["cached"] or 0 for answer in told["answers"][0]]


def own_hits(told):
    """Of the second asking."""
    return [answer["cached"] or 0 for answer in told["answers"][1]]
