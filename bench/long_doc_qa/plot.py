"""Long Doc QA's picture: each arm's time to first token and latency, and where the prompts' KV
came from.

A colour means one thing: where KV comes from. The third panel shows the shares. The bars of the
other two have the colour of the greatest share.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.bench import figure
from kvtier.bench.long_doc_qa.arms import COLD
from kvtier.bench.long_doc_qa.report import NAME, Summary, base_of

_TIER_COLOURS = {
    "gpu": figure.SKY,
    "ram": figure.GREEN,
    "nvme": figure.ORANGE,
    "redis": figure.PURPLE,
    "unknown": figure.BLUE,
}
_COMPUTED, _NOT_TOLD = figure.GREY, "#d9d2c5"
_LABELS = {
    "gpu": "vLLM's own cache",
    "unknown": "a connector's cache",
    _COMPUTED: "computed",
    _NOT_TOLD: "not told",
}
# Inches above and below the bars, and of one more line of the subtitle.
_HEAD, _FOOT, _LINE = 1.2, 0.95, 0.2
_SUBTITLE_CHARACTERS = 185
_CHARACTER = 0.075
"""Inches that a label's character takes at most."""


def write_plot(folder: Path, summaries: Sequence[Summary], subtitle: str) -> Path:
    """Draw ``DIR/long_doc_qa.png``."""
    lines = textwrap.wrap(subtitle, _SUBTITLE_CHARACTERS)
    head = _HEAD + _LINE * (len(lines) - 1)
    inches = head + _FOOT + 0.55 * len(summaries)
    widths = {"width_ratios": [5, 4, 4]}
    picture, axes = figure.subplots(1, 3, height=inches, sharey=True, gridspec_kw=widths)
    text = "first answers and repeated ones" if _cold(summaries) else "query round"
    figure.title(picture, f"Long Doc QA: {text}", (0.012, 1 - 0.3 / inches), va="center")
    below = 1 - 0.48 / inches
    picture.text(0.012, below, "\n".join(lines), fontsize=9.5, color="#444444", va="top")
    left = (0.25 + 0.092 * max(len(summary.arm) for summary in summaries)) / figure.WIDTH
    edges = {"left": left, "right": 0.985, "bottom": _FOOT / inches, "top": 1 - head / inches}
    picture.subplots_adjust(wspace=0.08, **edges)
    _draw_ttft(axes[0], summaries)
    _draw_latency(axes[1], summaries)
    _draw_sources(axes[2], summaries)
    axes[0].set_yticks(range(len(summaries)), [summary.arm for summary in summaries], fontsize=11)
    axes[0].invert_yaxis()
    for axis in axes:
        axis.tick_params(axis="y", length=0)
    _draw_legend(picture, axes[2], summaries)
    return figure.save(picture, axes, folder / f"{NAME}.png")


def _cold(summaries: Sequence[Summary]) -> bool:
    return any(summary.arm == COLD for summary in summaries)


def _shares(one: Summary) -> dict[str, float]:
    """Percent of the prompts' tokens by colour, in the order of the tiers. What was computed comes
    last."""
    if one.hits is None:
        return {_NOT_TOLD: 100.0}
    shares = {
        colour: 100 * one.hits.get(tier, 0) / max(1, one.prompt_tokens)
        for tier, colour in _TIER_COLOURS.items()
    }
    return {colour: share for colour, share in shares.items() if share} | {
        _COMPUTED: max(0.0, 100 - sum(shares.values()))
    }


def _main(one: Summary) -> str:
    """The colour of the greatest share. Of equal ones, that of the lower tier."""
    shares = _shares(one)
    return max(reversed(list(shares)), key=shares.__getitem__)


def _draw_ttft(axis: Any, summaries: Sequence[Summary]) -> None:
    base = base_of(summaries)
    labels = []
    for place, one in enumerate(summaries):
        axis.barh(place, one.ttft_mean, height=0.62, color=_main(one))
        steps = max(1, len(one.ttft) - 1)
        spread = [place + 0.22 * (index / steps * 2 - 1) for index in range(len(one.ttft))]
        axis.plot(one.ttft, spread, "o", markersize=3, color="black", alpha=0.45, markeredgewidth=0)
        times = ""
        if base and one is not base:
            times = f"  ({base.ttft_mean / one.ttft_mean:.1f}x faster)"
        labels.append((max(one.ttft), f"{one.ttft_mean:.2f} s{times}"))
    _label(axis, labels)
    axis.set_title("Time to first token (less is better; bar: mean)", fontsize=10.5, loc="left")


def _draw_latency(axis: Any, summaries: Sequence[Summary]) -> None:
    for place, one in enumerate(summaries):
        axis.barh(place, one.latency_mean, height=0.62, color=_main(one))
    _label(axis, [(one.latency_mean, f"{one.latency_mean:.2f} s") for one in summaries])
    axis.set_title("Whole answer (less is better; mean)", fontsize=10.5, loc="left")


def _label(axis: Any, labels: Sequence[tuple[float, str]]) -> None:
    """Write each text after its bar and dots. Make the axis long enough for all of them."""
    inches = axis.get_position().width * figure.WIDTH
    room = [1 - (len(text) + 2) * _CHARACTER / inches for _, text in labels]
    limit = max(end / max(0.2, left) for (end, _), left in zip(labels, room, strict=True))
    for place, (end, text) in enumerate(labels):
        axis.text(end + limit * _CHARACTER / inches, place, text, va="center", fontsize=10)
    axis.set_xlim(0, limit)
    axis.set_xlabel("seconds")


def _draw_sources(axis: Any, summaries: Sequence[Summary]) -> None:
    """The share of the prompts' tokens by the tier that gave their KV. The rest was computed."""
    for place, one in enumerate(summaries):
        left = 0.0
        for colour, share in _shares(one).items():
            axis.barh(place, share, left=left, height=0.62, color=colour)
            left += share
    axis.set_xlim(0, 100)
    axis.set_title("Source of the prompts' KV", fontsize=10.5, loc="left")
    axis.set_xlabel("% of prompt tokens")


def _draw_legend(picture: Any, axis: Any, summaries: Sequence[Summary]) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    names = {colour: _LABELS.get(tier, tier) for tier, colour in _TIER_COLOURS.items()}
    names |= {colour: _LABELS[colour] for colour in (_COMPUTED, _NOT_TOLD)}
    used = {colour for one in summaries for colour in _shares(one)}
    handles = [
        patches.Patch(color=colour, label=name) for colour, name in names.items() if colour in used
    ]
    corner = (axis.get_position().x1, 0)
    style = {"ncols": 7, "fontsize": 9, "frameon": False}
    picture.legend(handles=handles, loc="lower right", bbox_to_anchor=corner, **style)
