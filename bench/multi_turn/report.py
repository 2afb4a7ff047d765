"""What the arms amount to: a summary per arm, the table, and DIR/multi_turn.{json,csv}."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench.long_doc_qa.report import percentile
from kvtier.bench.multi_turn.arms import BASE, STICKY_SHARED
from kvtier.bench.multi_turn.talk import Turn
from kvtier.bench.report import Row, write_results
from kvtier.core.terminal import table

NAME = "multi_turn"
TIERS = ("gpu", "ram", "nvme", "redis", "unknown")
GOAL = 0.5
"""What TTFT of later turns may be with sticky routing and a shared tier, as a multiple of
round-robin's without."""


@dataclass(frozen=True, slots=True)
class Run:
    """One arm as it ran. ``hits``: tokens by tier, None where nobody tells. ``killed``: the engine
    that was killed after turn ``after``, as the router names it."""

    arm: str
    turns: Sequence[Turn]
    hits: Mapping[str, float] | None
    killed: str = ""
    after: int = 0

    @property
    def good(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.successful]

    @property
    def later(self) -> list[Turn]:
        """Turns whose prompt somebody has computed the most of before."""
        return [turn for turn in self.good if turn.question > 1]

    @property
    def moved(self) -> list[Turn]:
        """The first turn after the death, of the conversations whose engine died."""
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
    """Of these turns' prompt tokens, the part that no engine computed."""
    return sum(turn.cached_tokens or 0 for turn in turns) / max(
        1, sum(turn.prompt_tokens for turn in turns)
    )


def engines_of(run: Run) -> float | None:
    """Engines a conversation had, on average; None where the router does not say."""
    seen: dict[int, set[str]] = {}
    for turn in run.good:
        seen.setdefault(turn.document, set()).add(turn.engine)
    if not seen or any("" in names for names in seen.values()):
        return None
    return statistics.fmean(len(names) for names in seen.values())


def differing(run: Run, base: Run) -> int:
    """Turns whose answer is not that of the other arm."""
    ours, theirs = (
        {(one.document, one.question): one.answer for one in each.good} for each in (run, base)
    )
    return sum(ours.get(turn) != theirs.get(turn) for turn in ours.keys() | theirs.keys())


def as_json(run: Run, base: Run) -> dict[str, Any]:
    """The arm's entry in the results form."""
    first, later = ttft([turn for turn in run.good if turn.question == 1]), ttft(run.later)
    entry: dict[str, Any] = {
        "ttft_first_turn_mean_s": statistics.fmean(first) if first else None,
        "ttft_later_turns_mean_s": statistics.fmean(later) if later else None,
        "ttft_later_turns_p50_s": percentile(later, 50) if later else None,
        "ttft_later_turns_p99_s": percentile(later, 99) if later else None,
        "hit_tokens": None
        if run.hits is None
        else {tier: round(run.hits.get(tier, 0)) for tier in TIERS},
        "cached_tokens_later_turns": sum(turn.cached_tokens or 0 for turn in run.later),
        "prompt_tokens_later_turns": sum(turn.prompt_tokens for turn in run.later),
        "engines_per_conversation": engines_of(run),
        "total_s": max(turn.request_end for turn in run.turns),
        "turns": len(run.turns),
        "failed_turns": len(run.turns) - len(run.good),
        "asked_again": sum(turn.tries - 1 for turn in run.turns),
        "differing_turns": None if run is base else differing(run, base),
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
    """TTFT of later turns per arm (ratio to round-robin without kvtier), of first turns, and of
    moved conversations."""
    base = next(
        (statistics.fmean(ttft(run.later)) for run in runs if run.arm == BASE and run.later), None
    )
    rows = []
    for run in runs:
        first, later = ttft([turn for turn in run.good if turn.question == 1]), ttft(run.later)
        if later:
            mean = statistics.fmean(later)
            limit = GOAL * base if base and run.arm == STICKY_SHARED else None
            ratio = mean / base if base else None
            rows.append(
                Row(
                    f"{run.arm}: ttft of turns >= 2",
                    mean,
                    "s",
                    limit,
                    ratio,
                    min(later),
                    max(later),
                )
            )
        if first:
            rows.append(
                Row(
                    f"{run.arm}: ttft of turn 1",
                    statistics.fmean(first),
                    "s",
                    None,
                    None,
                    min(first),
                    max(first),
                )
            )
        rows.append(
            Row(
                f"{run.arm}: prompt tokens of turns >= 2 not computed",
                cached_share(run.later),
                "share",
            )
        )
        if moved := ttft(run.moved):
            name = f"{run.arm}: ttft of the turn after its engine died"
            rows.append(Row(name, statistics.fmean(moved), "s", None, None, min(moved), max(moved)))
            rows.append(
                Row(f"{run.arm}: its prompt tokens not computed", cached_share(run.moved), "share")
            )
    return rows


def write_json(folder: Path, runs: Sequence[Run], **more: Any) -> Path:
    path = folder / f"{NAME}.json"
    arms = {run.arm: as_json(run, runs[0]) for run in runs if run.good}
    requests = {run.arm: [_request(turn) for turn in run.turns] for run in runs}
    write_results(path, NAME, rows_of(runs), **more, arms=arms, requests=requests)
    return path


def write_csv(folder: Path, runs: Sequence[Run]) -> Path:
    """One line a turn."""
    path = folder / f"{NAME}.csv"
    lines = [{"arm": run.arm} | _request(turn) for run in runs for turn in run.turns]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def _request(turn: Turn) -> dict[str, Any]:
    return {
        "conversation": turn.document,
        "turn": turn.question,
        "engine": turn.engine,
        "request_start": turn.request_start,
        "ttft": turn.ttft,
        "request_end": turn.request_end,
        "successful": turn.successful,
        "tries": turn.tries,
        "prompt_tokens": turn.prompt_tokens,
        "output_tokens": turn.output_tokens,
        "cached_tokens": turn.cached_tokens,
    }


def print_table(runs: Sequence[Run]) -> None:
    """The shell's table, a row an arm."""
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
    print("\n".join(table(heads, rows, numbers=range(1, len(heads)))))
    for run in runs:
        if moved := ttft(run.moved):
            died = (
                f"{run.arm}: {run.killed} was killed after turn {run.after}; its {len(moved)} "
                "conversations went on"
            )
            share = f"{cached_share(run.moved):.0%} of their prompts not computed"
            print(f"{died} in {statistics.fmean(moved):.3f} s on average, {share}")


def _cells(run: Run, base: Run) -> list[str]:
    first, later = ttft([turn for turn in run.good if turn.question == 1]), ttft(run.later)
    against = ttft(base.later)
    engines = engines_of(run)
    return [
        f"{statistics.fmean(first):.3f} s" if first else "",
        f"{statistics.fmean(later):.3f} s" if later else "",
        f"{percentile(later, 99):.3f} s" if later else "",
        f"{statistics.fmean(later) / statistics.fmean(against):.2f} x"
        if later and against and run is not base
        else "",
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
    count = differing(run, base)
    return f"{count} differ" if count else "same"
