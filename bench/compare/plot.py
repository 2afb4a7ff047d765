"""The comparison's picture: what a hit costs beyond one in vLLM's own cache, by the place of the
bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtier.bench import figure
from kvtier.bench.compare.peers.contenders import Contender
from kvtier.bench.report import Row

_X_LABEL = "milliseconds to the first token, beyond a hit in vLLM's own cache (less is better)"


def write_plot(path: Path, arms: Sequence[Contender], rows: Sequence[Row], subtitle: str) -> None:
    """Draw a PNG. Arms without a load cost are left out. Each of kvtier's arms stands above those
    that are compared with it."""
    costs = {row.name.removesuffix(": load cost"): row for row in rows if row.value is not None}
    ours = [arm.name for arm in arms if arm.name.startswith("kvtier")]
    groups = [(one, *(peer.name for peer in arms if peer.like == one)) for one in ours]
    shown = [name for group in groups for name in group if name in costs]
    inches = 1.5 + 0.36 * len(shown)
    picture, axis = figure.subplots(height=inches)
    for place, name in enumerate(shown):
        cost, ratio = 1000 * (costs[name].value or 0.0), costs[name].ratio
        axis.barh(place, cost, height=0.68, color=figure.GREEN if name in ours else figure.GREY)
        times = "" if ratio is None else f"   {ratio:.1f} x kvtier's"
        axis.text(max(cost, 0.0), place, f" {cost:.0f} ms{times}", va="center", fontsize=10)
    axis.set_yticks(range(len(shown)), shown, fontsize=10.5)
    axis.invert_yaxis()
    axis.set_xlabel(_X_LABEL, fontsize=10)
    axis.margins(x=0.22)
    axis.tick_params(axis="y", length=0)
    corner = (0.012, 1 - 0.3 / inches)
    figure.title(picture, "What loading a long document costs", corner, va="center")
    picture.text(0.012, 1 - 0.6 / inches, subtitle, fontsize=9.5, color="#444444", va="center")
    picture.subplots_adjust(left=0.19, right=0.98, bottom=0.55 / inches, top=1 - 0.85 / inches)
    figure.save(picture, [axis], path)
