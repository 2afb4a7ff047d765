"""The results of the arms: a summary of each, the table, and the files' content."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench.multi_turn.arms import BASE, STICKY_SHARED
from kvtier.bench.multi_turn.talk import Turn
from kvtier.bench.report import (
    Found,
    Row,
    by_arm,
    hit_cell,
    mean_row,
    named,
    number,
    or_dash,
    percentile,
    write_results,
)
from kvtier.bench.requests.client import answers, differing

NAME = "multi_turn"
TIERS = ("gpu", "ram", "nvme", "redis", "unknown")
GOAL = 0.5
"""TTFT of later turns with sticky routing and a shared tier, at most, as a multiple of what it
is with round-robin and no shared tier."""


@dataclass(frozen=True, slots=True)
class Run:
    """One arm as it ran. ``hits``: tokens by tier, or None where no engine says. ``killed``: the
    engine that was killed after turn ``after``, as the router names it."""

    arm: str
    turns: Sequence[Turn]
    hits: Mapping[str, float] | None
    killed: str = ""
    after: int = 0

    @property
    def good(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.successful]

    @property
    def first(self) -> list[Turn]:
        return [turn for turn in self.good if turn.question == 1]

    @property
    def later(self) -> list[Turn]:
        """Turns of whose prompt an engine has computed the most before."""
        return [turn for turn in self.good if turn.question > 1]

    @property
    def moved(self) -> list[Turn]:
        theirs = {
            turn.document
            for turn in self.good
            if turn.question == self.after and turn.engine == self.killed
        }
        return [
            turn
            for turn in self.good
            if self.killed and turn.question == self.after + 1 and turn.document in theirs
        ]


def ttft(turns: Sequence[Turn]) -> list[float]:
    return [turn.ttft for turn in turns if turn.ttft is not None]


def cached_share(turns: Sequence[Turn]) -> float:
    cached = sum(turn.cached_tokens or 0 for turn in turns)
    return cached / max(1, sum(turn.prompt_tokens for turn in turns))


def engines_of(run: Run) -> float | None:
    """Engines of a conversation, on average. None where the router does not say."""
    seen: dict[int, set[str]] = {}
    for turn in run.good:
        seen.setdefault(turn.document, set()).add(turn.engine)
    if not seen or any("" in names for names in seen.values()):
        return None
    return statistics.fmean(len(names) for names in seen.values())


def differing_turns(run: Run, base: Run) -> int:
    return differing(answers(run.turns), answers(base.turns))


def as_json(run: Run, base: Run) -> dict[str, Any]:
    first, later = ttft(run.first), ttft(run.later)
    hits = run.hits
    entry: dict[str, Any] = {
        "ttft_first_turn_mean_s": statistics.fmean(first) if first else None,
        "ttft_later_turns_mean_s": statistics.fmean(later) if later else None,
        "ttft_later_turns_p50_s": percentile(later, 50) if later else None,
        "ttft_later_turns_p99_s": percentile(later, 99) if later else None,
        "hit_tokens": None if hits is None else {tier: round(hits.get(tier, 0)) for tier in TIERS},
        "cached_tokens_later_turns": sum(turn.cached_tokens or 0 for turn in run.later),
        "prompt_tokens_later_turns": sum(turn.prompt_tokens for turn in run.later),
        "engines_per_conversation": engines_of(run),
        "total_s": max(turn.request_end for turn in run.turns),
        "turns": len(run.turns),
        "failed_turns": len(run.turns) - len(run.good),
        "asked_again": sum(turn.tries - 1 for turn in run.turns),
        "differing_turns": None if run is base else differing_turns(run, base),
    }
    if run.killed:
        moved = ttft(run.moved)
        entry["killed"] = {
            "engine": run.killed,
            "after_turn": run.after,
            "moved_conversations": len(run.moved),
            "moved_ttft_mean_s": statistics.fmean(moved) if moved else None,
            "moved_cached_share": cached_share(run.moved),
        }
    return entry


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Each arm's TTFT of later turns (ratio to round-robin without kvtier), of first turns, and of
    conversations that moved."""
    base = next(
        (statistics.fmean(ttft(run.later)) for run in runs if run.arm == BASE and run.later), None
    )
    rows = []
    for run in runs:
        if later := ttft(run.later):
            limit = GOAL * base if base and run.arm == STICKY_SHARED else None
            ratio = statistics.fmean(later) / base if base else None
            rows.append(mean_row(f"{run.arm}: ttft of turns >= 2", later, "s", limit, ratio))
        if first := ttft(run.first):
            rows.append(mean_row(f"{run.arm}: ttft of turn 1", first, "s"))
        name = f"{run.arm}: prompt tokens of turns >= 2 not computed"
        rows.append(Row(name, cached_share(run.later), "share"))
        if moved := ttft(run.moved):
            name = f"{run.arm}: ttft of the turn after its engine died"
            rows.append(mean_row(name, moved, "s"))
            name = f"{run.arm}: its prompt tokens not computed"
            rows.append(Row(name, cached_share(run.moved), "share"))
    return rows


def write(folder: Path, runs: Sequence[Run], **more: Any) -> Found:
    arms = {run.arm: as_json(run, runs[0]) for run in runs if run.good}
    return write_results(folder / f"{NAME}.json", NAME, rows_of(runs), **more, arms=arms)


def shown(found: Found) -> list[list[str]]:
    """The table of the arms. Where an engine was killed it has what its conversations felt."""
    values, arms = named(found), found["arms"]
    killed = any(arm.get("killed") for arm in arms.values())

    def cells(name: str, arm: Any) -> list[str]:
        later, first = (values.get(f"{name}: ttft of turn{one}", {}) for one in ("s >= 2", " 1"))
        told = [number(later.get("value"), "s")]
        share = values[f"{name}: prompt tokens of turns >= 2 not computed"]["value"]
        if killed:
            dead, times = arm.get("killed") or {}, later.get("ratio")
            told += ["-" if times is None else f"{times:.2f} x", f"{share:.0%}"]
            told.append(number(dead.get("moved_ttft_mean_s"), "s"))
            told.append(f"{dead['moved_cached_share']:.0%}" if dead else "-")
        else:
            told += [f"{share:.0%}", hit_cell(arm), number(first.get("value"), "s")]
        return [*told, or_dash(arm["differing_turns"])]

    heads = ["not computed", "hit tokens", "TTFT, turn 1"]
    if killed:
        heads = [f"against `{next(iter(arms))}`", "not computed"]
        heads += ["TTFT after its engine died", "not computed then"]
    return by_arm(found, ["TTFT, turns >= 2", *heads, "other answers"], cells)
