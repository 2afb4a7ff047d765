"""An engine's KV tensors as regions: their rows, and which of them can move together. A rank's part
of a slot, copy jobs over it, and the object that a caller keeps during a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from kvtier.core.errors import LayoutError, StateError


@dataclass(frozen=True, slots=True)
class Region:
    """Region of one layer. ``rows``: ``[num_blocks, row_bytes]`` uint8 with stride ``(pitch, 1)``,
    a view of the engine's memory. ``interior``: ``(extent, stride in bytes)`` for each axis of a
    row, in the engine's logical order."""

    layer: str
    rows: torch.Tensor
    interior: tuple[tuple[int, int], ...]


def regions_of(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> list[Region]:
    """View the engine's per-layer KV tensors as regions, in the mapping's order. Layers that share
    one tensor count once.

    The block axis is axis 0, of extent ``num_blocks`` (or a multiple of it, where a block is
    several kernel blocks), or axis 1 after a leading 2 (keys | values). Strides decide the rest. An
    axis outside the blocks (keys | values, or heads before blocks) gives several regions. The other
    axes must fill a row without a hole, or LayoutError names the layer. Rows may lie apart (padded
    pages, or layers packed inside a block).
    """
    found: dict[tuple[int, int, int], Region] = {}
    for layer, cache in kv_caches.items():
        for region in _layer_regions(layer, cache, num_blocks):
            found.setdefault(
                (region.rows.data_ptr(), region.rows.shape[1], region.rows.stride(0)), region
            )
    return list(found.values())


def _layer_regions(layer: str, cache: torch.Tensor, num_blocks: int) -> Iterator[Region]:
    axis = _block_axis(layer, cache, num_blocks)
    item = cache.element_size()
    axes = [
        (extent, stride * item) for extent, stride in zip(cache.shape, cache.stride(), strict=True)
    ]
    extent, stride = axes.pop(axis)
    kernel_blocks = extent // num_blocks
    pitch = stride * kernel_blocks
    axes = [pair for pair in [(kernel_blocks, stride), *axes] if pair[0] > 1]
    interior = tuple(pair for pair in axes if pair[1] < pitch * num_blocks)
    row_bytes = _dense_bytes(interior, item)
    if row_bytes is None or row_bytes > pitch:
        raise _unsupported(layer, cache, num_blocks, "the bytes of one block are not dense")
    offsets = [cache.storage_offset() * item]
    for count, step in (pair for pair in axes if pair not in interior):
        offsets = [offset + index * step for offset in offsets for index in range(count)]
    for offset in offsets:
        rows = torch.empty(0, dtype=torch.uint8, device=cache.device)
        rows.set_(cache.untyped_storage(), offset, (num_blocks, row_bytes), (pitch, 1))
        yield Region(layer, rows, interior)


def _block_axis(layer: str, cache: torch.Tensor, num_blocks: int) -> int:
    if not isinstance(cache, torch.Tensor):
        raise LayoutError(
            f"KV cache of layer {layer} is a {type(cache).__name__}; expected one tensor "
            "(attention KV)"
        )
    first_fits = cache.ndim > 1 and cache.shape[0] > 0 and cache.shape[0] % num_blocks == 0
    second_fits = cache.ndim > 2 and cache.shape[0] == 2 and cache.shape[1] % num_blocks == 0
    if first_fits and second_fits and num_blocks > 1 and cache.ndim > 4:
        raise _unsupported(
            layer, cache, num_blocks, "two axes could be the blocks; give the engine more KV memory"
        )
    if not (first_fits or second_fits):
        raise _unsupported(layer, cache, num_blocks, "no axis counts the blocks")
    return 0 if first_fits else 1


def _dense_bytes(axes: Sequence[tuple[int, int]], item: int) -> int | None:
    """Return the bytes that the axes span, or None if they leave a hole or overlap."""
    dense = item
    for extent, stride in sorted(axes, key=lambda pair: pair[1]):
        if stride != dense:
            return None
        dense *= extent
    return dense


def _unsupported(layer: str, cache: torch.Tensor, num_blocks: int, why: str) -> LayoutError:
    what = f"shape {tuple(cache.shape)} and stride {cache.stride()} for {num_blocks} blocks: {why}"
    remedy = (
        "kvtier needs one dense row a block; choose another attention backend or KV cache layout"
    )
    return LayoutError(f"KV cache of layer {layer} has {what}. {remedy}")


def merged(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Merge equal regions at equal distances into views ``[regions, num_blocks, row_bytes]``."""
    groups: list[list[torch.Tensor]] = []
    for tensor in rows:
        if groups and _continues(groups[-1], tensor):
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return [_stacked(group) for group in groups]


def _continues(group: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
    last = group[-1]
    step = tensor.data_ptr() - last.data_ptr()
    return (
        (tensor.shape, tensor.stride()) == (last.shape, last.stride())
        and tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        and step > 0
        and (len(group) == 1 or step == last.data_ptr() - group[-2].data_ptr())
    )


def _stacked(group: Sequence[torch.Tensor]) -> torch.Tensor:
    first = group[0]
    step = group[1].data_ptr() - first.data_ptr() if len(group) > 1 else 0
    return first.as_strided(
        (len(group), *first.shape), (step, *first.stride()), first.storage_offset()
    )


def widest_word(groups: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the widest integer type that divides all rows: kernels move one element a thread."""
    for word, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if all(
            not number % size
            for g in groups
            for number in (g.data_ptr(), g.shape[2], g.stride(0), g.stride(1))
        ):
            return word
    return torch.uint8


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
