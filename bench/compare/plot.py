"""The comparison's picture: what a hit costs beyond one in vLLM's own cache, by the place of the
bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.bench import figure
from kvtier.bench.compare.arm_result import ArmResult
from kvtier.bench.compare.peers.contenders import Contender

_X_LABEL = "milliseconds to the first token, beyond a hit in vLLM's own cache (less is better)"


def write_plot(
    path: Path, arms: Sequence[Contender], found: Mapping[str, ArmResult], subtitle: str
) -> None:
    """Draw a PNG. Arms without a load cost are left out. Each of kvtier's arms stands above those
    that are compared with it."""
    shown = _in_groups(arms, found)
    inches = 1.5 + 0.36 * len(shown)
    picture, axis = figure.subplots(height=inches)
    for place, one in enumerate(shown):
        cost = (one.load_cost or 0.0) * 1000
        ours = one.arm.startswith("kvtier")
        axis.barh(place, cost, height=0.68, color=figure.GREEN if ours else figure.GREY)
        times = "" if one.times_ours is None else f"   {one.times_ours:.1f} x kvtier's"
        axis.text(max(cost, 0.0), place, f" {cost:.0f} ms{times}", va="center", fontsize=10)
    axis.set_yticks(range(len(shown)), [one.arm for one in shown], fontsize=10.5)
    axis.invert_yaxis()
    axis.set_xlabel(_X_LABEL, fontsize=10)
    axis.margins(x=0.22)
    axis.tick_params(axis="y", length=0)
    corner = (0.012, 1 - 0.3 / inches)
    figure.title(picture, "What loading a long document costs", corner, va="center")
    picture.text(0.012, 1 - 0.6 / inches, subtitle, fontsize=9.5, color="#444444", va="center")
    picture.subplots_adjust(left=0.19, right=0.98, bottom=0.55 / inches, top=1 - 0.85 / inches)
    figure.save(picture, [axis], path)


def _in_groups(arms: Sequence[Contender], found: Mapping[str, ArmResult]) -> list[ArmResult]:
    """kvtier's arms, each followed by those that are compared with it."""
    ours = [arm for arm in arms if arm.name.startswith("kvtier")]
    groups = [(arm, *(peer for peer in arms if peer.like == arm.name)) for arm in ours]
    shown = [found[one.name] for group in groups for one in group if one.name in found]
    return [one for one in shown if one.load_cost is not None]
