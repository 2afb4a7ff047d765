"""The comparison's rows in the form of bench/report.py, and what is said of every arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.bench.compare import limits
from kvtier.bench.compare.arm_result import ArmResult, arm_results, median, ours
from kvtier.bench.compare.measures import Again, Run
from kvtier.bench.compare.peers.contenders import Contender
from kvtier.bench.long_doc_qa.arms import GPU_HIT, NONE
from kvtier.bench.processes.engine import modes_told
from kvtier.bench.report import Row, spread, write_results

NAME = "compare"
HOW = {
    "load cost": "TTFT of a question whose document is loaded, less that of the next one, whose "
    "document is in vLLM's "
    "own cache; median over pairs, min, max",
    "CPU a GiB of hits": "CPU seconds of the engine's and its companion's processes for the loaded "
    "question of a pair "
    "less those for the warm one, by the GiB that came; median over pairs, min and max bound it in "
    "19 cases of 20",
    "look-up": "a request's first question to the connector until its definite answer, loaded "
    "questions of the pairs; "
    "some arms fetch from the lower place before they answer; cold: documents of the fill, of "
    "which nothing is held",
    "connector": "the engine's own time in the entry points of its connector, both halves; a load: "
    "the loaded question "
    "of a pair less the warm one; work of other threads and processes is not in it",
    "save": "KV bytes of the fill by the engine's time in the connector in it, look-ups and all",
    "second engine": (
        "started beside the first, same companion and folder: new questions, every document once"
    ),
}
"""What a row means where its name does not say it."""
_MIB = 1 << 20


def write(
    path: Path,
    arms: Sequence[Contender],
    runs: Sequence[Run],
    reasons: Mapping[str, str],
    found_limits: Sequence[Mapping[str, float]] = (),
    **more: Any,
) -> None:
    """Write the results form. ``more`` has ``workload``, which has ``kv_token_bytes``."""
    token_bytes = more["workload"].get("kv_token_bytes", 0)
    found = arm_results(arms, runs)
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
    told = {"engines": modes_told(run.mode for run in runs)}
    write_results(path, NAME, made, **more, **told, limits=limits.HOW, measures=HOW, arms=about)


def _facts(arm: Contender, one: ArmResult) -> dict[str, Any]:
    return {
        "ttft_s": [round(value, 4) for value in one.ttft],
        "cached_part": round(one.cached, 3),
        "half_reused_cached_part": None if one.mixed_cached is None else round(one.mixed_cached, 3),
        "connector_ms_a_load": _told(one.calls, 1e3),
        "connector_ms_1000_tokens_filled": _told(one.filling, 1e6),
        "second_engine": _again_told(arm, one.second, arm.alone),
        "after_a_restart": _again_told(arm, one.restart),
        "answers_unlike_none": one.differing,
        "failed_requests": one.failed,
    }


def _told(calls: Mapping[str, float], times: float) -> dict[str, float]:
    """By entry point, whatever takes more than a microsecond."""
    found = {name: round(value * times, 3) for name, value in calls.items()}
    return {name: value for name, value in found.items() if abs(value) > 0.001}


def _again_told(arm: Contender, again: Again | None, why_not: str = "") -> str:
    """One phrase: warm, cold, or why there is no answer."""
    if not arm.outlives:
        return "not tried: what it caches is memory of the engine, and ends with it"
    if why_not:
        return f"not tried: {why_not}"
    if again is None:
        return "not measured"
    if again.mean is None:
        return f"failed: {again.error or again.outcomes[0].error}"
    return f"cached {again.cached:.0%}"


def rows(
    arms: Sequence[Contender],
    runs: Sequence[Run],
    token_bytes: int = 0,
    found_limits: Sequence[Mapping[str, float]] = (),
) -> list[Row]:
    """Every arm, in order, and the machine's limits. A value is None for what did not run. The
    ``limit`` of load costs, CPU time and the engine's time in the connector is kvtier's. That of
    throughputs is vLLM's without any cache below its own, and that of speeds is the machine's."""
    found, bounds = arm_results(arms, runs, token_bytes), limits.medians(found_limits)
    made = []
    for arm in arms:
        one = found.get(arm.name)
        if one is None:
            made += [
                Row(f"{arm.name}: ttft mean", None, "s"),
                Row(f"{arm.name}: load cost", None, "s"),
            ]
            continue
        best = ours(one, found, arms)
        made += _time_rows(one, found.get(GPU_HIT), best)
        made += _throughput_rows(one, found.get(NONE))
        made += _resource_rows(arm, one, best, bounds)
        if arm.connector is not None:
            made += _connector_rows(one, best, bounds)
        made += _again_rows(one, "second engine", one.second)
        made += _again_rows(one, "after a restart", one.restart)
        if one.restart is not None and one.restart.mean is not None:
            made.append(Row(f"{one.arm}: restart until ready", one.restart.ready_s, "s"))
    return made + limits.rows(found_limits)


def _time_rows(one: ArmResult, warm: ArmResult | None, best: ArmResult | None) -> list[Row]:
    _, least, most = spread(one.ttft)
    bound = warm.ttft_mean if warm else None
    return [
        Row(
            f"{one.arm}: ttft mean",
            one.ttft_mean,
            "s",
            bound,
            part(one.ttft_mean, bound),
            least,
            most,
        ),
        Row(f"{one.arm}: ttft p50", one.ttft_p50, "s", None, None, least, most),
        Row(
            f"{one.arm}: load cost",
            one.load_cost,
            "s",
            best.load_cost if best else None,
            one.times_ours,
            *_span(one.load_costs),
        ),
    ]


def _throughput_rows(one: ArmResult, bare: ArmResult | None) -> list[Row]:
    made = [Row(f"{one.arm}: prompt throughput", one.throughput, "tokens/s")]
    if one.fill is not None:
        bound = bare.fill if bare else None
        made.append(
            Row(
                f"{one.arm}: throughput, nothing reused",
                one.fill,
                "tokens/s",
                bound,
                part(one.fill, bound),
            )
        )
    if one.mixed is not None:
        bound = bare.mixed if bare else None
        made.append(
            Row(
                f"{one.arm}: throughput, half reused",
                one.mixed,
                "tokens/s",
                bound,
                part(one.mixed, bound),
            )
        )
    return made


def _resource_rows(
    arm: Contender, one: ArmResult, best: ArmResult | None, bounds: Mapping[str, float]
) -> list[Row]:
    made = []
    if arm.limit:
        bound = bounds.get(arm.limit)
        made.append(
            Row(f"{one.arm}: load", one.load_speed, "GB/s", bound, part(one.load_speed, bound))
        )
    if one.cpu_gib is not None:
        own, held = one.cpu_gib, best.cpu_gib.value if best and best.cpu_gib else None
        name = f"{one.arm}: CPU a GiB of hits"
        made.append(Row(name, own.value, "s", held, part(own.value, held), own.low, own.high))
    if one.memory is not None and one.beyond_budget is not None:
        made.append(Row(f"{one.arm}: memory beyond the engine's", one.memory / _MIB, "MiB"))
        made.append(Row(f"{one.arm}: memory beyond budget", one.beyond_budget / _MIB, "MiB"))
    return made


def _connector_rows(
    one: ArmResult, best: ArmResult | None, bounds: Mapping[str, float]
) -> list[Row]:
    """None where the engine's calls could not be read."""

    def held(name: str, own: Sequence[float], other: Sequence[float] | None) -> Row:
        value, bound = milliseconds(median(own)), milliseconds(median(other or ()))
        span = (milliseconds(end) for end in _span(own))
        return Row(f"{one.arm}: {name}", value, "ms", bound, part(value, bound), *span)

    copies = bounds.get(limits.MEMCPY)
    share = None if one.fill_share is None else 100 * one.fill_share
    filled, bound = _thousand_ms(one.engine_fill), _thousand_ms(best.engine_fill if best else None)
    return [
        held("look-up", one.look_ups, best.look_ups if best else None),
        held("look-up, cold", one.cold_look_ups, best.cold_look_ups if best else None),
        held("connector, a load", one.in_connector, best.in_connector if best else None),
        Row(f"{one.arm}: connector, 1,000 tokens filled", filled, "ms", bound, part(filled, bound)),
        Row(f"{one.arm}: connector, of the fill", share, "%"),
        Row(f"{one.arm}: save", one.save_speed, "GB/s", copies, part(one.save_speed, copies)),
    ]


def _again_rows(one: ArmResult, what: str, again: Again | None) -> list[Row]:
    """Times are compared with the arm's own before it."""
    if again is None:
        return []
    name, before = f"{one.arm}: {what}", one.ttft_mean
    if again.mean is None:
        return [Row(f"{name}, ttft mean", None, "s")]
    return [
        Row(f"{name}, ttft first", again.first, "s", before, part(again.first, before)),
        Row(f"{name}, ttft mean", again.mean, "s", before, again.mean / before),
        Row(f"{name}, cached", 100 * again.cached, "%", 100 * one.cached),
    ]


def milliseconds(value: float | None) -> float | None:
    return None if value is None else value * 1000


def _thousand_ms(each: float | None) -> float | None:
    return None if each is None else each * 1e6


def part(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None


def _span(values: Sequence[float]) -> tuple[float | None, float | None]:
    return spread(values)[1:] if values else (None, None)
