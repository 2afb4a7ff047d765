"""The Triton kernel that moves rows between staging memory and blocks. Only CUDA devices import it.

One launch moves all blocks of many chunks in all regions. It runs one program for each tile of a
row, over (block, region, tile). Tables of addresses tell where the rows lie, so it serves every
layout that :mod:`kvtier.gpu.regions` finds, also groups of unequal regions and separate
allocations. Addresses, strides and offsets are 64-bit. Elements are as wide as all rows allow. The
engine's numbers are not compiled in: there is one variant for each element width and tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.gpu.staging import StagingBatch

_WORDS = {
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}
_MOST_WORDS = 1024
"""Most words that one program moves: 8 KiB of the widest words, 8 words for each thread."""


@triton.jit(
    do_not_specialize=["region_count", "row_count", "first_row", "first_region", "to_blocks"]
)  # type: ignore[untyped-decorator]
def _move_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 a launch has no objects
    regions,
    table,
    region_count,
    row_count,
    first_row,
    first_region,
    to_blocks,
    WORD: tl.constexpr,  # noqa: N803
    WORD_BYTES: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    region = regions + first_region + tl.program_id(1)
    base = tl.load(region)
    pitch = tl.load(region + region_count)
    size = tl.load(region + 2 * region_count)
    offset = tl.load(region + 3 * region_count)
    row = table + first_row + tl.program_id(0)
    block = tl.load(row)
    chunk = tl.load(row + row_count)
    index = tl.load(row + 2 * row_count)
    in_blocks = base + block * pitch
    staged = chunk + offset + index * size
    source = tl.where(to_blocks != 0, staged, in_blocks)
    target = tl.where(to_blocks != 0, in_blocks, staged)
    word = tl.program_id(2).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = word < size // WORD_BYTES
    values = tl.load(source.to(tl.pointer_type(WORD)) + word, mask=inside)
    tl.store(target.to(tl.pointer_type(WORD)) + word, values, mask=inside)


class KernelRows:
    """Rows moved by the kernel, one launch a batch. It is compiled and tried out on memory of its
    own when this is made, so that no request waits for that. Raises what Triton raises on a device
    that it does not support, and RuntimeError when the moved bytes are wrong."""

    def __init__(self, groups: Sequence[torch.Tensor], blocks_per_chunk: int) -> None:
        self.launches = 0
        self._word, self._item = groups[0].dtype, groups[0].element_size()
        self._device = groups[0].device
        widest = max(group.shape[2] for group in groups)
        self._tile = min(_MOST_WORDS, 1 << (widest - 1).bit_length())
        self._tiles = -(-widest // self._tile)
        found, offset = list[tuple[int, int, int, int]](), 0
        for group in groups:
            distance, pitch, size = (
                group.stride(0),
                group.stride(1) * self._item,
                group.shape[2] * self._item,
            )
            for region in range(group.shape[0]):
                found.append(
                    (group.data_ptr() + region * distance * self._item, pitch, size, offset)
                )
                offset += blocks_per_chunk * size
        self._regions = torch.tensor(found, dtype=torch.int64).T.contiguous().to(self._device)
        self._try_out()

    def gather(self, batch: StagingBatch, table: torch.Tensor) -> None:
        self._move(batch, table, to_blocks=False)

    def scatter(self, batch: StagingBatch, table: torch.Tensor) -> None:
        self._move(batch, table, to_blocks=True)

    def _move(self, batch: StagingBatch, table: torch.Tensor, *, to_blocks: bool) -> None:
        piece = batch.piece
        grid = batch.rows, piece.end - piece.first, self._tiles
        self._launch(grid, self._regions, table, batch.start, piece.first, to_blocks)
        self.launches += 1

    def _launch(
        self,
        grid: tuple[int, int, int],
        regions: torch.Tensor,
        table: torch.Tensor,
        row: int,
        region: int,
        to: bool,
    ) -> None:
        kernel: Any = _move_rows
        kernel[grid](
            regions,
            table,
            regions.shape[1],
            table.shape[1],
            row,
            region,
            int(to),
            WORD=_WORDS[self._word],
            WORD_BYTES=self._item,
            TILE=self._tile,
        )

    def _try_out(self) -> None:
        """Move rows of one tile both ways: in blocks of two tiles, in two chunks of one block."""
        size = self._tile * self._item
        blocks = (torch.arange(4 * size, device=self._device) % 251).to(torch.uint8)
        before, staged = (
            blocks.clone(),
            torch.zeros(2 * size, dtype=torch.uint8, device=self._device),
        )
        chunks = [staged.data_ptr(), staged.data_ptr() + size]
        regions = torch.tensor([[blocks.data_ptr()], [2 * size], [size], [0]], device=self._device)
        table = torch.tensor([[1, 0], chunks, [0, 0]], device=self._device)
        with (
            torch.cuda.device(self._device)
            if self._device.type == "cuda"
            else torch.inference_mode()
        ):
            self._launch((2, 1, 1), regions, table, 0, 0, False)
            blocks.zero_()
            self._launch((2, 1, 1), regions, table, 0, 0, True)
            rows, wanted = blocks.view(4, size), before.view(4, size)
            right = torch.equal(rows[::2], wanted[::2]) and not bool(rows[1::2].any())
        if not right:
            raise RuntimeError(f"Triton {triton.__version__} moves wrong bytes on {self._device}")
