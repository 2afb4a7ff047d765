"""The comparison's picture: what a hit costs more than one in vLLM's own cache, by the place of the
bytes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.bench.compare.arm_result import ArmResult
from kvtier.bench.compare.contenders import Contender

# Okabe and Ito's palette: distinct also to colour-blind readers.
_OURS, _PEERS = "#009e73", "#9a9a9a"


def write_plot(
    path: Path, arms: Sequence[Contender], found: Mapping[str, ArmResult], subtitle: str
) -> None:
    """Draw a PNG, 1200 pixels wide. Arms without a load cost are left out; kvtier's arm leads those
    held against it."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    shown = _in_groups(arms, found)
    inches = 1.5 + 0.36 * len(shown)
    figure, axis = pyplot.subplots(figsize=(12, inches))
    for place, one in enumerate(shown):
        cost = (one.load_cost or 0.0) * 1000
        ours = one.arm.startswith("kvtier")
        axis.barh(place, cost, height=0.68, color=_OURS if ours else _PEERS)
        times = "" if one.times_ours is None else f"   {one.times_ours:.1f} x kvtier's"
        axis.text(max(cost, 0.0), place, f" {cost:.0f} ms{times}", va="center", fontsize=10)
    axis.set_yticks(range(len(shown)), [one.arm for one in shown], fontsize=10.5)
    axis.invert_yaxis()
    axis.set_xlabel(
        "milliseconds to the first token, beyond a hit in vLLM's own cache (shorter is better)",
        fontsize=10,
    )
    axis.margins(x=0.22)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    figure.text(
        0.012,
        1 - 0.3 / inches,
        "What loading a long document costs",
        fontsize=14,
        fontweight="bold",
        va="center",
    )
    figure.text(0.012, 1 - 0.6 / inches, subtitle, fontsize=9.5, color="#444444", va="center")
    figure.subplots_adjust(left=0.19, right=0.98, bottom=0.55 / inches, top=1 - 0.85 / inches)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _in_groups(arms: Sequence[Contender], found: Mapping[str, ArmResult]) -> list[ArmResult]:
    """kvtier's arms, each followed by those that are held against it."""
    ours = [arm for arm in arms if arm.name.startswith("kvtier")]
    order = [
        one for arm in ours for one in (arm, *(peer for peer in arms if peer.like == arm.name))
    ]
    return [
        found[one.name]
        for one in order
        if one.name in found and found[one.name].load_cost is not None
    ]
