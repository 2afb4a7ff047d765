"""Staging memory on the device: how much of it there is, how a chunk fits into it, in which order
its places are used, and the streams of the copies through it.

All staging memory of an engine is one allocation. It is made once, at registration, and has no more
bytes than :attr:`CudaStreams.room` allows (an eighth of the free memory at that time, 512 MiB at
most). It is cut into equal *places*:

- A place holds one chunk where four chunks fit. With less room it holds a *piece* of a chunk: whole
  regions (layers) that lie together in a slot. The least that works is two places of the largest
  region: 1 MiB each for a layer of 8 KV heads of 128 in bf16 and chunks of 256 tokens. An engine
  with less room is refused, and the message has the numbers.
- Half of the places are for loads, 12 at most. The others are for saves, 64 at most.
- One launch uses seven eighths of a direction's places, so that the others can be filled or emptied
  meanwhile: a place's DMA takes longer than a launch over all of them. A load of 128 chunks (32k
  tokens) takes 64 launches or fewer where six chunks fit, 19 where 16 fit, and 13 where 24 fit.
- In addition there are tables: 24 bytes for each block and piece of a running call, and 32 bytes
  for each region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.core.errors import LayoutError

_MOST_LOADING, _MOST_SAVING = 12, 64
_FEWEST_PLACES = 4


@dataclass(frozen=True, slots=True)
class StagingSegment:
    """Regions ``first`` to ``end`` of a chunk: bytes from ``start`` of a rank's part of a slot."""

    first: int
    end: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Budget:
    pieces: tuple[StagingSegment, ...]
    place_bytes: int
    saving: int
    loading: int

    @property
    def bytes(self) -> int:
        return self.place_bytes * (self.saving + self.loading)


def budget(region_bytes: Sequence[int], room: int, free: int) -> Budget:
    """Divide ``room`` bytes into places. ``region_bytes``: a chunk's bytes in each region. Raises
    LayoutError if nothing fits."""
    largest = max(region_bytes)
    if 2 * largest > room:
        raise LayoutError(
            f"copies need {2 * largest} bytes of device memory (one layer of a chunk for saves, "
            f"one for loads); {room} of the {free} free bytes may be taken. Leave the device more "
            "free memory (--gpu-memory-utilization), or make chunks shorter (chunk_tokens)"
        )
    most = room // _FEWEST_PLACES
    pieces = _even(region_bytes, most if largest <= most else room // 2)
    size = max(piece.size for piece in pieces)
    fit = room // size
    loading = min(_MOST_LOADING, fit // 2)
    return Budget(pieces, size, min(_MOST_SAVING, fit - loading), loading)


def _even(region_bytes: Sequence[int], most: int) -> tuple[StagingSegment, ...]:
    """Cut a chunk into as few pieces of at most ``most`` bytes as possible, with the longest as
    short as that allows (in steps of one region)."""
    fewest, largest = len(list(_pieces(region_bytes, most))), max(region_bytes)
    for limit in range(max(largest, -(-sum(region_bytes) // fewest)), most, largest):
        pieces = tuple(_pieces(region_bytes, limit))
        if len(pieces) == fewest:
            return pieces
    return tuple(_pieces(region_bytes, most))


def _pieces(region_bytes: Sequence[int], most: int) -> Iterator[StagingSegment]:
    first, start, size = 0, 0, 0
    for region, more in enumerate(region_bytes):
        if size + more > most:
            yield StagingSegment(first, region, start, size)
            first, start, size = region, start + size, 0
        size += more
    yield StagingSegment(first, len(region_bytes), start, size)


class StagingSlot:
    """A place. ``user``: the event of its last use."""

    def __init__(self, words: torch.Tensor, pieces: Sequence[StagingSegment]) -> None:
        memory = words.view(torch.uint8)
        self.words, self.address = words, words.data_ptr()
        self.user: torch.cuda.Event | None = None
        self._bytes = [memory[: piece.size] for piece in pieces]

    def bytes(self, piece: int) -> torch.Tensor:
        return self._bytes[piece]


@dataclass(frozen=True, slots=True)
class StagingBatch:
    """One piece of several chunks, moved by one launch."""

    number: int
    piece: StagingSegment
    start: int
    """First row in the call's table."""
    chunks: Sequence[tuple[StagingSlot, int, int]]
    """Place of each chunk, its first block in the chunk, and the number of blocks."""

    @property
    def rows(self) -> int:
        return sum(count for _, _, count in self.chunks)


class Ring:
    """Places of one direction, used in turn."""

    def __init__(self, places: Sequence[StagingSlot]) -> None:
        self._twice, self._count, self._next = [*places, *places], len(places), 0
        self.spare = -(-len(places) // 8)
        self.batch = max(1, len(places) - self.spare)
        """Most places that one launch uses."""

    def take(self, count: int) -> list[StagingSlot]:
        """Take the places used longest ago. ``count``: at most :attr:`batch`."""
        taken = self._twice[self._next : self._next + count]
        self._next = (self._next + count) % self._count
        return taken


def rings(plan: Budget, word: torch.dtype, device: torch.device) -> tuple[Ring, Ring]:
    """Allocate all places at once: the ring for saves, and the one for loads."""
    words = torch.empty(plan.bytes // word.itemsize, dtype=word, device=device)
    places = [
        StagingSlot(one, plan.pieces) for one in words.split(plan.place_bytes // word.itemsize)
    ]
    return Ring(places[: plan.saving]), Ring(places[plan.saving :])


_MOST_STAGING_BYTES, _STAGING_PART = 512 << 20, 8


class CudaStreams:
    """Streams, which run their work in order, and events, which mark a place in a stream: torch's
    own objects. The copies use only what is named here. So tests can run them on CPU tensors, with
    streams that delay work and run it in any order that a device may choose: of a stream
    ``wait_event(event)``, and of an event ``query()``, ``synchronize()`` and
    ``elapsed_time(later)`` in milliseconds.

    CUDA's errors are sticky: after the first one every call of an event raises RuntimeError, also
    the engine's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def room(self) -> int:
        """Bytes of device memory that staging memory may take, a hard limit: an eighth of the
        memory that the engine left free for its own peaks, and at most 512 MiB. A multiple of 2
        MiB, the unit in which torch gets memory from the driver."""
        return min(_MOST_STAGING_BYTES, self.free // _STAGING_PART) >> 21 << 21

    @property
    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def side(self) -> Any:
        return torch.cuda.Stream(self._device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Restore the current stream after calls of :meth:`do`. In inference mode: an engine may
        have made its tensors in that mode, and such tensors change only in it."""
        with torch.inference_mode(), torch.cuda.stream(self.current()):
            yield

    def do(self, stream: Any, work: Callable[[], object]) -> None:
        torch.cuda.set_stream(stream)
        work()

    def record(self, stream: Any, *, timing: bool = False) -> Any:
        return stream.record_event(torch.cuda.Event(enable_timing=timing))

    def host_buffer(self, size: int) -> torch.Tensor:
        """Allocate page-locked memory, so that the device copies without the host's help."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
