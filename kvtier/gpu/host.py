"""Copies between blocks and slots on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvtier.core.chunk import PAGE_BYTES
from kvtier.gpu.slots import Copy, Job, cut

Array = np.ndarray[Any, Any]
_SHORT_ROW = 8 * PAGE_BYTES


class HostCopier:
    """Copies in CPU memory, on one thread. Of the methods that were measured (bench/NOTES.md) it is
    the simplest that is fast in all layouts.

    Neighbouring blocks move as one strided copy over all regions. Scattered blocks are loaded by
    one assignment for each region. For short scattered rows one byte of every page is read first.
    The page walks then overlap, where otherwise each row would stall.
    """

    def __init__(self, groups: Sequence[torch.Tensor], blocks_per_chunk: int) -> None:
        self._paged = [group.numpy() for group in groups]
        self._shapes = [(group.shape[0], blocks_per_chunk, group.shape[2]) for group in groups]

    def save(self, jobs: Sequence[Job]) -> Copy:
        for part, first, blocks in jobs:
            runs, scattered = plan(first, blocks)
            for paged, slot in self._groups(part, scattered):
                for at, block, count in runs:
                    np.copyto(slot[:, at : at + count], paged[:, block : block + count])
        return Copy(jobs)

    def load(self, jobs: Sequence[Job]) -> Copy:
        for part, first, blocks in jobs:
            runs, scattered = plan(first, blocks)
            for paged, slot in self._groups(part, scattered):
                if scattered is None:
                    for at, block, count in runs:
                        np.copyto(paged[:, block : block + count], slot[:, at : at + count])
                else:
                    for rows, source in zip(
                        paged, slot[:, first : first + len(blocks)], strict=True
                    ):
                        rows[scattered] = source
        return Copy(jobs)

    def _groups(self, part: torch.Tensor, scattered: Array | None) -> Iterator[tuple[Array, Array]]:
        for paged, slot in zip(self._paged, cut(part.numpy(), self._shapes), strict=True):
            if scattered is not None and paged.shape[2] <= _SHORT_ROW:
                paged[:, scattered, ::PAGE_BYTES]
            yield paged, slot


def plan(at: int, blocks: Sequence[int]) -> tuple[list[tuple[int, int, int]], Array | None]:
    """``(block in chunk, block id, count)`` of each run of consecutive ids. When the runs are
    short, it returns all ids too."""
    runs, start = [], 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            runs.append((at + start, blocks[start], index - start))
            start = index
    short = len(runs) > 1 and 2 * len(runs) > len(blocks)
    return runs, np.array(blocks, dtype=np.intp) if short else None
