"""How long the engine takes to compute tokens: planned before it starts, then learned from its
steps. Pure: every time comes from the caller, in monotonic seconds. No clock, lock or I/O.

What is learned is forgotten with work, so that an engine that changes is believed to have changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvtier.load_policy.latency import Average

_LEAST_TOKENS = 128
"""Least tokens of a step, beyond one a request, from which prefill is learned. With fewer, the
fixed cost of a step hides it."""
_HALF_TOKENS = 32_768
"""Tokens after whose prefill half of the estimate comes from them."""
_APART_TOKENS = 256.0
"""Difference of steps' depths below which they do not tell what depth costs."""


@dataclass(frozen=True, slots=True)
class PrefillTime:
    per_token: float
    """Seconds a token: the weights' share."""
    per_depth: float = 0.0
    """Seconds a token for each token before it that it looks back at: causal attention's share."""

    def seconds(self, tokens: int, before: int = 0) -> float:
        """Return the seconds to compute ``tokens`` behind ``before`` tokens that are there."""
        return tokens * self.per_token + looks_back(tokens, before) * self.per_depth


def looks_back(tokens: int, before: int) -> float:
    """Return the sum, over ``tokens`` behind ``before``, of the tokens that each attends to."""
    return tokens * before + tokens * tokens / 2


class Work(NamedTuple):
    tokens: int
    requests: int
    looks: float = 0.0
    """Sum of :func:`looks_back` over the requests. Used where tokens of a prompt are among them."""

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> Work:
        """Add up ``parts``: for each request its tokens, and how many were there before."""
        parts = [*parts]
        tokens = sum(new for new, _ in parts)
        return cls(tokens, len(parts), sum(looks_back(*part) for part in parts))


class Certainty(IntEnum):
    NONE = 0
    GUESSED = 1
    """Planned from what the machine is, or bounded by steps too small to measure."""
    REMEMBERED = 2
    """Measured in an earlier run of the same engine."""
    MEASURED = 3


class Prefill:
    """A :class:`PrefillTime` that is learned.

    It is a weighted least squares line, seconds a token over mean depth, whose past fades with the
    tokens computed since (recursive least squares with exponential forgetting, Haykin, *Adaptive
    Filter Theory*, chapter 10, in its sums form). Weights are squares of tokens: what a step costs
    whatever it computes is an error of constant size. ``per_depth`` is drawn to its first value
    (ridge) as long as all steps are equally deep, and neither is ever negative.
    """

    def __init__(
        self, first: PrefillTime | None = None, known: Certainty = Certainty.MEASURED
    ) -> None:
        """Begin with ``first``, worth a step of 128 tokens, whose source is ``known``."""
        self._first_depth = first.per_depth if first is not None else 0.0
        self._sums = [0.0] * 5
        self.line: PrefillTime | None = None
        self.known = Certainty.NONE
        if first is not None and 0 < first.per_token < math.inf:
            self._begin(first.per_token, known)

    def at_most(self, per_token: float) -> None:
        """Learn that a step took this many seconds a token, and may have done much else in them. No
        effect on what was measured."""
        if self.known is Certainty.MEASURED:
            return
        known = self.line.per_token if self.line is not None else math.inf
        if 0 < per_token < known:
            self._begin(per_token, max(self.known, Certainty.GUESSED))

    def _begin(self, per_token: float, known: Certainty) -> None:
        weight = float(_LEAST_TOKENS**2)
        self._sums = [weight, 0.0, weight * per_token, 0.0, 0.0]
        self.line, self.known = PrefillTime(per_token, self._first_depth), known

    def seconds(self, tokens: int, before: int) -> float | None:
        """Return :meth:`PrefillTime.seconds`, or None while nothing is known."""
        return None if self.line is None else self.line.seconds(tokens, before)

    def learn(self, tokens: int, looks: float, seconds: float) -> None:
        """Learn from a step that computed ``tokens`` in ``seconds``. ``looks``: as of Work."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        weight, depth, each = float(tokens) ** 2, looks / tokens, seconds / tokens
        fade = 0.5 ** (tokens / _HALF_TOKENS)
        sample = (1.0, depth, each, depth * depth, depth * each)
        self._sums = [
            old * fade + weight * new for old, new in zip(self._sums, sample, strict=True)
        ]
        total, *rest = self._sums
        x, y, xx, xy = (one / total for one in rest)
        ridge = _APART_TOKENS**2
        slope = max(0.0, (xy - x * y + ridge * self._first_depth) / (max(0.0, xx - x * x) + ridge))
        flat = y - slope * x
        self.line = PrefillTime(flat, slope) if flat > 0 else PrefillTime(0.0, xy / xx)
        self.known = Certainty.MEASURED


class StepClock:
    """Clock of how long the engine was busy with a step: from when it was planned, or the step
    before had ended if that is later, until its output was seen by the scheduler.

    That is a first-come-first-served server's service time, so neither idle time nor steps planned
    ahead (asynchronous scheduling, pipeline stages) count, and it needs no clock of the device,
    whose work is asynchronous to the worker's calls. It holds what a prompt really waits for: the
    forward pass, sampling, messages and scheduling.
    """

    def __init__(self, prefill: Prefill) -> None:
        self.number = 0
        self._prefill = prefill
        self._planned: dict[int, tuple[float, Work]] = {}
        self._seen, self._seen_at = 0, -math.inf
        self._small = Average()
        self._warm = False

    def plan(self, now: float, work: Work) -> int:
        """Note that a step with this work is planned. Returns its number."""
        self.number += 1
        self._planned[self.number] = now, work
        return self.number

    def end(self, number: int, now: float, elsewhere: float) -> float | None:
        """Note that the output of a step was seen. Returns how long the engine was busy with it;
        None if it computed nothing, or this is unknown. ``elsewhere``: seconds of it that went into
        copies. A step whose output was never seen spoils the next one, which is left out."""
        step = self._planned.pop(number, None)
        in_turn, since = number == self._seen + 1, self._seen_at
        self._seen, self._seen_at = number, now
        while self._planned and (missed := next(iter(self._planned))) < number:
            del self._planned[missed]
        if step is None or not in_turn:
            return None
        planned_at, (tokens, requests, looks) = step
        seconds = now - max(planned_at, since) - elsewhere
        if tokens:
            self._prefill.at_most(seconds / tokens)
        if tokens - requests >= _LEAST_TOKENS:
            if self._warm:
                self._prefill.learn(
                    tokens, looks, seconds - min(self._small.value or 0.0, seconds / 2)
                )
            self._warm = True  # an engine's first prefill loads what the others find loaded
        elif 0 < tokens == requests:
            self._small.add(seconds, now)
        return seconds if tokens else None
