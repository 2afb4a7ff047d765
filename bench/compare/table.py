"""What the comparison amounts to: medians over rounds, rows in the one results form, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.bench.compare.contenders import Contender
from kvtier.bench.long_doc_qa_arms import GPU_HIT, NONE
from kvtier.bench.long_doc_qa_client import Outcome
from kvtier.bench.long_doc_qa_report import answers
from kvtier.bench.report import Row, spread, write_results

NAME = "compare"


@dataclass(frozen=True, slots=True)
class Run:
    """The query round of one arm in one round of the comparison.

    ``fill``: prompt tokens a second of the round before, in which nothing could be reused. ``cpu_s``: CPU seconds of
    the whole machine during the query round. None: not measured.
    """

    arm: str
    outcomes: Sequence[Outcome]
    fill: float | None = None
    cpu_s: float | None = None

    @property
    def ttft(self) -> list[float]:
        return [one.ttft for one in self.outcomes if one.ttft is not None]

    @property
    def throughput(self) -> float:
        """Prompt tokens a second."""
        return throughput(self.outcomes)


def throughput(outcomes: Sequence[Outcome]) -> float:
    """Prompt tokens a second of one round."""
    return sum(one.prompt_tokens for one in outcomes) / max(one.request_end for one in outcomes)


@dataclass(frozen=True, slots=True)
class Standing:
    """One arm over all rounds; seconds. ``load_cost``: what a hit costs more than one in vLLM's own cache.

    ``fill``: prompt tokens a second when nothing can be reused. ``cpu_gib``: CPU seconds for each GiB of hits, beyond
    those of the same answers from vLLM's own cache.
    ``times_ours``: this load cost as a multiple of that of the kvtier arm it is held against; above 1: ours is less.
    ``cached``: part of the prompt tokens that was served from a cache. ``differing``: answers unlike those of ``none``.
    """

    arm: str
    ttft: Sequence[float]
    throughput: float
    load_cost: float | None
    cached: float
    differing: int | None
    failed: int
    fill: float | None = None
    cpu_gib: float | None = None
    times_ours: float | None = None

    @property
    def ttft_mean(self) -> float:
        return statistics.fmean(self.ttft)

    @property
    def ttft_p50(self) -> float:
        return statistics.median(self.ttft)


def standings(arms: Sequence[Contender], runs: Sequence[Run], token_bytes: int = 0) -> dict[str, Standing]:
    """By arm, of those that ran and had an answer. ``token_bytes`` of KV; 0: CPU time is not told."""
    by_arm = {one.name: [run for run in runs if run.arm == one.name and run.ttft] for one in arms}
    by_arm = {name: found for name, found in by_arm.items() if found}
    warm = by_arm.get(GPU_HIT)
    bound = statistics.fmean(value for run in warm for value in run.ttft) if warm else None
    reference = answers(by_arm[NONE][0].outcomes) if NONE in by_arm else None
    found = {name: _standing(name, own, bound, reference) for name, own in by_arm.items()}
    found = {name: replace(one, cpu_gib=_cpu_gib(by_arm[name], warm or [], token_bytes)) for name, one in found.items()}
    return {name: _beside_ours(one, found, arms) for name, one in found.items()}


def _cpu_gib(runs: Sequence[Run], warm: Sequence[Run], token_bytes: int) -> float | None:
    own, bare = [[run.cpu_s for run in each if run.cpu_s is not None] for each in (runs, warm)]
    gib = sum(one.cached_tokens or 0 for one in runs[0].outcomes) * token_bytes / 2**30
    return (statistics.median(own) - statistics.median(bare)) / gib if own and bare and gib else None


def _standing(
    name: str, runs: Sequence[Run], bound: float | None, reference: Mapping[tuple[int, int], object] | None
) -> Standing:
    outcomes = [one for run in runs for one in run.outcomes]
    ttft = [value for run in runs for value in run.ttft]
    prompt = sum(one.prompt_tokens for one in outcomes)
    differing = None
    if reference is not None and name != NONE:
        differing = sum(own != reference.get(pair, own) for run in runs for pair, own in answers(run.outcomes).items())
    return Standing(
        arm=name,
        ttft=ttft,
        throughput=statistics.median(run.throughput for run in runs),
        load_cost=None if bound is None or name == GPU_HIT else statistics.fmean(ttft) - bound,
        cached=sum(one.cached_tokens or 0 for one in outcomes) / max(1, prompt),
        differing=differing,
        failed=sum(not one.successful for one in outcomes),
        fill=statistics.median(fills) if (fills := [run.fill for run in runs if run.fill is not None]) else None,
    )


def _beside_ours(one: Standing, found: Mapping[str, Standing], arms: Sequence[Contender]) -> Standing:
    like = next(arm.like for arm in arms if arm.name == one.arm)
    ours = found.get(like) if like is not None else None
    if ours is None or not ours.load_cost or one.load_cost is None or ours.load_cost <= 0:
        return one
    return replace(one, times_ours=one.load_cost / ours.load_cost)


def rows(arms: Sequence[Contender], runs: Sequence[Run], token_bytes: int = 0) -> list[Row]:
    """Every arm, in order; None for what did not run. Load costs are held against kvtier's (``limit``), throughputs
    against vLLM's without any cache below its own."""
    found = standings(arms, runs, token_bytes)
    bare = found[NONE].fill if NONE in found else None
    warm, made = found.get(GPU_HIT), []
    for arm in arms:
        one = found.get(arm.name)
        if one is None:
            made += [Row(f"{arm.name}: ttft mean", None, "s"), Row(f"{arm.name}: load cost", None, "s")]
            continue
        _, least, most = spread(one.ttft)
        bound = warm.ttft_mean if warm else None
        made.append(Row(f"{arm.name}: ttft mean", one.ttft_mean, "s", bound, _part(one.ttft_mean, bound), least, most))
        made.append(Row(f"{arm.name}: ttft p50", one.ttft_p50, "s", None, None, least, most))
        made.append(Row(f"{arm.name}: prompt throughput", one.throughput, "tokens/s"))
        ours = found[arm.like].load_cost if arm.like in found else None
        span = (None, None) if bound is None or one.load_cost is None else (least - bound, most - bound)
        made.append(Row(f"{arm.name}: load cost", one.load_cost, "s", ours, one.times_ours, *span))
        if one.fill is not None:
            made.append(
                Row(f"{arm.name}: throughput, nothing reused", one.fill, "tokens/s", bare, _part(one.fill, bare))
            )
        if one.cpu_gib is not None and arm.name not in (NONE, GPU_HIT):
            made.append(Row(f"{arm.name}: CPU a GiB of hits", one.cpu_gib, "s"))
    return made


def write(path: Path, arms: Sequence[Contender], runs: Sequence[Run], reasons: Mapping[str, str], **more: Any) -> None:
    """Write the results form. ``more`` has ``workload``, and with it ``kv_token_bytes``."""
    token_bytes = more["workload"].get("kv_token_bytes", 0)
    found = standings(arms, runs)
    about = {
        arm.name: {
            "about": arm.about,
            "held_against": arm.like,
            "note": arm.note,
            "cannot_run": reasons.get(arm.name),
            "runs": sum(run.arm == arm.name for run in runs),
            **(_facts(found[arm.name]) if arm.name in found else {}),
        }
        for arm in arms
    }
    write_results(path, NAME, rows(arms, runs, token_bytes), **more, arms=about)


def _facts(one: Standing) -> dict[str, Any]:
    return {
        "ttft_s": [round(value, 4) for value in one.ttft],
        "cached_part": round(one.cached, 3),
        "answers_unlike_none": one.differing,
        "failed_requests": one.failed,
    }


def print_table(arms: Sequence[Contender], runs: Sequence[Run], reasons: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    found = standings(arms, runs)
    table = Table(title="The same long documents again: time to first token", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for column in ("TTFT mean", "p50", "load cost", "times kvtier's", "tok/s, no reuse", "cached", "unlike none"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note")
    for arm in arms:
        table.add_row(arm.name, *_cells(found.get(arm.name)), reasons.get(arm.name) or arm.note)
    Console(width=max(150, Console().width)).print(table)


def _cells(one: Standing | None) -> list[str]:
    if one is None:
        return ["-"] * 7
    return [
        f"{one.ttft_mean:.3f} s",
        f"{one.ttft_p50:.3f} s",
        "" if one.load_cost is None else f"{one.load_cost * 1000:.0f} ms",
        "" if one.times_ours is None else f"{one.times_ours:.2f} x",
        "" if one.fill is None else f"{one.fill:,.0f}",
        f"{one.cached:.0%}",
        "" if one.differing is None else str(one.differing),
    ]


def _part(value: float, of: float | None) -> float | None:
    return value / of if of else None
