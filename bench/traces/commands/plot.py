"""The picture of ``kvtier simulate --plot``: hits by size and policy, beside the optimum."""

from __future__ import annotations

from collections import defaultdict
from itertools import cycle
from pathlib import Path

from kvtier.bench import figure
from kvtier.bench.traces.simulate import Result
from kvtier.core.errors import ConfigError

_COLOURS = {"lru": figure.GREY, "auto": figure.GREEN, "belady": figure.ORANGE}
_OTHERS = (figure.SKY, figure.BLUE, figure.RED, figure.PURPLE)
"""Of settings by their names, in turn."""
_LABELS = {"lru": "LRU", "belady": "optimum (Belady), in the room of all tiers"}
_ENDINGS = (".png", ".svg", ".pdf")


class HitPlot:
    """Raises ConfigError for a place where no picture can be written, and ModuleNotFoundError
    without matplotlib: both before anything is simulated."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in _ENDINGS or not path.parent.is_dir():
            raise ConfigError(
                f"--plot {path}: expected a file in an existing folder whose name ends in "
                f"{', '.join(_ENDINGS)}"
            )
        self._path = path
        self._figure, self._axes = figure.subplots(1, 1, height=6)
        self._points: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, policy: str, slots: int, result: Result) -> None:
        """A point: with room for ``slots`` chunks in RAM this policy had this result."""
        self._points[policy].append((slots, result.percent(result.hits)))

    def save(self, title: str) -> None:
        others = cycle(_OTHERS)
        for policy, points in self._points.items():
            slots, hits = zip(*sorted(points), strict=True)
            colour, label = _COLOURS.get(policy) or next(others), _LABELS.get(policy, policy)
            self._axes.plot(slots, hits, marker="o", color=colour, label=label)
        sizes = sorted({slots for points in self._points.values() for slots, _ in points})
        self._axes.set_xscale("log")
        self._axes.minorticks_off()
        self._axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        self._axes.set_ylim(bottom=0)
        self._axes.set_xlabel("chunks in RAM")
        self._axes.set_ylabel("hits, % of the chunks asked for (all tiers)")
        self._axes.grid(alpha=0.3)
        self._axes.legend(loc="lower right", frameon=False)
        figure.title(self._figure, title, (0.06, 0.94))
        figure.save(self._figure, [self._axes], self._path)
