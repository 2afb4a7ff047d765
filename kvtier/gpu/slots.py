"""A rank's part of a slot, copy jobs over it, and the object that a caller keeps during a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from kvtier.core.errors import StateError

Array = np.ndarray[Any, Any]
Job = tuple[torch.Tensor, int, Sequence[int]]
"""Slot part of this rank, a chunk's first block to copy, and block ids from there on."""


def slot_tensor(view: memoryview) -> torch.Tensor:
    """Make a tensor that keeps a view's mapping alive. Raises StateError if it is read-only."""
    if view.readonly:
        raise StateError("slot view is read-only; expected a writable view of the pool")
    return torch.frombuffer(view, dtype=torch.uint8)


class Copy:
    """A copy that is done, as all are on a CPU device. Keeps the slots' memory mapped."""

    seconds: float | None = None
    """Device time of a load that is done, or None if it ran in the caller's own time."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._parts = [part for part, _, _ in jobs]

    def done(self) -> bool:
        """Whether it is done. Never waits. For the thread that copies. RuntimeError on a fault."""
        return True

    def wait(self) -> None:
        return


def block_ids(jobs: Sequence[Job], num_blocks: int) -> Array:
    """Return the blocks of all jobs. Raises StateError for one that the engine does not have."""
    ids = np.fromiter(chain.from_iterable(blocks for _, _, blocks in jobs), np.int64)
    low, high = (ids.min(), ids.max()) if len(ids) else (0, 0)
    if low < 0 or high >= num_blocks:
        raise StateError(f"block ids {low} .. {high}; the engine has 0 .. {num_blocks - 1}")
    return ids


def cut(part: Any, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Any]:
    """Yield views of a flat slot part (array or tensor), one for each group of regions."""
    start = 0
    for shape in shapes:
        end = start + shape[0] * shape[1] * shape[2]
        yield part[start:end].reshape(shape)
        start = end
