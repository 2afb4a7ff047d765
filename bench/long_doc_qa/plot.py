"""Long Doc QA's picture: time to first token, latency, and where the prompts' KV came from, per
arm.

A colour means one thing: where KV comes from. The third panel shows the shares; the bars of the
    other two have the
colour of the greatest share.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.bench.long_doc_qa.arms import COLD
from kvtier.bench.long_doc_qa.report import NAME, Summary, base_of

# Okabe and Ito's palette: distinct also to colour-blind readers.
_TIER_COLOURS = {
    "gpu": "#56b4e9",
    "ram": "#009e73",
    "nvme": "#e69f00",
    "redis": "#cc79a7",
    "unknown": "#0072b2",
}
_COMPUTED, _NOT_TOLD = "#9a9a9a", "#d9d2c5"
_LABELS = {
    "gpu": "vLLM's own cache",
    "unknown": "a connector's cache",
    _COMPUTED: "computed",
    _NOT_TOLD: "not told",
}
# Inches above and below the bars; of a further line of the subtitle.
_HEAD, _FOOT, _LINE = 1.2, 0.95, 0.2
_SUBTITLE_CHARACTERS = 185
_CHARACTER = 0.075
"""Inches of a label's character, generously."""


def write_plot(folder: Path, summaries: Sequence[Summary], subtitle: str) -> Path:
    """Draw ``DIR/long_doc_qa.png``, 1200 pixels wide."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    lines = textwrap.wrap(subtitle, _SUBTITLE_CHARACTERS)
    head = _HEAD + _LINE * (len(lines) - 1)
    inches = head + _FOOT + 0.55 * len(summaries)
    figure, axes = pyplot.subplots(
        1, 3, figsize=(12, inches), sharey=True, gridspec_kw={"width_ratios": [5, 4, 4]}
    )
    title = (
        "Long Doc QA: first answers and repeated ones"
        if _cold(summaries)
        else "Long Doc QA: query round"
    )
    figure.text(0.012, 1 - 0.3 / inches, title, fontsize=14, fontweight="bold", va="center")
    figure.text(0.012, 1 - 0.48 / inches, "\n".join(lines), fontsize=9.5, color="#444444", va="top")
    left = (0.25 + 0.092 * max(len(summary.arm) for summary in summaries)) / 12
    figure.subplots_adjust(
        left=left, right=0.985, wspace=0.08, bottom=_FOOT / inches, top=1 - head / inches
    )
    _draw_ttft(axes[0], summaries)
    _draw_latency(axes[1], summaries)
    _draw_sources(axes[2], summaries)
    axes[0].set_yticks(range(len(summaries)), [summary.arm for summary in summaries], fontsize=11)
    axes[0].invert_yaxis()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    _draw_legend(figure, axes[2], summaries)
    path = folder / f"{NAME}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _cold(summaries: Sequence[Summary]) -> bool:
    return any(summary.arm == COLD for summary in summaries)


def _shares(one: Summary) -> dict[str, float]:
    """Colour -> percent of the prompts' tokens, greatest tier first in the order of the tiers;
    computed last."""
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
    """The colour of the greatest share; of equal ones, that of the lower tier."""
    shares = _shares(one)
    return max(reversed(list(shares)), key=shares.__getitem__)


def _draw_ttft(axis: Any, summaries: Sequence[Summary]) -> None:
    base = base_of(summaries)
    labels = []
    for place, one in enumerate(summaries):
        axis.barh(place, one.ttft_mean, height=0.62, color=_main(one))
        spread = [
            place + 0.22 * (index / max(1, len(one.ttft) - 1) * 2 - 1)
            for index in range(len(one.ttft))
        ]
        axis.plot(one.ttft, spread, "o", markersize=3, color="black", alpha=0.45, markeredgewidth=0)
        times = (
            f"  ({base.ttft_mean / one.ttft_mean:.1f}x faster)" if base and one is not base else ""
        )
        labels.append((max(one.ttft), f"{one.ttft_mean:.2f} s{times}"))
    _label(axis, labels)
    axis.set_title("Time to first token (bar: mean, dots: requests)", fontsize=10.5, loc="left")


def _draw_latency(axis: Any, summaries: Sequence[Summary]) -> None:
    for place, one in enumerate(summaries):
        axis.barh(place, one.latency_mean, height=0.62, color=_main(one))
    _label(axis, [(one.latency_mean, f"{one.latency_mean:.2f} s") for one in summaries])
    axis.set_title("Whole answer (mean)", fontsize=10.5, loc="left")


def _label(axis: Any, labels: Sequence[tuple[float, str]]) -> None:
    """Write each text behind where its bar or dots end, and make the axis long enough for all of
    them."""
    inches = axis.get_position().width * 12
    room = [1 - (len(text) + 2) * _CHARACTER / inches for _, text in labels]
    limit = max(end / max(0.2, left) for (end, _), left in zip(labels, room, strict=True))
    for place, (end, text) in enumerate(labels):
        axis.text(end + limit * _CHARACTER / inches, place, text, va="center", fontsize=10)
    axis.set_xlim(0, limit)
    axis.set_xlabel("seconds")


def _draw_sources(axis: Any, summaries: Sequence[Summary]) -> None:
    """Share of the prompts' tokens by the tier that gave their KV; the rest was computed."""
    for place, one in enumerate(summaries):
        left = 0.0
        for colour, share in _shares(one).items():
            axis.barh(place, share, left=left, height=0.62, color=colour)
            left += share
    axis.set_xlim(0, 100)
    axis.set_title("Source of the prompts' KV", fontsize=10.5, loc="left")
    axis.set_xlabel("% of prompt tokens")


def _draw_legend(figure: Any, axis: Any, summaries: Sequence[Summary]) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    names = {colour: _LABELS.get(tier, tier) for tier, colour in _TIER_COLOURS.items()}
    names |= {colour: _LABELS[colour] for colour in (_COMPUTED, _NOT_TOLD)}
    used = {colour for one in summaries for colour in _shares(one)}
    handles = [
        patches.Patch(color=colour, label=name) for colour, name in names.items() if colour in used
    ]
    right = axis.get_position().x1
    figure.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(right, 0),
        ncols=7,
        fontsize=9,
        frameon=False,
    )
