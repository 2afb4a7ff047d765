"""What Long Doc QA's query rounds amount to: a summary per arm, the table, and
DIR/long_doc_qa.{json,csv,png}."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench.long_doc_qa.arms import ARMS, COLD, GPU_HIT, NONE
from kvtier.bench.long_doc_qa.client import Outcome
from kvtier.bench.report import Row, write_results
from kvtier.core.terminal import table

NAME = "long_doc_qa"
TIERS = ("gpu", "ram", "nvme", "redis")
_SHOWN_TIERS = (*TIERS, "unknown")


@dataclass(frozen=True, slots=True)
class Round:
    """An arm's query round, or a running server's cold one. ``hits``: tokens by tier, None where
    the server does not count them."""

    arm: str
    outcomes: Sequence[Outcome]
    hits: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm in numbers: seconds, tokens, and how many answers differ from those of ``none``
    (None: not compared)."""

    arm: str
    ttft: Sequence[float]
    latency_mean: float
    total: float
    prompt_tokens: int
    output_tokens: int
    failed: int
    hits: Mapping[str, int] | None
    differing: int | None
    first_asked: Sequence[float] = ()
    """TTFT of each document's first question."""
    asked_again: Sequence[float] = ()
    """And of its others."""

    @property
    def ttft_mean(self) -> float:
        return statistics.fmean(self.ttft)

    @property
    def same_tokens_as_none(self) -> bool | None:
        return None if self.differing is None else self.differing == 0

    def as_json(self) -> dict[str, Any]:
        """The arm's entry in the results form."""
        hits = (
            dict.fromkeys(TIERS)
            if self.hits is None
            else {tier: self.hits.get(tier, 0) for tier in TIERS}
        )
        unknown = (self.hits or {}).get("unknown", 0)
        return {
            "ttft_mean_s": self.ttft_mean,
            "ttft_p50_s": percentile(self.ttft, 50),
            "ttft_p99_s": percentile(self.ttft, 99),
            "latency_mean_s": self.latency_mean,
            "total_s": self.total,
            "hit_tokens": hits | ({"unknown": unknown} if unknown else {}),
            "prompt_tokens": self.prompt_tokens,
            "same_tokens_as_none": self.same_tokens_as_none,
            "output_tokens": self.output_tokens,
            "requests": len(self.ttft) + self.failed,
            "failed_requests": self.failed,
            "differing_requests": self.differing,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. ``values`` in any order, at least
    one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(rounds: Sequence[Round]) -> list[Summary]:
    """A summary per arm, in order. An arm of which every request failed has none."""
    reference = next((answers(arm.outcomes) for arm in rounds if arm.arm == NONE), None)
    return [
        _summary(arm, reference)
        for arm in rounds
        if any(outcome.successful for outcome in arm.outcomes)
    ]


def answers(outcomes: Sequence[Outcome]) -> dict[tuple[int, int], tuple[int, ...] | str]:
    """(document, question) -> answer, of the requests that succeeded."""
    return {(one.document, one.question): one.answer for one in outcomes if one.successful}


def _summary(arm: Round, reference: Mapping[tuple[int, int], object] | None) -> Summary:
    good = [outcome for outcome in arm.outcomes if outcome.successful]
    differing = None
    if reference is not None and arm.arm != NONE:
        own = answers(arm.outcomes)
        differing = sum(own[pair] != reference[pair] for pair in own.keys() & reference.keys())
        differing += len(own.keys() ^ reference.keys())
    return Summary(
        arm=arm.arm,
        ttft=[outcome.ttft for outcome in good if outcome.ttft is not None],
        latency_mean=statistics.fmean(outcome.latency for outcome in good),
        total=max(outcome.request_end for outcome in arm.outcomes),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        output_tokens=sum(outcome.output_tokens for outcome in good),
        failed=len(arm.outcomes) - len(good),
        hits=None
        if arm.hits is None
        else {tier: round(tokens) for tier, tokens in arm.hits.items()},
        differing=differing,
        first_asked=[one.ttft for one in good if one.ttft is not None and one.question == 0],
        asked_again=[one.ttft for one in good if one.ttft is not None and one.question > 0],
    )


def write_json(
    folder: Path, summaries: Sequence[Summary], rounds: Sequence[Round], **more: Any
) -> Path:
    """Write the results form; ``requests`` holds the query round's requests of every arm."""
    path = folder / f"{NAME}.json"
    requests = {arm.arm: [_request(outcome) for outcome in arm.outcomes] for arm in rounds}
    arms = {summary.arm: summary.as_json() for summary in summaries}
    write_results(path, NAME, rows_of(summaries), **more, arms=arms, requests=requests)
    return path


def base_of(summaries: Sequence[Summary]) -> Summary | None:
    """What the others are held against: vLLM alone, or a running server's cold answers."""
    return next((summary for summary in summaries if summary.arm in (NONE, COLD)), None)


def rows_of(summaries: Sequence[Summary]) -> list[Row]:
    """Per arm TTFT (ratio to the base's; min and max over requests), total time and throughput; and
    TTFT as a multiple of vLLM's own GPU hit where both ran."""
    by_name = {summary.arm: summary for summary in summaries}
    base, none, gpu = base_of(summaries), by_name.get(NONE), by_name.get(GPU_HIT)
    rows = []
    for one in summaries:
        ratio = one.ttft_mean / base.ttft_mean if base else None
        rows.append(
            Row(
                f"{one.arm}: ttft mean",
                one.ttft_mean,
                "s",
                None,
                ratio,
                min(one.ttft),
                max(one.ttft),
            )
        )
        rows.append(
            Row(f"{one.arm}: total", one.total, "s", None, one.total / none.total if none else None)
        )
        rows.append(Row(f"{one.arm}: prompt throughput", one.prompt_tokens / one.total, "tokens/s"))
        limit = ARMS[one.arm].gpu_hit_limit if one.arm in ARMS else None
        if gpu is not None and limit is not None:
            times = one.ttft_mean / gpu.ttft_mean
            rows.append(Row(f"{one.arm}: ttft mean against {GPU_HIT}", times, "x", limit, times))
        if one.arm in ARMS and ARMS[one.arm].second_engine and one.asked_again:
            times = statistics.fmean(one.first_asked) / statistics.fmean(one.asked_again)
            rows.append(
                Row(
                    f"{one.arm}: ttft of what another engine computed, against asked again",
                    times,
                    "x",
                    1.15,
                )
            )
    return rows


def _request(outcome: Outcome) -> dict[str, Any]:
    return {
        "document": outcome.document,
        "question": outcome.question,
        "request_start": outcome.request_start,
        "ttft": outcome.ttft,
        "request_end": outcome.request_end,
        "successful": outcome.successful,
        "is_miss": outcome.is_miss,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "cached_tokens": outcome.cached_tokens,
    }


def write_csv(folder: Path, rounds: Sequence[Round]) -> Path:
    """One line a request of every arm's query round."""
    path = folder / f"{NAME}.csv"
    lines = [{"arm": arm.arm} | _request(outcome) for arm in rounds for outcome in arm.outcomes]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def print_table(summaries: Sequence[Summary]) -> None:
    """The shell's table, a row an arm."""
    base = base_of(summaries)
    against = base.arm if base else NONE
    heads = [
        "arm",
        "TTFT mean",
        "p50",
        "p99",
        "latency",
        "total",
        "prompt tok/s",
        "hit tokens",
        f"TTFT vs {against}",
    ]
    numbers = range(1, len(heads))
    rows = [[one.arm, *_cells(one, base)] for one in summaries]
    if any(one.differing is not None for one in summaries) or any(one.failed for one in summaries):
        heads.append("answers")
        rows = [[*row, _answers(one)] for row, one in zip(rows, summaries, strict=True)]
    print("Long Doc QA" if against == COLD else "Long Doc QA, query round")
    print("\n".join(table(heads, rows, numbers=numbers)))


def _cells(one: Summary, base: Summary | None) -> list[str]:
    return [
        *(
            f"{value:.3f} s"
            for value in (one.ttft_mean, percentile(one.ttft, 50), percentile(one.ttft, 99))
        ),
        f"{one.latency_mean:.3f} s",
        f"{one.total:.1f} s",
        f"{one.prompt_tokens / one.total:,.0f}",
        _hits_text(one),
        f"{base.ttft_mean / one.ttft_mean:.1f}x faster" if base and one is not base else "",
    ]


def _answers(one: Summary) -> str:
    if one.failed:
        return f"{one.failed} failed"
    return {None: "", True: "same"}.get(one.same_tokens_as_none, f"{one.differing} differ")


def _hits_text(one: Summary) -> str:
    if one.hits is None:
        return "not told"
    shares = [
        f"{tier} {one.hits[tier] / max(1, one.prompt_tokens):.0%}"
        for tier in _SHOWN_TIERS
        if one.hits.get(tier)
    ]
    return ", ".join(shares) or "none"


def verdict(summaries: Sequence[Summary]) -> tuple[bool, str]:
    """Whether all arms answered as ``none`` did, in words."""
    compared = [summary for summary in summaries if summary.differing is not None]
    cold = next((summary for summary in summaries if summary.arm == COLD), None)
    if cold is not None and any((cold.hits or {}).values()):
        return (
            True,
            (
                "The cold round had hits: documents were here before. Another --shuffle-seed gives "
                "new ones."
            ),
        )
    if not compared:
        return (
            True,
            (
                "Answers were not compared: that needs servers started here, the arm none and "
                "another one."
            ),
        )
    wrong = [f"{summary.arm} ({summary.differing})" for summary in compared if summary.differing]
    if wrong:
        return False, f"Answers DIFFER from those of none, by requests: {', '.join(wrong)}."
    return (
        True,
        (
            "All arms gave the same greedy tokens as none: "
            f"{', '.join(summary.arm for summary in compared)}."
        ),
    )
