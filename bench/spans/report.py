"""Results of the arms: times beside agreement, the table, and DIR/spans.json.

vLLM tells the log-probabilities of a few tokens at each place, the likeliest ones. So the KL of
first tokens is a lower bound: what either answer does not list counts as one outcome, and joining
outcomes never makes a KL larger.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.bench.long_doc_qa.report import TIERS
from kvtier.bench.report import (
    Found,
    Row,
    by_arm,
    median_row,
    named,
    number,
    percentile,
    write_results,
)
from kvtier.bench.requests.client import Outcome
from kvtier.bench.spans.arms import ARMS, FULL, Arm
from kvtier.bench.spans.toy import Known
from kvtier.spans import Order

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


NAME = "spans"


@dataclass(frozen=True, slots=True)
class Run:
    """One arm as it ran. ``hits``: tokens by tier, None where the server does not tell. ``homes``:
    what warmed its documents before. ``in_place``: prompt tokens that were computed in place.
    ``moved``: prompt tokens that came from homes."""

    arm: Arm
    rounds: Sequence[Sequence[Outcome]]
    hits: Mapping[str, float] | None
    homes: Sequence[Outcome] = ()
    in_place: int = 0
    moved: int = 0

    @property
    def warm_up_s(self) -> float:
        return sum(outcome.latency for outcome in self.homes)

    @property
    def good(self) -> list[Outcome]:
        return [outcome for one in self.rounds for outcome in one if outcome.successful]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for one in self.rounds for outcome in one if not outcome.successful]

    @property
    def ttft(self) -> list[float]:
        return ttft(self.good)

    @property
    def means(self) -> list[float]:
        """Mean time to first token of each round that has one."""
        times = [ttft(one) for one in self.rounds]
        return [statistics.fmean(each) for each in times if each]

    @property
    def prompt_tokens(self) -> int:
        return sum(outcome.prompt_tokens for outcome in self.good)

    @property
    def computed_tokens(self) -> int | None:
        """Of the prompts. None where the server does not tell what was cached."""
        cached = [outcome.cached_tokens for outcome in self.good]
        told = [tokens for tokens in cached if tokens is not None]
        if len(told) < len(cached):
            return None
        return self.prompt_tokens - sum(told) + self.in_place


def ttft(outcomes: Sequence[Outcome]) -> list[float]:
    return [one.ttft for one in outcomes if one.successful and one.ttft is not None]


@dataclass(frozen=True, slots=True)
class Results:
    """All arms that ran. ``full``: answers of full prefill to the prompts in each order. ``known``:
    the right answers, where there are any."""

    runs: Sequence[Run]
    full: Mapping[Order, Answers]
    known: Mapping[tuple[int, int], Known] = field(default_factory=dict)

    def with_full(self, run: Run) -> Agreement | None:
        """With full prefill of the same prompts: what reuse changes. None: nothing to compare."""
        return self._with(run, run.arm.order)

    def with_given(self, run: Run) -> Agreement | None:
        """With full prefill in the given order: what the order changes."""
        return self._with(run, "given") if run.arm.order != "given" else None

    def _with(self, run: Run, order: Order) -> Agreement | None:
        if run.arm.name == FULL or order not in self.full:
            return None
        return agreement(answers(run.good), self.full[order])

    def by_kind(self, run: Run) -> dict[str, dict[str, int]]:
        """For each kind of question: how many were asked, and how many answers are right. Empty
        where no answer is known."""
        found = answers(run.good)
        kinds = dict.fromkeys(known.kind for known in self.known.values())
        told = {}
        for kind in kinds:
            ours = {key: one for key, one in found.items() if self.known[key].kind == kind}
            right = sum(
                list(one.tokens[:1]) == [self.known[key].answer] for key, one in ours.items()
            )
            told[kind] = {"asked": len(ours), "right": right}
        return told

    @property
    def base(self) -> Run | None:
        return next((run for run in self.runs if run.arm.name == FULL and run.means), None)

    def against(self, run: Run) -> float | None:
        if self.base is None:
            return None
        return statistics.median(run.means) / statistics.median(self.base.means)

    @property
    def exact(self) -> bool:
        """No answer differs from full prefill's of the same prompt, in arms that are exact."""
        found = [self.with_full(run) for run in self.runs if run.arm.first is None]
        return all(each is None or each.same == each.compared for each in found)


def rows_of(results: Results) -> list[Row]:
    """Per arm: time to first token (median, min and max of rounds), and what was computed."""
    rows = []
    for run in results.runs:
        if not run.means:
            continue
        name = run.arm.name
        rows.append(median_row(f"{name}: ttft mean", run.means, "s", None, results.against(run)))
        rows.append(Row(f"{name}: ttft p99", percentile(run.ttft, 99), "s"))
        computed = run.computed_tokens
        share = None if computed is None else computed / run.prompt_tokens
        rows.append(Row(f"{name}: prompt tokens computed", computed, "tokens", None, share))
    return rows


def as_json(results: Results, run: Run) -> dict[str, Any]:
    full, given = results.with_full(run), results.with_given(run)
    hits = run.hits
    return {
        "cannot_run": None,
        "about": run.arm.about,
        "ttft_mean_s": statistics.median(run.means),
        "ttft_mean_min_s": min(run.means),
        "ttft_mean_max_s": max(run.means),
        "ttft_p50_s": percentile(run.ttft, 50),
        "ttft_p99_s": percentile(run.ttft, 99),
        "prompt_tokens": run.prompt_tokens,
        "computed_tokens": run.computed_tokens,
        "computed_in_place_tokens": run.in_place,
        "tokens_from_homes": run.moved,
        "warm_up_s": run.warm_up_s,
        "warm_up_tokens": sum(outcome.prompt_tokens for outcome in run.homes),
        "hit_tokens": None if hits is None else {tier: round(hits.get(tier, 0)) for tier in TIERS},
        "requests": len(run.good) + len(run.failed),
        "failed_requests": len(run.failed),
        "as_full_prefill": full.as_json() if full else None,
        "as_full_prefill_in_the_given_order": given.as_json() if given else None,
        "by_kind": results.by_kind(run),
    }


def write(folder: Path, results: Results, **more: Any) -> Found:
    arms = {run.arm.name: as_json(results, run) for run in results.runs if run.means}
    arms |= {
        arm.name: {"cannot_run": arm.cannot_run, "about": arm.about}
        for arm in ARMS.values()
        if arm.cannot_run and not results.known
    }
    return write_results(folder / f"{NAME}.json", NAME, rows_of(results), **more, arms=arms)


def shown(found: Found) -> list[list[str]]:
    """The table of the arms: times beside agreement."""
    values, base = named(found), found["arms"].get(FULL)

    def cells(name: str, arm: Any) -> list[str]:
        mean, computed = values[f"{name}: ttft mean"], values[f"{name}: prompt tokens computed"]
        full, given = arm["as_full_prefill"], arm["as_full_prefill_in_the_given_order"]
        median, differing = arm["ttft_p50_s"], (full or {}).get("first_differing_token_median")
        return [
            number(median, "s"),
            f"{median / base['ttft_p50_s']:.2f} x" if base else "-",
            number(mean["value"], "s"),
            number(arm["ttft_p99_s"], "s"),
            "not told" if computed["ratio"] is None else f"{computed['ratio']:.0%}",
            _agreed(full, "same_first_token"),
            _agreed(full, "same_answer"),
            "-" if differing is None else f"{differing:g}",
            _kl(full),
            _agreed(given, "same_answer"),
            number(arm.get("warm_up_s") or None, "s"),
        ]

    heads = ["TTFT median", "against none", "TTFT mean", "p99", "prompt tokens computed"]
    heads += ["same first token", "same answer", "first differing token", "first token's KL"]
    return by_arm(found, [*heads, "as with the given order", "warm-up"], cells)


def shown_toy(found: Found) -> list[list[str]]:
    """The table of the toy's arms, whose right answers are known, by the kind of question."""
    kinds = list(found["arms"][FULL]["by_kind"])

    def cells(_: str, arm: Any) -> list[str]:
        told, full = arm["by_kind"], arm["as_full_prefill"]
        return [
            *(f"{told[kind]['right'] / told[kind]['asked']:.2f}" for kind in kinds),
            _agreed(full, "same_first_token"),
            _kl(full),
            f"{arm['computed_tokens'] / arm['prompt_tokens']:.0%}",
            number(arm["ttft_mean_s"], "s"),
            number(arm["warm_up_s"] or None, "s"),
        ]

    heads = [*kinds, "as full prefill", "first token's KL", "prompt tokens computed"]
    return by_arm(found, [*heads, "TTFT mean", "warm-up"], cells)


def _kl(found: Found | None) -> str:
    told = None if found is None else found.get("first_token_kl")
    return "-" if told is None else f"{told:.2g}"


def _agreed(found: Found | None, what: str) -> str:
    return "-" if found is None else f"{found[what]} of {found['compared']}"
