"""What of a hit to take, by when it can be there and what it saves. Pure.

What is unknown is taken to be fast: a hit is tried, and teaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kvtier.core.lookup import LookupResult

_LEAST_ODDS = 0.02
_SAFETY = 0.9
"""Waiting must cost less than this part of what it saves: at the break-even point nothing is gained
by either."""
_PATIENCE, _LEAST_PATIENCE = 3.0, 1 / 8
"""A load is given up after this multiple of what was forecast, and no sooner than this part of what
it saves: the first reads of a tier open connections and touch memory, and to lose seconds of
compute over milliseconds is no bargain."""


class Choice(NamedTuple):
    """What of a hit to take."""

    chunks: int
    """Leading chunks to claim."""
    ask: bool
    """Claim the unknown rest too."""
    within_s: float
    """When to take what is there and compute the rest."""


def choose(result: LookupResult, rest: int, saved: Callable[[int], float | None]) -> Choice:
    """The part of a run of ``rest`` chunks that is soonest served.

    ``saved(chunks)``: seconds of compute, less those of the copy, that so many leading chunks save;
    None: unknown, and then all is taken. Only ends of the outlook's steps are looked at: between
    them waiting grows evenly while what a chunk saves grows with its depth, so the difference has
    its maximum at an end.

    The deadline is a multiple of the forecast, at least an eighth and never more than what
    computing would have cost: waiting in vain at most doubles the time to the first token, once
    (the competitive ratio 2 of ski rental, Karlin et al. 1988).
    """
    ready = result.ready
    best, worth, wait = ready, saved(ready), 0.0
    if worth is None:
        return Choice(result.known, result.asking is not None, math.inf)
    if worth < 0:
        best, worth = 0, 0.0
    at_once = worth
    soon: float | None = wait
    for chunks, seconds in result.steps[1:]:
        gain = (saved(chunks) or 0.0) - (seconds or 0.0) / _SAFETY
        if chunks > best and gain > worth:
            best, worth, soon = chunks, gain, seconds
    ask = best == result.known and _worth_asking(result, best, rest, saved)
    if ask and result.asking is not None:
        soon = result.asking.arrive_s
    most = (saved(rest if ask else best) or 0.0) - at_once
    patience = math.inf if soon is None else max(_PATIENCE * soon, _LEAST_PATIENCE * most)
    return Choice(best, ask, max(0.0, min(patience, most)))


def _worth_asking(
    result: LookupResult, chunks: int, rest: int, saved: Callable[[int], float | None]
) -> bool:
    """Is what a shared tier may have worth the answer that it has nothing?"""
    asking = result.asking
    if asking is None:
        return False
    gain = (saved(rest) or 0.0) - (saved(chunks) or 0.0) - (asking.arrive_s or 0.0) / _SAFETY
    odds = max(asking.odds, _LEAST_ODDS)
    return odds * gain > (1 - odds) * (asking.answer_s or 0.0)
