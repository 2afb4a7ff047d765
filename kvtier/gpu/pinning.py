"""Page-locking of shared regions, so that a device's DMA reaches slots without the host's help."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvtier.core.lanes import Executor, Lane
from kvtier.gpu.slots import slot_tensor

logger = logging.getLogger("kvtier.gpu")

_PIECE_BYTES = 256 << 20
_CLOSE_S = 10.0


@dataclass
class _Region:
    """One mapping. ``pieces`` are those locked so far, from ``base`` on; ``guard`` is held while one is locked."""

    base: int
    size: int
    step: int
    pieces: list[int] = field(default_factory=list)
    locked: int = 0
    """Bytes from ``base`` on that are locked: written by the lane, read by the worker."""
    ended: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)


class Pinning:
    """Which host memory is page-locked. :meth:`begin`, :meth:`covers` and :meth:`end` are the worker's thread's.

    Locking goes on in the background (a lane's thread), piece by piece, because a registration reads every page table
    entry and holds the driver's lock meanwhile. Pieces end between slots: one DMA must not cross two of them. When the
    driver refuses, what is locked stays so, the rest is copied through a small buffer, and the log says so once.
    """

    def __init__(
        self,
        device: torch.device | None,
        *,
        runtime: Any = None,
        lane: Executor | None = None,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        """``runtime`` stands for ``torch.cuda.cudart()``; without ``device`` the calling thread's is taken."""
        self._device = device
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        self._lane = Lane("pinning", 1, urgent_bound=1, bound=16) if lane is None else lane
        self._piece_bytes = piece_bytes
        self._regions: dict[int, _Region] = {}

    def begin(self, buffer: memoryview, slot_bytes: int) -> None:
        """Start to lock a mapping of whole slots. It must not be unmapped before :meth:`end`."""
        step = max(1, self._piece_bytes // slot_bytes) * slot_bytes
        region = _Region(_address(buffer), buffer.nbytes, step)
        self._regions[region.base] = region
        self._submit(region)

    def covers(self, part: torch.Tensor) -> bool:
        """Whether a slot's part is locked."""
        start, end = part.data_ptr(), part.data_ptr() + part.nbytes
        return any(one.base <= start and end <= one.base + one.locked for one in self._regions.values())

    def end(self, buffer: memoryview) -> None:
        """Unlock a mapping; every copy from or to it must be done. Waits for the piece that is being locked."""
        region = self._regions.pop(_address(buffer), None)
        if region is None:
            return
        with region.guard, self._on_device():
            region.ended = True
            for piece in region.pieces:
                self._runtime.cudaHostUnregister(piece)

    def close(self) -> None:
        """Stop; every mapping must have been ended."""
        self._lane.close(_CLOSE_S)

    def _submit(self, region: _Region) -> None:
        if not self._lane.submit(partial(self._lock_piece, region)) and not region.ended:
            logger.warning(
                "page-locking stopped at %d of %d bytes: its lane is full or closed", region.locked, region.size
            )

    def _lock_piece(self, region: _Region) -> None:
        """On the lane's thread, whose own last error is what the driver leaves after a refusal."""
        with region.guard, self._on_device():
            if region.ended:
                return
            start, size = region.base + region.locked, min(region.step, region.size - region.locked)
            refusal = _code(self._runtime.cudaHostRegister(start, size, 0))
            if refusal:
                logger.warning(
                    "cudaHostRegister refused %d bytes (error %d) after %d of %d: copies of the other slots go through "
                    "a buffer and are slower; see `ulimit -l` and the host's free memory",
                    size, refusal, region.locked, region.size,
                )  # fmt: skip
                return
            region.pieces.append(start)
            region.locked += size
        if region.locked < region.size:
            self._submit(region)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """A thread that never chose a device would open a context on the first one."""
        return contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device)


def _address(buffer: memoryview) -> int:
    return int(slot_tensor(buffer).data_ptr())


def _code(error: Any) -> int:
    """torch hands CUDA's error codes out as an enumeration."""
    return int(getattr(error, "value", error))
