"""The picture: time to first token of each turn, and where later turns' KV came from, per arm."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.bench.multi_turn.report import NAME, Run, cached_share, ttft

# Okabe and Ito's palette: distinct also to colour-blind readers.
_COLOURS = ("#9a9a9a", "#e69f00", "#56b4e9", "#009e73")
_MARKS = ("o", "s", "^", "D")


def write_plot(folder: Path, runs: Sequence[Run], subtitle: str) -> Path:
    """Draw ``DIR/multi_turn.png``, 1200 pixels wide. ``runs``: at least one, each with an
    answer."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": [3, 2]})
    figure.text(
        0.05,
        0.95,
        "Multi-turn conversations on two engines behind a router",
        fontsize=14,
        fontweight="bold",
    )
    figure.text(0.05, 0.905, subtitle, fontsize=9, color="#444444")
    figure.subplots_adjust(left=0.06, right=0.985, wspace=0.42, bottom=0.2, top=0.80)
    for place, run in enumerate(runs):
        style = _COLOURS[place % len(_COLOURS)], _MARKS[place % len(_MARKS)]
        _draw_turns(axes[0], run, *style)
        share = 100 * cached_share(run.later)
        axes[1].barh(place, share, height=0.6, color=style[0])
        axes[1].text(share + 1.5, place, f"{share:.0f} %", va="center", fontsize=10)
    axes[0].set_title(
        "Time to first token by turn (line: mean, marks: requests)", fontsize=10.5, loc="left"
    )
    axes[0].set_xlabel("turn")
    axes[0].set_ylabel("seconds")
    axes[0].set_ylim(bottom=0)
    axes[0].set_xticks(sorted({turn.question for run in runs for turn in run.good}))
    axes[0].legend(
        fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(runs)
    )
    after = next((run.after for run in runs if run.killed), 0)
    if after:
        axes[0].axvline(after + 0.5, color="#d55e00", linestyle="--", linewidth=1)
        top = axes[0].get_ylim()[1]
        axes[0].text(
            after + 0.48,
            top,
            "an engine is killed ",
            color="#d55e00",
            fontsize=9,
            ha="right",
            va="top",
        )
    axes[1].set_title("Prompt tokens of turns >= 2 not computed", fontsize=10.5, loc="left")
    axes[1].set_xlabel("%")
    axes[1].set_xlim(0, 115)
    axes[1].set_yticks(range(len(runs)), [run.arm for run in runs], fontsize=10)
    axes[1].invert_yaxis()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path = folder / f"{NAME}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _draw_turns(axis: Any, run: Run, colour: str, mark: str) -> None:
    numbers = sorted({turn.question for turn in run.good})
    by_turn = [ttft([turn for turn in run.good if turn.question == number]) for number in numbers]
    axis.plot(
        numbers,
        [statistics.fmean(times) for times in by_turn],
        "-",
        color=colour,
        label=run.arm,
        linewidth=2,
    )
    for number, times in zip(numbers, by_turn, strict=True):
        axis.plot(
            [number] * len(times),
            times,
            mark,
            color=colour,
            markersize=4,
            alpha=0.5,
            markeredgewidth=0,
        )
