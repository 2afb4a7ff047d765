"""What the comparison amounts to: medians over rounds, rows in the one results form, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.bench.compare import limits
from kvtier.bench.compare.contenders import Contender
from kvtier.bench.compare.measures import Memory, Restart, Run, cached_part, load_speed, throughput
from kvtier.bench.long_doc_qa_arms import GPU_HIT, NONE
from kvtier.bench.long_doc_qa_report import answers
from kvtier.bench.report import Row, spread, write_results

NAME = "compare"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Standing:
    """One arm over all rounds; seconds. ``load_costs``: of each pair, what a hit costs more than one in vLLM's own
    cache; ``load_cost``: their median.

    ``fill``: prompt tokens a second when nothing can be reused. ``cpu_gib``: CPU seconds for each GiB of hits, beyond
    those of the same answers from vLLM's own cache.
    ``mixed``: prompt tokens a second when half of the documents are new; ``mixed_cached``: the part of them served.
    ``memory``: bytes of RAM beyond those of the engine alone; ``beyond_budget``: and beyond what the arm was given.
    ``load_speed``: GB/s, were loading the bytes all of the load cost. ``restart``: the last one.
    ``times_ours``: this load cost as a multiple of that of the kvtier arm it is held against; above 1: ours is less.
    ``cached``: part of the prompt tokens that was served from a cache. ``differing``: answers unlike those of ``none``.
    """

    arm: str
    ttft: Sequence[float]
    throughput: float
    load_costs: Sequence[float]
    cached: float
    differing: int | None
    failed: int
    fill: float | None = None
    cpu_gib: float | None = None
    times_ours: float | None = None
    mixed: float | None = None
    mixed_cached: float | None = None
    memory: int | None = None
    beyond_budget: int | None = None
    load_speed: float | None = None
    restart: Restart | None = None

    @property
    def load_cost(self) -> float | None:
        return statistics.median(self.load_costs) if self.load_costs else None

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
    reference = _reference(by_arm[NONE], runs) if NONE in by_arm else None
    found = {name: _standing(name, own, reference) for name, own in by_arm.items()}
    found = {name: replace(one, load_speed=_load_speed(one, by_arm[name], token_bytes)) for name, one in found.items()}
    found = {name: _with_memory(one, by_arm[name], by_arm.get(NONE, ())) for name, one in found.items()}
    found = {name: replace(one, cpu_gib=_cpu_gib(by_arm[name], warm or [], token_bytes)) for name, one in found.items()}
    return {name: _beside_ours(one, found, arms) for name, one in found.items()}


def _reference(bare: Sequence[Run], runs: Sequence[Run]) -> dict[tuple[int, int], tuple[int, ...] | str]:
    """What ``none`` answered first to each question; to those that it is not asked, after a restart, what another arm
    answered when nothing was cached."""
    found: dict[tuple[int, int], tuple[int, ...] | str] = {}
    for run in bare:
        found = answers(run.answered) | found
    for run in runs:
        found = answers([one for one in run.answered if one.cached_tokens == 0]) | found
    return found


def _load_speed(one: Standing, runs: Sequence[Run], token_bytes: int) -> float | None:
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    return None if one.arm == NONE else load_speed(outcomes, one.load_cost, token_bytes)


def _with_memory(one: Standing, runs: Sequence[Run], bare: Sequence[Run]) -> Standing:
    own, alone = (_median_memory(each) for each in (runs, bare))
    if own is None or alone is None or not own.budget:
        return one
    return replace(one, memory=own.beyond(alone), beyond_budget=own.beyond_budget(alone))


def _median_memory(runs: Sequence[Run]) -> Memory | None:
    seen = [run.memory for run in runs if run.memory is not None]
    if not seen:
        return None
    parts = ([one.touched for one in seen], [one.untouched for one in seen], [one.budget for one in seen])
    return Memory(*(round(statistics.median(part)) for part in parts))


def _cpu_gib(runs: Sequence[Run], warm: Sequence[Run], token_bytes: int) -> float | None:
    own, bare = [[run.cpu_s for run in each if run.cpu_s is not None] for each in (runs, warm)]
    gib = sum(one.cached_tokens or 0 for one in runs[0].outcomes) * token_bytes / 2**30
    return (statistics.median(own) - statistics.median(bare)) / gib if own and bare and gib else None


def _standing(name: str, runs: Sequence[Run], reference: Mapping[tuple[int, int], object] | None) -> Standing:
    outcomes = [one for run in runs for one in run.outcomes]
    ttft = [value for run in runs for value in run.ttft]
    mixed = [run.mixed for run in runs if run.mixed]
    differing = None
    if reference is not None and name != NONE:
        differing = sum(own != reference.get(pair, own) for run in runs for pair, own in _answers(run))
    return Standing(
        arm=name,
        ttft=ttft,
        throughput=statistics.median(run.throughput for run in runs),
        load_costs=[cost for run in runs for cost in run.load_costs],
        cached=cached_part(outcomes),
        differing=differing,
        failed=sum(not one.successful for run in runs for one in run.answered),
        fill=statistics.median(fills) if (fills := [run.fill for run in runs if run.fill is not None]) else None,
        mixed=statistics.median(map(throughput, mixed)) if mixed else None,
        mixed_cached=cached_part([one for each in mixed for one in each]) if mixed else None,
        restart=next((run.restart for run in reversed(runs) if run.restart), None),
    )


def _answers(run: Run) -> Iterator[tuple[tuple[int, int], object]]:
    """Of all rounds; a question that is asked again after the restart is there twice."""
    for outcomes in (run.outcomes, run.mixed, run.restart.outcomes if run.restart else ()):
        yield from answers(outcomes).items()


def _beside_ours(one: Standing, found: Mapping[str, Standing], arms: Sequence[Contender]) -> Standing:
    like = next(arm.like for arm in arms if arm.name == one.arm)
    ours = found.get(like) if like is not None else None
    if ours is None or not ours.load_cost or one.load_cost is None or ours.load_cost <= 0:
        return one
    return replace(one, times_ours=one.load_cost / ours.load_cost)


def rows(
    arms: Sequence[Contender],
    runs: Sequence[Run],
    token_bytes: int = 0,
    found_limits: Sequence[Mapping[str, float]] = (),
) -> list[Row]:
    """Every arm, in order, and the machine's limits; None for what did not run. Load costs are held against kvtier's
    (``limit``), throughputs against vLLM's without any cache below its own, load speeds against the machine's."""
    found, bounds = standings(arms, runs, token_bytes), limits.medians(found_limits)
    made = []
    for arm in arms:
        one = found.get(arm.name)
        if one is None:
            made += [Row(f"{arm.name}: ttft mean", None, "s"), Row(f"{arm.name}: load cost", None, "s")]
            continue
        made += _time_rows(arm, one, found)
        made += _throughput_rows(one, found.get(NONE))
        made += _resource_rows(arm, one, bounds)
        made += _restart_rows(one)
    return made + limits.rows(found_limits)


def _time_rows(arm: Contender, one: Standing, found: Mapping[str, Standing]) -> list[Row]:
    warm, (_, least, most) = found.get(GPU_HIT), spread(one.ttft)
    bound = warm.ttft_mean if warm else None
    ours = found[arm.like].load_cost if arm.like is not None and arm.like in found else None
    span = spread(one.load_costs)[1:] if one.load_costs else (None, None)
    return [
        Row(f"{one.arm}: ttft mean", one.ttft_mean, "s", bound, _part(one.ttft_mean, bound), least, most),
        Row(f"{one.arm}: ttft p50", one.ttft_p50, "s", None, None, least, most),
        Row(f"{one.arm}: load cost", one.load_cost, "s", ours, one.times_ours, *span),
    ]


def _throughput_rows(one: Standing, bare: Standing | None) -> list[Row]:
    made = [Row(f"{one.arm}: prompt throughput", one.throughput, "tokens/s")]
    if one.fill is not None:
        bound = bare.fill if bare else None
        made.append(Row(f"{one.arm}: throughput, nothing reused", one.fill, "tokens/s", bound, _part(one.fill, bound)))
    if one.mixed is not None:
        bound = bare.mixed if bare else None
        made.append(Row(f"{one.arm}: throughput, half reused", one.mixed, "tokens/s", bound, _part(one.mixed, bound)))
    return made


def _resource_rows(arm: Contender, one: Standing, bounds: Mapping[str, float]) -> list[Row]:
    made = []
    if arm.limit:
        bound = bounds.get(arm.limit)
        part = None if one.load_speed is None else _part(one.load_speed, bound)
        made.append(Row(f"{one.arm}: load", one.load_speed, "GB/s", bound, part))
    if one.cpu_gib is not None and one.arm not in (NONE, GPU_HIT):
        made.append(Row(f"{one.arm}: CPU a GiB of hits", one.cpu_gib, "s"))
    if one.memory is not None and one.beyond_budget is not None:
        made.append(Row(f"{one.arm}: memory beyond the engine's", one.memory / _MIB, "MiB"))
        made.append(Row(f"{one.arm}: memory beyond budget", one.beyond_budget / _MIB, "MiB"))
    return made


def _restart_rows(one: Standing) -> list[Row]:
    """After the restart; times are held against the arm's own before it."""
    again = one.restart
    if again is None:
        return []
    name, before = f"{one.arm}: after a restart", one.ttft_mean
    if again.mean is None:
        return [Row(f"{name}, ttft mean", None, "s")]
    return [
        Row(f"{one.arm}: restart until ready", again.ready_s, "s"),
        Row(f"{name}, ttft first", again.first, "s", before, None if again.first is None else again.first / before),
        Row(f"{name}, ttft mean", again.mean, "s", before, again.mean / before),
        Row(f"{name}, cached", 100 * again.cached, "%", 100 * one.cached),
    ]


def write(
    path: Path,
    arms: Sequence[Contender],
    runs: Sequence[Run],
    reasons: Mapping[str, str],
    found_limits: Sequence[Mapping[str, float]] = (),
    **more: Any,
) -> None:
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
            **(_facts(arm, found[arm.name]) if arm.name in found else {}),
        }
        for arm in arms
    }
    made = rows(arms, runs, token_bytes, found_limits)
    write_results(path, NAME, made, **more, limits=limits.HOW, arms=about)


def _facts(arm: Contender, one: Standing) -> dict[str, Any]:
    return {
        "ttft_s": [round(value, 4) for value in one.ttft],
        "cached_part": round(one.cached, 3),
        "half_reused_cached_part": None if one.mixed_cached is None else round(one.mixed_cached, 3),
        "after_a_restart": _restart_told(arm, one.restart),
        "answers_unlike_none": one.differing,
        "failed_requests": one.failed,
    }


def _restart_told(arm: Contender, again: Restart | None) -> str:
    """One phrase: warm, cold, or why there is nothing to say."""
    if not arm.outlives:
        return "not tried: what it caches is memory of the engine, and ends with it"
    if again is None:
        return "not measured"
    if again.mean is None:
        return f"failed: {again.error or again.outcomes[0].error}"
    return f"cached {again.cached:.0%}"


def print_table(
    arms: Sequence[Contender],
    runs: Sequence[Run],
    reasons: Mapping[str, str],
    token_bytes: int = 0,
    found_limits: Sequence[Mapping[str, float]] = (),
) -> None:
    from rich.console import Console
    from rich.table import Table

    found, bounds = standings(arms, runs, token_bytes), limits.medians(found_limits)
    table = Table(title="The same long documents again: time to first token", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note")
    for arm in arms:
        table.add_row(arm.name, *_cells(arm, found.get(arm.name), bounds), reasons.get(arm.name) or arm.note)
    console = Console(width=max(220, Console().width))
    console.print(table)
    if bounds:
        console.print(
            "Limits of this machine: " + ", ".join(f"{name} {value:.1f} GB/s" for name, value in bounds.items())
        )


_COLUMNS = (
    "TTFT mean",
    "p50",
    "load cost",
    "times kvtier's",
    "load GB/s (of limit)",
    "tok/s, no reuse",
    "half reused",
    "restarted: TTFT first, mean",
    "beyond budget",
    "cached",
    "unlike none",
)


def _cells(arm: Contender, one: Standing | None, bounds: Mapping[str, float]) -> list[str]:
    if one is None:
        return ["-"] * len(_COLUMNS)
    part = "" if one.load_speed is None or arm.limit not in bounds else f" ({one.load_speed / bounds[arm.limit]:.0%})"
    return [
        f"{one.ttft_mean:.3f} s",
        f"{one.ttft_p50:.3f} s",
        "" if one.load_cost is None else f"{one.load_cost * 1000:.0f} ms",
        "" if one.times_ours is None else f"{one.times_ours:.2f} x",
        "" if one.load_speed is None else f"{one.load_speed:.1f}{part}",
        "" if one.fill is None else f"{one.fill:,.0f}",
        "" if one.mixed is None else f"{one.mixed:,.0f}",
        _restart_cell(one.restart),
        "" if one.beyond_budget is None else f"{one.beyond_budget / _MIB:,.0f} MiB",
        f"{one.cached:.0%}",
        "" if one.differing is None else str(one.differing),
    ]


def _restart_cell(again: Restart | None) -> str:
    if again is None:
        return ""
    if again.mean is None or again.first is None:
        return "failed"
    return f"{again.first:.3f} s, {again.mean:.3f} s, {again.cached:.0%} cached"


def _part(value: float, of: float | None) -> float | None:
    return value / of if of else None
