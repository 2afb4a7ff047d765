"""Which end of a hit is worth waiting for: loading is compared with computing. Pure.

A hit may end in several places. Each place is one row of a table, :class:`HitEnd`. The answer is a
:class:`LoadPlan`. What is unknown is taken to be fast: such a hit is tried, and teaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.core.lookup import Asking

_LEAST_ODDS = 0.02
_SAFETY_PART = 0.9
"""Part of what a wait saves that bounds what it may cost: at break-even neither gains."""
_PATIENCE_FACTOR, _LEAST_PATIENCE_PART = 3.0, 1 / 8
"""Patience: multiple of its estimate after which a load is given up, and part of what it saves that
it may always take. The first reads of a tier open connections and touch memory, and to lose seconds
of compute over milliseconds is not a bargain."""


class HitEnd(NamedTuple):
    """One place where a hit may end: a row of the table. The first row is in RAM now, and each
    further one saves more tokens."""

    tokens: int
    """Tokens of the prompt that the hit saves from being computed."""
    wait_s: float | None
    """Seconds until lower tiers have brought all of it into RAM. None if unknown."""
    asking: Asking | None = None
    """Costs of asking a shared tier for the rest of this hit. Only in the last row."""


class LoadPlan(NamedTuple):
    row: int | None
    """Row that is loaded; None where everything is computed."""
    ask: bool
    """Whether a shared tier is asked for what the last row adds."""
    within_s: float
    """Deadline, in seconds from now: then what is in RAM is loaded, and the rest is computed."""


def load_all(ends: Sequence[HitEnd]) -> LoadPlan:
    """Plan to load everything that may be had, however long it takes."""
    ask = ends[-1].asking is not None
    return LoadPlan(_last_known(ends), ask, math.inf)


def choose(ends: Sequence[HitEnd], saved_s: Sequence[float]) -> LoadPlan:
    """Choose the row with which the prompt is served soonest. ``saved_s``: seconds that each row
    saves the engine once it is in RAM, negative where its copy is slower than computing.

    The deadline is a multiple of the estimate, at least an eighth of what computing would have cost
    and never more than all of it: waiting in vain at most doubles the time to the first token, once
    (the competitive ratio 2 of ski rental, Karlin et al. 1988)."""
    at_once = max(0.0, saved_s[0])
    row: int | None = 0 if saved_s[0] >= 0 else None
    gain, wait_s = at_once, ends[0].wait_s
    known = _last_known(ends)
    for other in range(1, known + 1):
        if _gain(ends[other].wait_s, saved_s[other]) > gain:
            row, wait_s = other, ends[other].wait_s
            gain = _gain(wait_s, saved_s[other])
    most = at_once if row is None else saved_s[row]
    asking = ends[-1].asking if row == known else None
    ask = asking is not None and _worth_asking(asking, saved_s[-1] - most)
    if ask:
        wait_s, most = ends[-1].wait_s, saved_s[-1]
    most -= at_once
    patience = (
        math.inf if wait_s is None else max(_PATIENCE_FACTOR * wait_s, _LEAST_PATIENCE_PART * most)
    )
    return LoadPlan(row, ask, max(0.0, min(patience, most)))


def _last_known(ends: Sequence[HitEnd]) -> int:
    return len(ends) - (1 if ends[-1].asking is None else 2)


def _gain(wait_s: float | None, saved_s: float) -> float:
    return saved_s - (wait_s or 0.0) / _SAFETY_PART


def _worth_asking(asking: Asking, saved_s: float) -> bool:
    """Return whether asking a shared tier gains more than waiting for its answer costs.
    ``saved_s``: seconds that a hit there would save."""
    odds = max(asking.odds, _LEAST_ODDS)
    return odds * _gain(asking.arrive_s, saved_s) > (1 - odds) * (asking.answer_s or 0.0)
