"""Lookup: how much of a prompt's prefix can be had, and when. What a Store or a Client answers.
Data only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Progress(NamedTuple):
    """How much of a run is there, in chunks: ``ready`` now; ``coming`` after those, if nothing
    fails on the way."""

    ready: int
    coming: int


class Asking(NamedTuple):
    """What asking a shared tier for the unknown rest of a run would take."""

    answer_s: float | None
    """Seconds until it has answered; None: unknown."""
    arrive_s: float | None
    """Seconds until all of the rest is in RAM, if it has it."""
    odds: float
    """How likely it has it."""


class LookupResult(NamedTuple):
    """How far a run can be served, and when."""

    steps: Sequence[tuple[int, float | None]]
    """``(chunks, seconds)``: so many leading chunks are in RAM so many seconds after they are
    claimed; None: unknown. The first step is what is there now, in no time; the last is all that is
    known of."""
    asking: Asking | None = None
    why: str = ""
    """The reason why there is no more of the run: see :mod:`kvtier.store.miss_reasons`; "": there
    is all, or nobody answered."""

    @property
    def ready(self) -> int:
        return self.steps[0][0]

    @property
    def known(self) -> int:
        return self.steps[-1][0]

    @property
    def coming(self) -> int:
        """Chunks after the ready ones that a lower tier has, or that are on their way."""
        return self.known - self.ready

    @property
    def progress(self) -> Progress:
        return Progress(self.ready, self.coming)


NOTHING = LookupResult([(0, 0.0)])
