"""Extensions of the worker's half: they fill blocks of requests that wait, by jobs of their own.
They are made when the KV caches are registered. vLLM's worker thread calls the hooks, each rank its
own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.connectors.vllm.metadata import PoolAddress, StepMetadata

if TYPE_CHECKING:
    import torch

Part = Callable[[PoolAddress, int], "torch.Tensor"]
"""Function of pool and slot: this rank's bytes of it, in the first kept group."""


class JobEnd(NamedTuple):
    number: int
    request_id: str | None
    """Request that the load was for. None if it goes on with another job of that number."""
    blocks: Sequence[int]
    failed: bool


class WorkerExtension:
    """Base of all: no hook has an effect."""

    def described(self) -> dict[str, Any]:
        """Return fields of :class:`~kvtier.connectors.vllm.metadata.RankLayout` that it sets."""
        return {}

    def pools(self, metadata: StepMetadata) -> set[PoolAddress]:
        """Return the pools of its jobs: those of this step, and those that have not ended."""
        return set()

    def has_work(self, metadata: StepMetadata) -> bool:
        """Return whether it has work that depends on the weights, which are checked then."""
        return False

    def step(
        self, metadata: StepMetadata, part: Part, is_time: Callable[[], bool], *, refused: bool
    ) -> list[JobEnd]:
        """Go on until all jobs are done or the time is over. Returns the jobs that ended.
        ``refused``: the weights were replaced, so nothing is loaded that others have computed."""
        return []

    def close(self) -> None:
        """Give up the jobs that have not ended."""
