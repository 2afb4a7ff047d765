"""PagedBlocks: one engine's blocks, and the copies between them and slots."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import LayoutError, StateError
from kvtier.gpu.regions import Array, Copy, Job, Region, block_ids, cut, merged
from kvtier.gpu.rows import MakeRows, rows_of
from kvtier.gpu.staged import Cuts, StagedCopier
from kvtier.gpu.staging import CudaStreams

_SHORT_ROW_BYTES = 8 * PAGE_BYTES


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

    def save(self, jobs: Sequence[Job], _ids: Array) -> Copy:
        for part, first, blocks in jobs:
            runs, scattered = plan(first, blocks)
            for paged, slot in self._groups(part, scattered):
                for at, block, count in runs:
                    np.copyto(slot[:, at : at + count], paged[:, block : block + count])
        return Copy(jobs)

    def load(self, jobs: Sequence[Job], _ids: Array) -> Copy:
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
            if scattered is not None and paged.shape[2] <= _SHORT_ROW_BYTES:
                paged[:, scattered, ::PAGE_BYTES]
            yield paged, slot


def plan(at: int, blocks: Sequence[int]) -> tuple[list[tuple[int, int, int]], Array | None]:
    """Return ``(block in chunk, block id, count)`` of each run of ids, and all ids if runs are
    short."""
    runs, start = [], 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            runs.append((at + start, blocks[start], index - start))
            start = index
    short = len(runs) > 1 and 2 * len(runs) > len(blocks)
    return runs, np.array(blocks, dtype=np.intp) if short else None


_SERVED = ("cpu", "cuda")
"""Kinds of devices that are served. torch calls ROCm's ``cuda`` too."""


def nothing(_part: torch.Tensor) -> None:
    """Return None, as no slot is page-locked."""


class PagedBlocks:
    """An engine's blocks. Raises LayoutError when the regions cannot belong to one engine (none,
    several devices, or unequal block counts), lie on a device that is neither a CPU nor a CUDA
    device, or leave no room for staging memory. ``block_bytes``: of one block in all regions."""

    def __init__(
        self,
        regions: Sequence[Region],
        blocks_per_chunk: int,
        *,
        locked: Cuts = nothing,
        streams: CudaStreams | None = None,
        make_rows: MakeRows = rows_of,
        sharers: int = 1,
    ) -> None:
        """``locked``: tells whether a slot's part is page-locked. ``streams``, ``make_rows``:
        the device's own, unless a test brings some. ``sharers``: objects that share the room for
        staging memory."""
        rows = [region.rows for region in regions]
        kinds = sorted({f"{tensor.shape[0]} blocks on {tensor.device}" for tensor in rows})
        if len(kinds) != 1:
            raise LayoutError(
                f"KV regions have {kinds or 'no members'}; expected one block count on one device"
            )
        self.num_blocks = rows[0].shape[0]
        self.blocks_per_chunk = blocks_per_chunk
        self.block_bytes = sum(tensor.shape[1] for tensor in rows)
        self._regions = list(regions)
        self._device = rows[0].device
        if self._device.type not in _SERVED:
            raise LayoutError(
                f"the KV cache lies on {self._device}; kvtier copies KV of CPUs and of CUDA "
                "devices (NVIDIA, ROCm) only. Run this engine without the kvtier connector"
            )
        if streams is None and self._device.type == "cuda":
            streams = CudaStreams(self._device)
        groups = merged(rows)
        self._copier: HostCopier | StagedCopier = (
            HostCopier(groups, blocks_per_chunk)
            if streams is None
            else StagedCopier(groups, blocks_per_chunk, streams, locked, make_rows, sharers)
        )

    def describe(self) -> dict[str, Any]:
        """Return JSON that decides the meaning of a slot part's bytes, equal for engines that
        differ only in the number of blocks. CPU attention kernels pack keys by the instruction set
        that they find, which no stride shows."""
        return {
            "device": _device_kind(self._device),
            "regions": len(self._regions),
            "layers": [region.layer for region in self._regions],
            "row_bytes": [region.rows.shape[1] for region in self._regions],
            "interior": [[list(axis) for axis in region.interior] for region in self._regions],
        }

    def save(self, jobs: Sequence[Job]) -> Copy:
        """Copy blocks to slots. Every job names all blocks of its chunk. Raises StateError before
        any byte moves. Runs after the work queued on the current stream, of which nothing may
        overwrite the blocks before :meth:`settle`."""
        return self._copier.save(jobs, self._checked(jobs, fewest=self.blocks_per_chunk))

    def settle(self) -> None:
        """Make later work of the current stream wait until the blocks of all saves are read."""
        if isinstance(self._copier, StagedCopier):
            self._copier.settle()

    def load(self, jobs: Sequence[Job]) -> Copy:
        """Copy slots to blocks. A job may cover a part of its chunk. Raises StateError before any
        byte moves. Runs after the work queued on the current stream. The engine may not use the
        blocks before the copy is done, because its stream does not wait for it."""
        return self._copier.load(jobs, self._checked(jobs, fewest=1))

    @property
    def copies_at_once(self) -> bool:
        """Whether a copy is done when its call returns."""
        return isinstance(self._copier, HostCopier)

    def _checked(self, jobs: Sequence[Job], fewest: int) -> Array:
        """Check the jobs. Returns the blocks of all."""
        size, most = self.blocks_per_chunk * self.block_bytes, self.blocks_per_chunk
        for part, first, blocks in jobs:
            if part.dtype != torch.uint8 or part.numel() != size or not part.is_contiguous():
                raise StateError(
                    f"slot part has {part.numel()} of {part.dtype}, stride {part.stride()}; "
                    f"expected {size} dense uint8"
                )
            if first < 0 or not fewest <= len(blocks) <= most - first:
                raise StateError(
                    f"{len(blocks)} blocks from block {first} of a chunk on; expected {fewest} to "
                    f"{most}, all inside it"
                )
        return block_ids(jobs, self.num_blocks)


def _device_kind(device: torch.device) -> str:
    if device.type != "cpu":
        return str(device.type)
    amx = "+AMX" if torch.cpu.get_capabilities().get("amx_tile") else ""
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}{amx}"
