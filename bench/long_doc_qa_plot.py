"""Long Doc QA's picture: time to first token, total time, and where the prompts' tokens came from, per arm."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.bench.long_doc_qa_arms import GPU_HIT, NONE
from kvtier.bench.long_doc_qa_report import NAME, Summary

# Okabe and Ito's palette: distinct also to colour-blind readers.
_GREY, _BLUE = "#9a9a9a", "#56b4e9"
_ARM_COLOURS = {NONE: _GREY, GPU_HIT: _BLUE}
_OURS = ("#009e73", "#e69f00", "#d55e00", "#cc79a7", "#0072b2")
_TIER_COLOURS = {"gpu": _BLUE, "ram": "#009e73", "nvme": "#e69f00", "redis": "#cc79a7", "unknown": "#0072b2"}
_COMPUTED = "#e4e4e4"
# Inches above and below the bars.
_HEAD, _FOOT = 1.2, 0.95


def write_plot(folder: Path, summaries: Sequence[Summary], subtitle: str) -> Path:
    """Draw ``DIR/long_doc_qa.png``, 1200 pixels wide."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    inches = _HEAD + _FOOT + 0.55 * len(summaries)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, inches), sharey=True, gridspec_kw={"width_ratios": [5, 3, 4]})
    figure.text(0.012, 1 - 0.3 / inches, "Long Doc QA: query round", fontsize=14, fontweight="bold", va="center")
    figure.text(0.012, 1 - 0.58 / inches, subtitle, fontsize=9.5, color="#444444", va="center")
    colours = _colours(summaries)
    _draw_ttft(axes[0], summaries, colours)
    _draw_total(axes[1], summaries, colours)
    _draw_sources(axes[2], summaries)
    axes[0].set_yticks(range(len(summaries)), [summary.arm for summary in summaries], fontsize=11)
    axes[0].invert_yaxis()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    figure.subplots_adjust(left=0.165, right=0.985, wspace=0.08, bottom=_FOOT / inches, top=1 - _HEAD / inches)
    _draw_legend(figure, axes[2], summaries)
    path = folder / f"{NAME}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _colours(summaries: Sequence[Summary]) -> list[str]:
    """An arm's colour; kvtier's arms and servers get theirs in order."""
    ours = iter(_OURS * len(summaries))
    return [_ARM_COLOURS.get(summary.arm) or next(ours) for summary in summaries]


def _draw_ttft(axis: Any, summaries: Sequence[Summary], colours: Sequence[str]) -> None:
    none = next((summary.ttft_mean for summary in summaries if summary.arm == NONE), None)
    widest = max(max(summary.ttft) for summary in summaries)
    for place, (one, colour) in enumerate(zip(summaries, colours, strict=True)):
        axis.barh(place, one.ttft_mean, height=0.62, color=colour)
        spread = [place + 0.22 * (index / max(1, len(one.ttft) - 1) * 2 - 1) for index in range(len(one.ttft))]
        axis.plot(one.ttft, spread, "o", markersize=3, color="black", alpha=0.45, markeredgewidth=0)
        times = f"  ({none / one.ttft_mean:.1f}x faster)" if none and one.arm != NONE else ""
        axis.text(max(one.ttft) + 0.02 * widest, place, f"{one.ttft_mean:.2f} s{times}", va="center", fontsize=10)
    axis.set_xlim(0, widest * 1.28)
    axis.set_title("Time to first token (bar: mean, dots: requests)", fontsize=10.5, loc="left")
    axis.set_xlabel("seconds")


def _draw_total(axis: Any, summaries: Sequence[Summary], colours: Sequence[str]) -> None:
    longest = max(summary.total for summary in summaries)
    for place, (one, colour) in enumerate(zip(summaries, colours, strict=True)):
        axis.barh(place, one.total, height=0.62, color=colour)
        axis.text(one.total + 0.02 * longest, place, f"{one.total:.1f} s", va="center", fontsize=10)
    axis.set_xlim(0, longest * 1.25)
    axis.set_title("Total time of the round", fontsize=10.5, loc="left")
    axis.set_xlabel("seconds")


def _draw_sources(axis: Any, summaries: Sequence[Summary]) -> None:
    """Share of the prompts' tokens by the tier that gave their KV; the rest was computed."""
    for place, one in enumerate(summaries):
        if one.hits is None:
            axis.text(1, place, "the server does not tell", va="center", fontsize=9, color="#666666")
            continue
        left = 0.0
        for tier, colour in _TIER_COLOURS.items():
            share = 100 * one.hits.get(tier, 0) / max(1, one.prompt_tokens)
            axis.barh(place, share, left=left, height=0.62, color=colour)
            left += share
        axis.barh(place, max(0.0, 100 - left), left=left, height=0.62, color=_COMPUTED)
    axis.set_xlim(0, 100)
    axis.set_title("Source of the prompts' KV", fontsize=10.5, loc="left")
    axis.set_xlabel("% of prompt tokens")


def _draw_legend(figure: Any, axis: Any, summaries: Sequence[Summary]) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    shown = {
        tier: colour for tier, colour in _TIER_COLOURS.items() if any((one.hits or {}).get(tier) for one in summaries)
    }
    shown["computed"] = _COMPUTED
    handles = [patches.Patch(color=colour, label=name) for name, colour in shown.items()]
    right = axis.get_position().x1
    figure.legend(handles=handles, loc="lower right", bbox_to_anchor=(right, 0), ncols=6, fontsize=9, frameon=False)
