"""What the worker's half asks of the extension that moves tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvtier.connectors.vllm.metadata import SpanJob, SpanPass

if TYPE_CHECKING:
    import torch


class SpanMover(Protocol):
    """One rank's. The worker's thread."""

    why_not_in_place: str
    """Why it computes nothing in place. Empty: it does."""

    @property
    def jobs(self) -> list[SpanJob]:
        """Those that are not through."""

    def begin(self, job: SpanJob) -> None: ...

    def give_up(self) -> list[SpanJob]:
        """Every job that is not through."""

    def go_on(
        self, part: Callable[[SpanJob, int], torch.Tensor], is_time: Callable[[], bool]
    ) -> list[tuple[SpanJob, bool]]:
        """Copy slots until all is through or the time is over. Returns the jobs that ended, and
        whether they failed. ``part(job, slot)``: this rank's bytes of a slot."""

    def compute(self, order: SpanPass) -> None:
        """Compute tokens in place for a job that was copied. Raises when that fails."""
