"""Pictures: matplotlib without a screen, and what all pictures have in common."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    """A figure and its axes."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(*grid, figsize=(WIDTH, height), **more)
    return figure, axes


def title(figure: Any, text: str, place: tuple[float, float], **more: Any) -> None:
    figure.text(*place, text, fontsize=14, fontweight="bold", **more)


def save(figure: Any, axes: Iterable[Any], path: Path) -> Path:
    """Write the picture, and close it."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    importlib.import_module("matplotlib.pyplot").close(figure)
    return path
