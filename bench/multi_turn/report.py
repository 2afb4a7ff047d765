"""The results of the arms: a summary of each, the table, and the files' content."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench import figure
from kvtier.bench.multi_turn.arms import BASE, STICKY_SHARED
from kvtier.bench.multi_turn.talk import Turn
from kvtier.bench.report import Row, mean_row, percentile, write_run
from kvtier.bench.requests.client import answers, differing
from kvtier.core.terminal import table

NAME = "multi_turn"
TIERS = ("gpu", "ram", "nvme", "redis", "unknown")
GOAL = 0.5
"""TTFT of later turns with sticky routing and a shared tier, at most, as a multiple of what it
is with round-robin and no shared tier."""
_COLUMNS = (
    "engine",
    "request_start",
    "ttft",
    "request_end",
    "successful",
    "tries",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
)


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


def write(folder: Path, runs: Sequence[Run], **more: Any) -> list[Path]:
    arms = {run.arm: as_json(run, runs[0]) for run in runs if run.good}
    lines = [
        {"arm": run.arm, "conversation": turn.document, "turn": turn.question}
        | turn.columns(*_COLUMNS)
        for run in runs
        for turn in run.turns
    ]
    return write_run(folder, NAME, rows_of(runs), lines, **more, arms=arms)


def draw(folder: Path, runs: Sequence[Run], subtitle: str) -> Path:
    """Times to first token of later turns, and what was not computed of them. ``runs``: at least
    one, each with an answer."""
    times, shares = [], []
    for run in runs:
        colour = figure.GREEN if "kvtier" in run.arm else figure.GREY
        later, share = ttft(run.later), 100 * cached_share(run.later)
        mean = statistics.fmean(later) if later else 0.0
        times.append(figure.Bar({colour: mean}, f"{mean:.2f} s", later))
        shares.append(figure.Bar({colour: share}, f"{share:.0f} %"))
    about = "Time to first token of turns >= 2 (less is better; bar: mean)"
    cached = "Prompt tokens of them not computed (more is better)"
    panels = [
        figure.Panel(about, "seconds", times),
        figure.Panel(cached, "%", shares, 115),
    ]
    heads = ("Multi-turn conversations on two engines behind a router", subtitle)
    return figure.bars(folder / f"{NAME}.png", heads, [run.arm for run in runs], panels)


def print_table(runs: Sequence[Run]) -> None:
    heads = [
        "arm",
        "TTFT turn 1",
        "TTFT later",
        "p99",
        f"vs {runs[0].arm}",
        "not computed",
        "engines",
        "answers",
    ]
    rows = [[run.arm, *_cells(run, runs[0])] for run in runs if run.good]
    print("Multi-turn: time to the first token, by turn")
    print("Less time and fewer engines are better. More tokens that are not computed are better.")
    print("\n".join(table(heads, rows, numbers=range(1, len(heads)))))
    for run in runs:
        if moved := ttft(run.moved):
            print(f"{run.arm}: {run.killed} was killed after turn {run.after}.")
            mean = f"{statistics.fmean(moved):.3f} s on average to the first token"
            share = f"{cached_share(run.moved):.0%} of their prompts were not computed"
            print(f"  Its {len(moved)} conversations then waited {mean}; {share}.")


def _cells(run: Run, base: Run) -> list[str]:
    first, later = ttft(run.first), ttft(run.later)
    against = ttft(base.later)
    engines, times = engines_of(run), ""
    if later and against and run is not base:
        times = f"{statistics.fmean(later) / statistics.fmean(against):.2f} x"
    return [
        f"{statistics.fmean(first):.3f} s" if first else "",
        f"{statistics.fmean(later):.3f} s" if later else "",
        f"{percentile(later, 99):.3f} s" if later else "",
        times,
        f"{cached_share(run.later):.0%}",
        "" if engines is None else f"{engines:.1f}",
        _answers(run, base),
    ]


def _answers(run: Run, base: Run) -> str:
    failed = len(run.turns) - len(run.good)
    if failed:
        return f"{failed} failed"
    if run is base:
        return ""
    count = differing_turns(run, base)
    return f"{count} differ" if count else "same"
