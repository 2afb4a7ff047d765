"""Pictures: matplotlib without a screen, and the one of a benchmark, with a row of bars an arm."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Okabe and Ito's palette, which colour-blind readers can tell apart too.
GREY = "#9a9a9a"
ORANGE = "#e69f00"
SKY = "#56b4e9"
GREEN = "#009e73"
BLUE = "#0072b2"
RED = "#d55e00"
PURPLE = "#cc79a7"
WIDTH = 12
"""Inches. A picture is 1200 pixels wide."""


def subplots(*grid: int, height: float, **more: Any) -> tuple[Any, Any]:
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(*grid, figsize=(WIDTH, height), **more)
    return figure, axes


def title(figure: Any, text: str, place: tuple[float, float], **more: Any) -> None:
    figure.text(*place, text, fontsize=14, fontweight="bold", **more)


def save(figure: Any, axes: Iterable[Any], path: Path) -> Path:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    importlib.import_module("matplotlib.pyplot").close(figure)
    return path


# Inches above and below the bars, of a bar, and of one more line of the subtitle.
_HEAD, _FOOT, _BAR, _LINE = 1.2, 0.95, 0.55, 0.2
_SUBTITLE_CHARACTERS = 185
_CHARACTER_INCHES = 0.075
"""Width of a label's character, at most."""


@dataclass(frozen=True, slots=True)
class Bar:
    """``parts``: lengths by colour, from the left. ``dots``: the values behind a mean."""

    parts: Mapping[str, float]
    label: str = ""
    dots: Sequence[float] = field(default=())


class Panel(NamedTuple):
    """``bars``: one an arm. ``limit``: where the axis ends; None: where all labels have room."""

    title: str
    unit: str
    bars: Sequence[Bar]
    limit: float | None = None


def bars(
    path: Path,
    heads: tuple[str, str],
    arms: Sequence[str],
    panels: Sequence[Panel],
    legend: Mapping[str, str] | None = None,
) -> Path:
    """Draw panels of bars side by side. ``heads``: title and subtitle. ``legend``: names by
    colour."""
    lines = textwrap.wrap(heads[1], _SUBTITLE_CHARACTERS)
    head = _HEAD + _LINE * (len(lines) - 1)
    inches = head + _FOOT + _BAR * len(arms)
    widths = {"width_ratios": [5, *[4] * (len(panels) - 1)]}
    picture, axes = subplots(
        1, len(panels), height=inches, sharey=True, gridspec_kw=widths, squeeze=False
    )
    title(picture, heads[0], (0.012, 1 - 0.3 / inches), va="center")
    text = "\n".join(lines)
    picture.text(0.012, 1 - 0.48 / inches, text, fontsize=9.5, color="#444444", va="top")
    left = (0.25 + 0.092 * max(map(len, arms))) / WIDTH
    edges = {"left": left, "right": 0.985, "bottom": _FOOT / inches, "top": 1 - head / inches}
    picture.subplots_adjust(wspace=0.08, **edges)
    for axis, panel in zip(axes[0], panels, strict=True):
        _draw(axis, panel)
    axes[0][0].set_yticks(range(len(arms)), arms, fontsize=11)
    axes[0][0].invert_yaxis()
    if legend:
        patches: Any = importlib.import_module("matplotlib.patches")
        handles = [patches.Patch(color=colour, label=name) for colour, name in legend.items()]
        corner, style = (0.985, 0), {"ncols": 7, "fontsize": 9, "frameon": False}
        picture.legend(handles=handles, loc="lower right", bbox_to_anchor=corner, **style)
    return save(picture, axes[0], path)


def _draw(axis: Any, panel: Panel) -> None:
    ends = []
    for place, bar in enumerate(panel.bars):
        end = 0.0
        for colour, length in bar.parts.items():
            axis.barh(place, length, left=end, height=0.62, color=colour)
            end += length
        steps = max(1, len(bar.dots) - 1)
        spread = [place + 0.22 * (index / steps * 2 - 1) for index in range(len(bar.dots))]
        axis.plot(bar.dots, spread, "o", markersize=3, color="black", alpha=0.45, markeredgewidth=0)
        ends.append(max([end, 0.0, *bar.dots]))
    inches = axis.get_position().width * WIDTH
    room = [1 - (len(bar.label) + 2) * _CHARACTER_INCHES / inches for bar in panel.bars]
    limit = max(end / max(0.2, left) for end, left in zip(ends, room, strict=True))
    limit = panel.limit or limit
    for place, (end, bar) in enumerate(zip(ends, panel.bars, strict=True)):
        at = end + limit * _CHARACTER_INCHES / inches
        axis.text(at, place, bar.label, va="center", fontsize=10)
    axis.set_xlim(0, limit)
    axis.set_xlabel(panel.unit)
    axis.set_title(panel.title, fontsize=10.5, loc="left")
    axis.tick_params(axis="y", length=0)
