"""The picture: each arm's time to first token by turn, and what it did not compute of later
turns."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.bench import figure
from kvtier.bench.multi_turn.report import NAME, Run, cached_share, ttft

_STYLES = (
    (figure.GREY, "o"),
    (figure.ORANGE, "s"),
    (figure.SKY, "^"),
    (figure.GREEN, "D"),
)
_SUBTITLE_WIDTH = 150
"""Characters of a line that fits into the picture."""


def write_plot(folder: Path, runs: Sequence[Run], subtitle: str) -> Path:
    """Draw ``DIR/multi_turn.png``. ``runs``: at least one, each with an answer."""
    picture, axes = figure.subplots(1, 2, height=4.6, gridspec_kw={"width_ratios": [3, 2]})
    text = "Multi-turn conversations on two engines behind a router"
    figure.title(picture, text, (0.05, 0.95))
    lines = textwrap.fill(subtitle, _SUBTITLE_WIDTH)
    picture.text(0.05, 0.925, lines, fontsize=9, color="#444444", va="top")
    picture.subplots_adjust(left=0.06, right=0.985, wspace=0.42, bottom=0.2, top=0.80)
    for place, run in enumerate(runs):
        colour, mark = _STYLES[place % len(_STYLES)]
        _draw_turns(axes[0], run, colour, mark)
        share = 100 * cached_share(run.later)
        axes[1].barh(place, share, height=0.6, color=colour)
        axes[1].text(share + 1.5, place, f"{share:.0f} %", va="center", fontsize=10)
    _label_turns(axes[0], runs)
    about = "Prompt tokens of turns >= 2 not computed (more is better)"
    axes[1].set_title(about, fontsize=10.5, loc="left")
    axes[1].set_xlabel("%")
    axes[1].set_xlim(0, 115)
    axes[1].set_yticks(range(len(runs)), [run.arm for run in runs], fontsize=10)
    axes[1].invert_yaxis()
    return figure.save(picture, axes, folder / f"{NAME}.png")


def _label_turns(axis: Any, runs: Sequence[Run]) -> None:
    about = "Time to first token by turn (less is better; line: mean, marks: requests)"
    axis.set_title(about, fontsize=10.5, loc="left")
    axis.set_xlabel("turn")
    axis.set_ylabel("seconds")
    axis.set_ylim(bottom=0)
    axis.set_xticks(sorted({turn.question for run in runs for turn in run.good}))
    below = (0.5, -0.13)
    axis.legend(
        fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=below, ncols=len(runs)
    )
    after = next((run.after for run in runs if run.killed), 0)
    if after:
        style = {"color": figure.RED}
        axis.axvline(after + 0.5, linestyle="--", linewidth=1, **style)
        top = axis.get_ylim()[1]
        place = {"ha": "right", "va": "top", "fontsize": 9}
        axis.text(after + 0.48, top, "an engine is killed ", **style, **place)


def _draw_turns(axis: Any, run: Run, colour: str, mark: str) -> None:
    numbers = sorted({turn.question for turn in run.good})
    by_turn = [ttft([turn for turn in run.good if turn.question == number]) for number in numbers]
    means = [statistics.fmean(times) for times in by_turn]
    axis.plot(numbers, means, "-", color=colour, label=run.arm, linewidth=2)
    style = {"color": colour, "markersize": 4, "alpha": 0.5, "markeredgewidth": 0}
    for number, times in zip(numbers, by_turn, strict=True):
        axis.plot([number] * len(times), times, mark, **style)
