"""Sizing: how many bytes a tier needs for recorded requests, and why, in words."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvtier.bench.traces.curve import Curve
from kvtier.bench.traces.formats import FORMS, read
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import size_text

__all__ = ["FORMS", "Recorded", "recorded"]

_SHOWN = (1 / 4, 1 / 2, 1, 2, 4)
"""The points of the curve that a reason shows, as multiples of the size that it explains."""


class Recorded(NamedTuple):
    """Recorded requests, and what LRUs of all sizes hit of them. ``kv_bytes``: of one token."""

    name: str
    curve: Curve
    block_tokens: int

    def enough(self, kv_bytes: int, limit: int, above: int = 0) -> int:
        """The fewest bytes, at most ``limit``, that hit within a point of the knee of the curve
        above a tier of ``above`` bytes. 0: they would add less than a point to that tier."""
        block = self.block_tokens * kv_bytes
        return self.curve.enough(limit // block, above // block) * block

    def knee(self, kv_bytes: int, above: int = 0) -> int:
        """The bytes at the knee of the curve above a tier of ``above`` bytes."""
        block = self.block_tokens * kv_bytes
        return self.curve.knee(above // block) * block

    def largest(self, kv_bytes: int) -> int:
        return self.curve.largest * self.block_tokens * kv_bytes

    def percent(self, kv_bytes: int, size: int) -> str:
        return f"{self.curve.ratio(size // (self.block_tokens * kv_bytes)):.1%}"

    def why(self, kv_bytes: int, size: int) -> str:
        """The curve around this size."""
        points = [int(size * scale) for scale in _SHOWN]
        points = [each for each in points if each < self.largest(kv_bytes)]
        sizes = [*points, self.largest(kv_bytes)]
        shown = (f"{self.percent(kv_bytes, each)} with {size_text(each)}" for each in sizes)
        return f"an LRU hits {', '.join(shown)} of {self.name}"


def recorded(path: str, form: str | None) -> Recorded:
    """The requests of ``kvtier plan --trace``. Raises ConfigError for a file that is no trace of
    prompts."""
    trace = read(path, form)
    curve = Curve(trace.requests)
    if not trace.block_tokens or not curve.asked:
        what = "has no full block" if trace.block_tokens else "counts objects and no tokens"
        raise ConfigError(
            f"--trace {path}: this {trace.form} trace {what}, so that its bytes are not known: "
            "give a trace of prompts (Mooncake, Bailian, kv-cache-tester)"
        )
    return Recorded(Path(path).name, curve, trace.block_tokens)
