"""Paged KV blocks <-> slots, on the engine's device (CPU tensors too). The only core file that imports torch.

A *region* is one KV tensor of the engine seen as rows: ``[num_blocks, row_bytes]`` uint8, one row a block. A rank's
part of a slot holds one chunk, region-major::

    [region][block in chunk][row_bytes]

so a chunk's bytes do not depend on which blocks it lay in. Regions at one distance from each other (the layers of
vLLM's one backing allocation) are merged into ``[regions, num_blocks, row_bytes]``, to be moved by one strided copy.

Rules for the caller:

- *Saves*: until :meth:`Copy.done` is true (or :meth:`Copy.wait` returned) nobody may overwrite the job's blocks (the
  engine must not give them to another request) nor read the slot.
- *Loads*: until then, nobody may write to the slot. Work queued on the current stream after :meth:`PagedBlocks.load`
  sees the loaded blocks; work of other streams has to wait for the copy.
- One thread a :class:`PagedBlocks`: the worker's own.

On a CPU device every copy is finished when the call returns. On CUDA, saves and loads have a side stream and one
chunk-sized staging buffer each: a gather kernel collects the blocks, one DMA moves the chunk. ``tests/unit`` runs this
on CPU tensors; streams, events and pinning run only where ``tests/gpu`` finds a GPU.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtier.chunk import PAGE_BYTES
from kvtier.errors import LayoutError, StateError

Job = tuple[torch.Tensor, int, Sequence[int]]
"""(this rank's part of the slot, first block in the chunk, block ids from there on)."""

Array = np.ndarray[Any, Any]
_SHORT_ROW = 8 * PAGE_BYTES
_PIN_PIECE = 1 << 30


@dataclass(frozen=True, slots=True)
class Region:
    """``rows`` is ``[num_blocks, row_bytes]`` uint8 with stride ``(pitch, 1)``, a view of the engine's memory.

    ``interior`` tells how a row is laid out: ``(extent, stride in bytes)`` an axis, in the engine's logical order.
    """

    layer: str
    rows: torch.Tensor
    interior: tuple[tuple[int, int], ...]


def regions_of(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> list[Region]:
    """The engine's per-layer KV tensors as regions, in the mapping's order; layers that alias one tensor count once.

    The block axis is axis 0 (``num_blocks`` or, where a block is several kernel blocks, a multiple) or axis 1 behind a
    leading 2 (keys | values). The rest goes by strides: an axis outside the blocks (keys | values, heads before blocks)
    gives a region an index; the others must fill a row without a hole, or LayoutError names the layer. Rows may lie
    apart (padded pages, layers packed inside a block).
    """
    found: dict[tuple[int, int, int], Region] = {}
    for layer, cache in kv_caches.items():
        for region in _layer_regions(layer, cache, num_blocks):
            found.setdefault((region.rows.data_ptr(), region.rows.shape[1], region.rows.stride(0)), region)
    return list(found.values())


def _layer_regions(layer: str, cache: torch.Tensor, num_blocks: int) -> Iterator[Region]:
    axis = _block_axis(layer, cache, num_blocks)
    item = cache.element_size()
    axes = [(extent, stride * item) for extent, stride in zip(cache.shape, cache.stride(), strict=True)]
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
        raise LayoutError(f"KV cache of layer {layer} is a {type(cache).__name__}; expected one tensor (attention KV)")
    first_fits = cache.ndim > 1 and cache.shape[0] > 0 and cache.shape[0] % num_blocks == 0
    second_fits = cache.ndim > 2 and cache.shape[0] == 2 and cache.shape[1] % num_blocks == 0
    if first_fits and second_fits and num_blocks > 1 and cache.ndim > 4:
        raise _unsupported(layer, cache, num_blocks, "two axes could be the blocks; give the engine more KV memory")
    if not (first_fits or second_fits):
        raise _unsupported(layer, cache, num_blocks, "no axis counts the blocks")
    return 0 if first_fits else 1


def _dense_bytes(axes: Sequence[tuple[int, int]], item: int) -> int | None:
    """Bytes the axes span together; None when they leave a hole or overlap."""
    dense = item
    for extent, stride in sorted(axes, key=lambda pair: pair[1]):
        if stride != dense:
            return None
        dense *= extent
    return dense


def _unsupported(layer: str, cache: torch.Tensor, num_blocks: int, why: str) -> LayoutError:
    what = f"shape {tuple(cache.shape)} and stride {cache.stride()} for {num_blocks} blocks: {why}"
    remedy = "kvtier needs one dense row a block; choose another attention backend or KV cache layout"
    return LayoutError(f"KV cache of layer {layer} has {what}. {remedy}")


def slot_tensor(view: memoryview) -> torch.Tensor:
    """The slot's bytes as a uint8 tensor, zero copy; it keeps the mapping alive. Raises StateError if read-only."""
    if view.readonly:
        raise StateError("slot view is read-only; expected a writable view of the pool")
    return torch.frombuffer(view, dtype=torch.uint8)


class Copy:
    """A save or load under way; keeps the slots' memory mapped. Hold it until it is done. See the rules above."""

    __slots__ = ("_event", "_parts")

    def __init__(self, jobs: Sequence[Job], stream: torch.cuda.Stream | None = None) -> None:
        self._parts = [part for part, _, _ in jobs]
        self._event = None if stream is None else stream.record_event()

    def done(self) -> bool:
        """Whether every byte has arrived; never blocks. On a CPU device always true."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Block the calling thread until :meth:`done`."""
        if self._event is not None:
            self._event.synchronize()


class PagedBlocks:
    """Copies between an engine's paged blocks and slots; ``block_bytes`` is what one block takes in all regions.

    Raises LayoutError when the regions cannot belong to one engine (none, several devices, unequal block counts).
    """

    def __init__(self, regions: Sequence[Region], blocks_per_chunk: int) -> None:
        rows = [region.rows for region in regions]
        kinds = sorted({f"{tensor.shape[0]} blocks on {tensor.device}" for tensor in rows})
        if len(kinds) != 1:
            raise LayoutError(f"KV regions have {kinds or 'no members'}; expected one block count on one device")
        self.num_blocks = rows[0].shape[0]
        self.blocks_per_chunk = blocks_per_chunk
        self.block_bytes = sum(tensor.shape[1] for tensor in rows)
        self._regions = list(regions)
        self._device = rows[0].device
        copier = _HostCopier if self._device.type == "cpu" else _StagedCopier
        self._copier = copier(_merged(rows), blocks_per_chunk)

    def describe(self) -> dict[str, Any]:
        """What decides the meaning of a slot part's bytes; JSON-able, equal for engines of unequal block counts.

        CPU attention kernels pack keys by the instruction set they find, which no stride shows, so it is told too.
        """
        return {
            "device": _device_kind(self._device),
            "regions": len(self._regions),
            "layers": [region.layer for region in self._regions],
            "row_bytes": [region.rows.shape[1] for region in self._regions],
            "interior": [[list(axis) for axis in region.interior] for region in self._regions],
        }

    def save(self, jobs: Sequence[Job]) -> Copy:
        """Blocks -> slots. Every job names all blocks of its chunk. Raises StateError before any byte moves.

        Runs after what is queued on the current stream; later work of that stream does not wait for it.
        """
        self._check(jobs, fewest=self.blocks_per_chunk)
        return self._copier.save(jobs)

    def load(self, jobs: Sequence[Job]) -> Copy:
        """Slots -> blocks. A job may cover a part of its chunk; no other block is touched. Raises StateError before
        any byte moves.

        Runs after what is queued on the current stream; later work of that stream waits for it.
        """
        self._check(jobs, fewest=1)
        return self._copier.load(jobs)

    def _check(self, jobs: Sequence[Job], fewest: int) -> None:
        size, most = self.blocks_per_chunk * self.block_bytes, self.blocks_per_chunk
        for part, first, blocks in jobs:
            if part.dtype != torch.uint8 or part.numel() != size or not part.is_contiguous():
                raise StateError(
                    f"slot part has {part.numel()} of {part.dtype}, stride {part.stride()}; expected {size} dense uint8"
                )
            if first < 0 or not fewest <= len(blocks) <= most - first:
                raise StateError(
                    f"{len(blocks)} blocks from block {first} of a chunk on; expected {fewest} to {most}, all inside it"
                )
            if min(blocks) < 0 or max(blocks) >= self.num_blocks:
                raise StateError(f"block ids {min(blocks)} .. {max(blocks)}; the engine has 0 .. {self.num_blocks - 1}")


def _device_kind(device: torch.device) -> str:
    if device.type != "cpu":
        return str(device.type)
    amx = "+AMX" if torch.cpu.get_capabilities().get("amx_tile") else ""
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}{amx}"


def _merged(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[regions, num_blocks, row_bytes]`` views: one for each stretch of equal regions at one distance in memory."""
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
    return first.as_strided((len(group), *first.shape), (step, *first.stride()), first.storage_offset())


class _HostCopier:
    """CPU memory, one thread. Of the ways measured (bench/NOTES.md) the simplest that is fast in all layouts.

    Neighbouring blocks move as one strided copy over all regions; scattered ones are loaded by an assignment a region.
    For short scattered rows a byte of every page is read first: page walks, else a stall a row, then overlap.
    """

    def __init__(self, groups: Sequence[torch.Tensor], blocks_per_chunk: int) -> None:
        self._paged = [group.numpy() for group in groups]
        self._shapes = [(group.shape[0], blocks_per_chunk, group.shape[2]) for group in groups]

    def save(self, jobs: Sequence[Job]) -> Copy:
        for part, first, blocks in jobs:
            runs, scattered = _plan(first, blocks)
            for paged, slot in self._groups(part, scattered):
                for at, block, count in runs:
                    np.copyto(slot[:, at : at + count], paged[:, block : block + count])
        return Copy(jobs)

    def load(self, jobs: Sequence[Job]) -> Copy:
        for part, first, blocks in jobs:
            runs, scattered = _plan(first, blocks)
            for paged, slot in self._groups(part, scattered):
                if scattered is None:
                    for at, block, count in runs:
                        np.copyto(paged[:, block : block + count], slot[:, at : at + count])
                else:
                    for rows, source in zip(paged, slot[:, first : first + len(blocks)], strict=True):
                        rows[scattered] = source
        return Copy(jobs)

    def _groups(self, part: torch.Tensor, scattered: Array | None) -> Iterator[tuple[Array, Array]]:
        for paged, slot in zip(self._paged, _cut(part.numpy(), self._shapes), strict=True):
            if scattered is not None and paged.shape[2] <= _SHORT_ROW:
                paged[:, scattered, ::PAGE_BYTES]
            yield paged, slot


def _plan(at: int, blocks: Sequence[int]) -> tuple[list[tuple[int, int, int]], Array | None]:
    """``(block in chunk, block id, count)`` of each stretch of neighbouring ids; if those are short, all ids too."""
    runs, start = [], 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            runs.append((at + start, blocks[start], index - start))
            start = index
    short = len(runs) > 1 and 2 * len(runs) > len(blocks)
    return runs, np.array(blocks, dtype=np.intp) if short else None


def _cut(part: Any, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Any]:
    """Views of a flat slot part (array or tensor), one a group of regions."""
    start = 0
    for shape in shapes:
        end = start + shape[0] * shape[1] * shape[2]
        yield part[start:end].reshape(shape)
        start = end


class _StagedCopier:
    """Device memory: gather into (scatter from) a contiguous staging buffer, one host copy a chunk.

    A stream runs its jobs in order, so no gather overtakes the copy that still reads its direction's one buffer.
    """

    def __init__(self, groups: Sequence[torch.Tensor], blocks_per_chunk: int) -> None:
        word = _widest_word(groups)
        self._device = groups[0].device
        self._paged = [group.view(word) for group in groups]
        self._shapes = [(paged.shape[0], blocks_per_chunk, paged.shape[2]) for paged in self._paged]
        words = sum(layers * blocks * width for layers, blocks, width in self._shapes)
        self._staging = [torch.empty(words, dtype=word, device=self._device) for _ in range(2)]
        on_gpu = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) if on_gpu else None for _ in range(2)]

    def save(self, jobs: Sequence[Job]) -> Copy:
        staging, stream = self._staging[0], self._streams[0]
        with _after_current(stream):
            for (part, _, _), index in zip(jobs, self._indices(jobs), strict=True):
                for paged, rows in zip(self._paged, _cut(staging, self._shapes), strict=True):
                    torch.index_select(paged, 1, index, out=rows)
                part.copy_(staging.view(torch.uint8), non_blocking=True)
        return Copy(jobs, stream)

    def load(self, jobs: Sequence[Job]) -> Copy:
        staging, stream = self._staging[1], self._streams[1]
        with _after_current(stream):
            for (part, first, blocks), index in zip(jobs, self._indices(jobs), strict=True):
                staging.view(torch.uint8).copy_(part, non_blocking=True)
                for paged, rows in zip(self._paged, _cut(staging, self._shapes), strict=True):
                    paged.index_copy_(1, index, rows[:, first : first + len(blocks)])
        if stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        return Copy(jobs, stream)

    def _indices(self, jobs: Sequence[Job]) -> Iterator[torch.Tensor]:
        """Every job's block ids on the device; one transfer for all, from pinned memory, so the host does not wait."""
        flat = torch.tensor([block for _, _, blocks in jobs for block in blocks], dtype=torch.int64)
        if self._device.type == "cuda":
            flat = flat.pin_memory().to(self._device, non_blocking=True)
        yield from flat.split([len(blocks) for _, _, blocks in jobs])


def _widest_word(groups: Sequence[torch.Tensor]) -> torch.dtype:
    """The widest integer all rows can be seen as: kernels move an element a thread."""
    for word, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if all(not number % size for g in groups for number in (g.data_ptr(), g.shape[2], g.stride(0), g.stride(1))):
            return word
    return torch.uint8


@contextlib.contextmanager
def _after_current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue on ``stream``, after everything queued on the current stream so far. No stream: run here and now.

    Inference mode, because an engine may have made its tensors in it, and such tensors change in it only.
    """
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.inference_mode(), torch.cuda.stream(stream):  # stream(None) does nothing
        yield


def pin(buffer: memoryview, slot_bytes: int, runtime: Any = None) -> list[int]:
    """Page-lock the pool's region for DMA; returns the registered addresses, for :func:`unpin`.

    Pieces are at most 1 GiB (a registration holds the driver's lock) and end between slots, because one copy must not
    cross two registrations. When the driver refuses, nothing is pinned: copies are then slower, never wrong.
    """
    runtime = torch.cuda.cudart() if runtime is None else runtime
    base = slot_tensor(buffer).data_ptr()
    piece = max(1, _PIN_PIECE // slot_bytes) * slot_bytes
    addresses: list[int] = []
    for start in range(0, buffer.nbytes, piece):
        size = min(piece, buffer.nbytes - start)
        if int(runtime.cudaHostRegister(base + start, size, 0)):
            unpin(addresses, runtime)
            _drop_pending_error()
            return []
        addresses.append(base + start)
    return addresses


def unpin(addresses: Sequence[int], runtime: Any = None) -> None:
    """Undo :func:`pin`; before the region is unmapped, after every :class:`Copy` is done."""
    runtime = torch.cuda.cudart() if runtime is None else runtime
    for address in addresses:
        runtime.cudaHostUnregister(address)


def _drop_pending_error() -> None:
    """A refused call leaves its error with the driver, which the next kernel launch reports: launch one now."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
