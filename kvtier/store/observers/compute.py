"""Compute: what prompts took to prefill, and what hits spared of that. Pure.

Hits are counted in chunks and tokens elsewhere. A token late in a long prompt takes longer to
compute than an early one, so these counts say better what an engine is spared
(:mod:`kvtier.eviction.saved_compute`).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.core.lookup import Served
from kvtier.eviction.saved_compute import DEFAULT_S0, SavedCompute
from kvtier.store.observer import Observer


class ComputeCounts(Observer):
    """The Store's lock guards it. Counts are in tokens at a prompt's beginning: so many of them
    take as long. ``s0``: see :func:`kvtier.eviction.saved_compute.balance`."""

    __slots__ = ("_asked", "_of", "_saved")

    def __init__(self, s0: float = DEFAULT_S0) -> None:
        self._of = SavedCompute(1, s0).of
        self._asked = self._saved = 0.0

    def served(self, served: Served) -> None:
        self._asked += self._of(served.asked, served.begin)
        self._saved += self._of(sum(served.hits.values()), served.begin)

    def counted(self) -> Mapping[str, int]:
        return {"asked_compute": round(self._asked), "saved_compute": round(self._saved)}
