"""How answers compare with those of full prefill: first tokens, whole answers, KL of the first.

vLLM tells the log-probabilities of a few tokens at each place, the likeliest ones. So the KL here
is a lower bound: what either answer does not list counts as one outcome. Joining outcomes never
makes a KL larger.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.bench.requests.client import Outcome

LIKELIEST = 20
"""Tokens whose log-probabilities are asked for: as many as vLLM gives unless told otherwise."""
Answers = Mapping[tuple[int, int], Outcome]
"""(round, request) -> its answer."""
_LEAST = 1e-12
"""A smaller probability is rounding: the listed ones do not sum up to 1 exactly."""


@dataclass(frozen=True, slots=True)
class Agreement:
    compared: int
    same_first: int
    same: int
    first_differing: Sequence[int] = field(default=())
    """Of each answer that differs: the index of the first token that does."""
    kl: float | None = None
    """Mean over the answers, at least: from the others' first token to these, in nats. None where
    log-probabilities were not told."""

    def as_json(self) -> dict[str, Any]:
        differing = self.first_differing
        return {
            "compared": self.compared,
            "same_first_token": self.same_first,
            "same_answer": self.same,
            "first_differing_token_median": statistics.median(differing) if differing else None,
            "first_token_kl": self.kl,
        }


def answers(outcomes: Iterable[Outcome]) -> dict[tuple[int, int], Outcome]:
    return {(one.question, one.document): one for one in outcomes if one.successful}


def agreement(ours: Answers, theirs: Answers) -> Agreement:
    """Over the questions that both have answered."""
    both = sorted(ours.keys() & theirs.keys())
    pairs = [(ours[key], theirs[key]) for key in both]
    places = [_differs(one.tokens, other.tokens) for one, other in pairs]
    differing = [place for place in places if place is not None]
    kls = [kl_at_least(other.first, one.first) for one, other in pairs if one.first and other.first]
    same_first = len(both) - sum(place == 0 for place in differing)
    mean = statistics.fmean(kls) if kls else None
    return Agreement(len(both), same_first, len(both) - len(differing), differing, mean)


def kl_at_least(true: Mapping[str, float], other: Mapping[str, float]) -> float:
    """KL of ``other`` from ``true``, both as log-probabilities of their likeliest tokens."""
    listed = true.keys() & other.keys()
    pairs = [(math.exp(true[token]), math.exp(other[token])) for token in listed]
    rest = tuple(max(_LEAST, 1 - math.fsum(column)) for column in zip(*pairs, strict=True))
    pairs.append((rest[0], rest[1]) if pairs else (1.0, 1.0))
    told = math.fsum(p * math.log(p / q) for p, q in pairs if p > 0 and q > 0)
    return max(0.0, told)


def _differs(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ. None when they are the same."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
