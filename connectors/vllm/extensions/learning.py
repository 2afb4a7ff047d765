"""Learning: an engine's speed and its tiers' pace as measured, kept beside its NVMe tier. The next
start begins with them, and believes what it sees (:mod:`kvtier.load_policy.decide`).

An engine without such a folder, as one whose tiers are a server's, begins with nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.connectors.vllm.extension import Extension
from kvtier.core.lanes import Lane
from kvtier.load_policy.latency import Pace
from kvtier.load_policy.prefill import Certainty, Prefill, PrefillTime
from kvtier.tiers.nvme.folder import read_learnt, write_learnt

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import StepReport

_EVERY_S = 5.0
_CHANGED_PART = 0.1
"""Change of a value, as a part of it, that is worth a write."""


def engine_name(fingerprint: bytes, device: str) -> str:
    """Return a name that is the same for every start of one engine on one kind of device."""
    return f"{hashlib.sha256(fingerprint).hexdigest()[:32]} {device}"


class Learning(Extension):
    """Reads and writes the folder's page. ``engine``: see :func:`engine_name`. ``paces``: by place.
    ``clock``: monotonic seconds."""

    def __init__(
        self,
        folder: Path,
        engine: str,
        paces: Mapping[str, Pace],
        clock: Callable[[], float],
        lane: Lane | None = None,
    ) -> None:
        self._folder, self._engine, self._paces, self._clock = folder, engine, paces, clock
        self._lane = Lane("learnt", 1, urgent_bound=1, bound=1) if lane is None else lane
        self._learnt = read_learnt(folder)
        self._next, self._speed_told = clock(), False
        for place, pace in paces.items():
            pace.remembered_s = self._learnt.paces.get(place)
        self._prefill = Prefill()

    def begin_with(self, planned: Prefill) -> Prefill:
        """Return an earlier start's measurement, which is better than the plan, or the plan."""
        speed = self._learnt.engines.get(self._engine)
        known = Prefill(PrefillTime(*speed), Certainty.REMEMBERED) if speed else planned
        self._prefill = known
        return known

    def report(self, report: StepReport) -> None:
        measured = self._prefill.known is Certainty.MEASURED
        now = self._clock()
        if now < self._next and (self._speed_told or not measured):
            return
        if self._lane.submit(self._write):
            self._next, self._speed_told = now + _EVERY_S, measured

    def _write(self) -> None:
        """Write what has changed, on the lane."""
        learnt, changed, line = self._learnt, False, self._prefill.line
        if line is not None and self._prefill.known is Certainty.MEASURED:
            speed = line.per_token, line.per_depth
            known = learnt.engines.pop(self._engine, (0.0, 0.0))
            changed |= any(map(_differs, speed, known))
            learnt.engines[self._engine] = speed if changed else known
        for place, pace in self._paces.items():
            if (seconds := pace.read_s) is not None and _differs(
                seconds, learnt.paces.get(place, 0.0)
            ):
                learnt.paces.pop(place, None)
                learnt.paces[place], changed = seconds, True
        if changed:
            write_learnt(self._folder, learnt)


def _differs(one: float, other: float) -> bool:
    return abs(one - other) > _CHANGED_PART * other
