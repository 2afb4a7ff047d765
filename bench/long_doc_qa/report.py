"""The results of Long Doc QA's query rounds: a summary of each arm, the table, and the files'
content."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench import figure
from kvtier.bench.long_doc_qa.arms import ARMS, COLD, GPU_HIT, NONE
from kvtier.bench.report import (
    Found,
    Row,
    by_arm,
    hit_cell,
    mean_row,
    number,
    percentile,
    write_results,
)
from kvtier.bench.requests.client import Outcome, answers, differing

NAME = "long_doc_qa"
TIERS = ("gpu", "ram", "nvme", "redis")
_TIER_COLOURS = {
    "gpu": figure.SKY,
    "ram": figure.GREEN,
    "nvme": figure.ORANGE,
    "redis": figure.PURPLE,
    "unknown": figure.BLUE,
}
_COMPUTED, _NOT_TOLD = figure.GREY, "#d9d2c5"
_LEGEND = {
    **{colour: tier for tier, colour in _TIER_COLOURS.items()},
    figure.SKY: "vLLM's own cache",
    figure.BLUE: "a connector's cache",
    _COMPUTED: "computed",
    _NOT_TOLD: "not told",
}
_SECOND_ENGINE_LIMIT = 1.15
"""TTFT of documents that another engine computed, as a multiple of this engine's own."""


@dataclass(frozen=True, slots=True)
class Round:
    """An arm's query round, or the cold round of a server that was not started here. ``hits``:
    tokens by tier, or None where the server does not count them. ``mode``: how its engine ran, or
    None where that did not say it."""

    arm: str
    outcomes: Sequence[Outcome]
    hits: Mapping[str, float] | None
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm in numbers: seconds, tokens, and how many answers differ from those of ``none``.
    ``differing`` is None where they were not compared."""

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
    asked_again: Sequence[float] = ()

    @property
    def ttft_mean(self) -> float:
        return statistics.fmean(self.ttft)

    @property
    def same_tokens_as_none(self) -> bool | None:
        return None if self.differing is None else self.differing == 0

    def as_json(self) -> dict[str, Any]:
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


def summarise(rounds: Sequence[Round]) -> list[Summary]:
    reference = next((answers(arm.outcomes) for arm in rounds if arm.arm == NONE), None)
    return [
        _summary(arm, reference)
        for arm in rounds
        if any(outcome.successful for outcome in arm.outcomes)
    ]


def _summary(arm: Round, reference: Mapping[tuple[int, int], object] | None) -> Summary:
    good = [outcome for outcome in arm.outcomes if outcome.successful]
    other = None
    if reference is not None and arm.arm not in (NONE, COLD):
        other = differing(answers(arm.outcomes), reference)
    hits = arm.hits
    return Summary(
        arm=arm.arm,
        ttft=[outcome.ttft for outcome in good if outcome.ttft is not None],
        latency_mean=statistics.fmean(outcome.latency for outcome in good),
        total=max(outcome.request_end for outcome in arm.outcomes),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        output_tokens=sum(outcome.output_tokens for outcome in good),
        failed=len(arm.outcomes) - len(good),
        hits=None if hits is None else {tier: round(tokens) for tier, tokens in hits.items()},
        differing=other,
        first_asked=[one.ttft for one in good if one.ttft is not None and one.question == 0],
        asked_again=[one.ttft for one in good if one.ttft is not None and one.question > 0],
    )


def base_of(summaries: Sequence[Summary]) -> Summary | None:
    """The arm that others are compared with: vLLM alone, or a running server's cold answers."""
    by_name = {summary.arm: summary for summary in summaries}
    return by_name.get(NONE) or by_name.get(COLD)


def rows_of(summaries: Sequence[Summary]) -> list[Row]:
    """Each arm's TTFT (ratio to the base's; lowest and highest of its requests), total time and
    throughput, and its TTFT as a multiple of vLLM's own GPU hit where both ran."""
    by_name = {summary.arm: summary for summary in summaries}
    base, none, gpu = base_of(summaries), by_name.get(NONE), by_name.get(GPU_HIT)
    rows = []
    for one in summaries:
        ratio = one.ttft_mean / base.ttft_mean if base else None
        rows.append(mean_row(f"{one.arm}: ttft mean", one.ttft, "s", None, ratio))
        ratio = one.total / none.total if none else None
        rows.append(Row(f"{one.arm}: total", one.total, "s", None, ratio))
        rows.append(Row(f"{one.arm}: prompt throughput", one.prompt_tokens / one.total, "tokens/s"))
        rows += _hit_rows(one, gpu)
    return rows


def _hit_rows(one: Summary, gpu: Summary | None) -> list[Row]:
    arm, rows = ARMS.get(one.arm), []
    if arm is not None and arm.gpu_hit_limit is not None and gpu is not None:
        times = one.ttft_mean / gpu.ttft_mean
        name = f"{one.arm}: ttft mean against {GPU_HIT}"
        rows.append(Row(name, times, "x", arm.gpu_hit_limit, times))
    if arm is not None and arm.second_engine and one.asked_again:
        times = statistics.fmean(one.first_asked) / statistics.fmean(one.asked_again)
        name = f"{one.arm}: ttft of what another engine computed, against asked again"
        rows.append(Row(name, times, "x", _SECOND_ENGINE_LIMIT))
    return rows


def write(folder: Path, rounds: Sequence[Round], **more: Any) -> Found:
    summaries = summarise(rounds)
    arms = {summary.arm: summary.as_json() for summary in summaries}
    return write_results(folder / f"{NAME}.json", NAME, rows_of(summaries), **more, arms=arms)


def arm_line(one: Summary, summaries: Sequence[Summary]) -> str:
    base = base_of(summaries)
    against = ""
    if base is not None and base is not one:
        against = f", {base.ttft_mean / one.ttft_mean:.1f}x faster than {base.arm}"
    return f"  {one.arm}: first token after {one.ttft_mean:.2f} s{against}; hits: {_hits_text(one)}"


def shown(found: Found) -> list[list[str]]:
    """The table of the arms."""
    base = NONE if NONE in found["arms"] else COLD
    against = found["arms"].get(base, {}).get("ttft_mean_s")

    def cells(_: str, arm: Any) -> list[str]:
        same = {True: "yes", False: "no", None: "-"}[arm["same_tokens_as_none"]]
        first, last = number(arm["ttft_mean_s"], "s"), number(arm["ttft_p99_s"], "s")
        times = "-" if against is None else f"{against / arm['ttft_mean_s']:.1f} x"
        return [first, last, times, hit_cell(arm), same]

    heads = ["TTFT mean", "p99", f"against {base}", "hit tokens", "tokens as without"]
    return by_arm(found, heads, cells)


def _hits_text(one: Summary) -> str:
    if one.hits is None:
        return "not told"
    shares = [
        f"{tier} {one.hits[tier] / max(1, one.prompt_tokens):.0%}"
        for tier in _TIER_COLOURS
        if one.hits.get(tier)
    ]
    return ", ".join(shares) or "none"


def _whose_hits(summaries: Sequence[Summary]) -> str:
    hits = Counter[str]()
    for one in summaries:
        hits.update(one.hits or {})
    own, below = hits["gpu"], hits.total() - hits["gpu"]
    if not own + below:
        return ""
    if not below:
        return (
            " All hits came from vLLM's own prefix cache, none from kvtier: restart the engine, or "
            "ask for more documents than its memory holds."
        )
    return f" Of the hit tokens {own / (own + below):.0%} came from vLLM's own prefix cache."


def verdict(summaries: Sequence[Summary]) -> tuple[bool, str]:
    compared = [summary for summary in summaries if summary.differing is not None]
    cold = next((summary for summary in summaries if summary.arm == COLD), None)
    wrong = [f"{summary.arm} ({summary.differing})" for summary in compared if summary.differing]
    if cold is not None and any((cold.hits or {}).values()):
        text = "The cold round had hits: the server knew documents already."
        return True, f"{text} Another --shuffle-seed gives new ones."
    if not compared:
        text = "Answers were not compared."
        text = f"{text} That needs servers started here, the arm none and another arm."
        return True, f"{text}{_whose_hits(summaries) if cold is not None else ''}"
    if wrong:
        return False, f"Answers DIFFER from those of none, by requests: {', '.join(wrong)}."
    names = ", ".join(summary.arm for summary in compared)
    return True, f"All arms gave the same greedy tokens as none: {names}."


def draw(folder: Path, summaries: Sequence[Summary], subtitle: str) -> Path:
    """The picture. A colour means one thing: where KV comes from. The third panel shows the shares,
    and the bars of the other two have the colour of the greatest one."""
    text = (
        "query round"
        if COLD not in [one.arm for one in summaries]
        else ("first answers and repeated ones")
    )
    base, shares = base_of(summaries), [_shares(one) for one in summaries]
    # of equal shares, that of the lower tier
    main = [max(reversed(list(each)), key=each.__getitem__) for each in shares]
    first, whole = [], []
    for one, colour in zip(summaries, main, strict=True):
        times = ""
        if base and one is not base:
            times = f"  ({base.ttft_mean / one.ttft_mean:.1f}x faster)"
        label = f"{one.ttft_mean:.2f} s{times}"
        first.append(figure.Bar({colour: one.ttft_mean}, label, one.ttft))
        whole.append(figure.Bar({colour: one.latency_mean}, f"{one.latency_mean:.2f} s"))
    about = "Time to first token (less is better; bar: mean)"
    sources = [figure.Bar(each) for each in shares]
    panels = [
        figure.Panel(about, "seconds", first),
        figure.Panel("Whole answer (less is better; mean)", "seconds", whole),
        figure.Panel("Source of the prompts' KV", "% of prompt tokens", sources, 100),
    ]
    used = {colour for each in shares for colour in each}
    legend = {colour: name for colour, name in _LEGEND.items() if colour in used}
    heads, arms = (f"Long Doc QA: {text}", subtitle), [one.arm for one in summaries]
    return figure.bars(folder / f"{NAME}.png", heads, arms, panels, legend)


def _shares(one: Summary) -> dict[str, float]:
    """Percent of the prompts' tokens by colour, in the order of the tiers. What was computed comes
    last."""
    if one.hits is None:
        return {_NOT_TOLD: 100.0}
    told = {
        colour: 100 * one.hits.get(tier, 0) / max(1, one.prompt_tokens)
        for tier, colour in _TIER_COLOURS.items()
    }
    shares = {colour: share for colour, share in told.items() if share}
    return shares | {_COMPUTED: max(0.0, 100 - sum(shares.values()))}
