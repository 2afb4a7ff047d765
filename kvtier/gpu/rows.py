"""Moves rows between staging memory and blocks: by one Triton kernel for many chunks, or by torch,
chunk by chunk.

CUDA devices use the kernel (:mod:`kvtier.gpu.kernel`). The only fallback is torch's
``index_select`` and ``index_copy_``, where Triton cannot be imported or does not support the
device. It is correct but slow to queue. It needs a call for every chunk and group of regions, and
torch splits an ``index_copy_`` whose strides exceed 32 bits into some 30 launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvtier.gpu.staging import StagingBatch

logger = logging.getLogger("kvtier.gpu")


class Rows(Protocol):
    """Mover of rows. ``table`` is int64 ``[3, rows]`` on the device: three numbers for each block.

    1. The block id.
    2. The address of byte 0 of the chunk's slot part, as it is staged. It lies outside of the place
       when the place holds a later piece.
    3. The index of the block in its chunk.
    """

    launches: int

    def gather(self, batch: StagingBatch, table: torch.Tensor) -> None:
        """Copy blocks to staging memory, on the current stream."""
        ...

    def scatter(self, batch: StagingBatch, table: torch.Tensor) -> None:
        """Copy staging memory to blocks, on the current stream."""
        ...


MakeRows = Callable[[Sequence[torch.Tensor], int], Rows]
"""Maker of :class:`Rows` from groups of ``merged``, seen as words, and the blocks of a chunk."""


def rows_of(groups: Sequence[torch.Tensor], blocks_per_chunk: int) -> Rows:
    if groups[0].is_cuda:
        try:
            from kvtier.gpu.kernel import KernelRows

            return KernelRows(groups, blocks_per_chunk)
        except Exception as error:  # noqa: BLE001 no Triton, no compiler for its launcher, a device it does not know
            logger.warning(
                "Triton serves no copies on %s (%s: %s): torch copies, with many more launches",
                groups[0].device,
                type(error).__name__,
                error,
            )
    return TorchRows(groups, blocks_per_chunk)


class TorchRows:
    def __init__(self, groups: Sequence[torch.Tensor], blocks_per_chunk: int) -> None:
        self._groups, self._blocks_per_chunk = groups, blocks_per_chunk
        self.launches = 0

    def gather(self, batch: StagingBatch, table: torch.Tensor) -> None:
        for paged, rows, ids in self._parts(batch, table):
            torch.index_select(paged, 1, ids, out=rows)

    def scatter(self, batch: StagingBatch, table: torch.Tensor) -> None:
        for paged, rows, ids in self._parts(batch, table):
            paged.index_copy_(1, ids, rows)

    def _parts(
        self, batch: StagingBatch, table: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return, by chunk and group, regions of the piece, their rows as staged, and block ids."""
        parts, at = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]](), batch.start
        for place, first, count in batch.chunks:
            ids, begin, region = table[0, at : at + count], 0, 0
            for group in self._groups:
                paged = group[max(0, batch.piece.first - region) : max(0, batch.piece.end - region)]
                region += group.shape[0]
                shape = paged.shape[0], self._blocks_per_chunk, paged.shape[2]
                end = begin + shape[0] * shape[1] * shape[2]
                if end > begin:
                    parts.append(
                        (paged, place.words[begin:end].view(shape)[:, first : first + count], ids)
                    )
                begin = end
            at += count
        self.launches += len(parts)
        return parts
