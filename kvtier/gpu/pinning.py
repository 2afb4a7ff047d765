"""Page-locking of shared regions, so that a device's DMA reaches slots without the host's help."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.lanes import Executor, Lane
from kvtier.gpu.slots import slot_tensor

logger = logging.getLogger("kvtier.gpu")

_PIECE_BYTES = 64 << 20
_LEAST_SPAN = 1 << 20
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a mapping is registered: of every ``step`` bytes, the ``length`` bytes from ``offset``
    on, with at most ``piece`` bytes in one call."""

    step: int
    offset: int
    length: int
    piece: int

    @property
    def pieces(self) -> int:
        """Pieces in one step."""
        return -(-self.length // self.piece)


def cut_of(slot_bytes: int, span: tuple[int, int], piece_bytes: int) -> _Cut:
    """Decide what to lock of a mapping of slots.

    It is a rank's own span of each slot, in whole pages, where that saves at least half of the slot
    and is 1 MiB or more. (A call costs the driver tens of microseconds, whatever its size.)
    Otherwise it is whole slots, as many as fit in a piece. A piece has at most ``piece_bytes`` (or
    one page), and holds whole slots or lies inside one slot.
    """
    piece = max(PAGE_BYTES, piece_bytes // PAGE_BYTES * PAGE_BYTES)
    begin, end = span[0] // PAGE_BYTES * PAGE_BYTES, -(-span[1] // PAGE_BYTES) * PAGE_BYTES
    if _LEAST_SPAN <= end - begin <= slot_bytes // 2:
        return _Cut(slot_bytes, begin, end - begin, piece)
    step = max(1, piece // slot_bytes) * slot_bytes
    return _Cut(step, 0, step, min(piece, step))


@dataclass
class _Region:
    """One mapping. ``guard`` is locked while a piece is being page-locked."""

    base: int
    size: int
    cut: _Cut
    pieces: list[int] = field(default_factory=list)
    """The beginnings of the locked pieces, in order. The lane writes it, the worker reads it."""
    waiting: bool = False
    """Its next piece is not queued on the lane, because page-locking is paused."""
    ended: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> tuple[int, int] | None:
        """``(address, bytes)`` of the first piece that is not locked."""
        step, piece = divmod(len(self.pieces), self.cut.pieces)
        begin = step * self.cut.step + self.cut.offset + piece * self.cut.piece
        end = (
            step * self.cut.step
            + self.cut.offset
            + min(self.cut.length, (piece + 1) * self.cut.piece)
        )
        return (self.base + begin, min(end, self.size) - begin) if begin < self.size else None

    def cuts(self, start: int, size: int) -> tuple[int, ...] | None:
        step, at = divmod(start - self.base, self.cut.step)
        at -= self.cut.offset
        if at < 0 or at + size > self.cut.length or start + size > self.base + self.size:
            return None
        first, last = at // self.cut.piece, (at + size - 1) // self.cut.piece
        if step * self.cut.pieces + last >= len(self.pieces):
            return None
        return tuple(number * self.cut.piece - at for number in range(first + 1, last + 1))


class Pinning:
    """Knows which host memory is page-locked. Only the worker's thread calls :meth:`begin`,
    :meth:`look`, :meth:`hold`, :meth:`go_on`, :meth:`cuts` and :meth:`end`.

    A lane's thread locks in the background, in pieces of at most 64 MiB. A registration reads every
    page table entry and has the driver's and the process's memory locks meanwhile. So after each
    piece the thread rests as long as the piece took, and others get those locks. When the driver
    refuses, the locked pieces stay locked, the rest is copied through a small buffer, and the log
    says so once.

    A registration from any thread may spoil a CUDA graph that is being captured. So nothing is
    locked from :meth:`hold` to :meth:`go_on`, nor between two calls of :meth:`look` if the first
    finds a capture.
    """

    def __init__(
        self,
        device: torch.device | None,
        *,
        runtime: Any = None,
        lane: Executor | None = None,
        piece_bytes: int = _PIECE_BYTES,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        rest: Callable[[float], object] = time.sleep,
    ) -> None:
        """Nothing is locked before :meth:`begin`.

        Args:
            device: the device; None: the calling thread's.
            runtime: stands for ``torch.cuda.cudart()``.
            lane: the lane on which pieces are locked; None: one of its own.
            piece_bytes: the most bytes in one registration.
            capturing: whether the calling thread is capturing a CUDA graph now.
            rest: sleeps for so many seconds.
        """
        self._device = device
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        self._lane = Lane("pinning", 1, urgent_bound=1, bound=16) if lane is None else lane
        self._piece_bytes = piece_bytes
        self._capturing, self._rest = capturing, rest
        self._regions: dict[int, _Region] = {}
        self._held = False

    def begin(
        self, buffer: memoryview, slot_bytes: int, span: tuple[int, int] | None = None
    ) -> None:
        """Start to lock a mapping of whole slots: of each slot the bytes of ``span``, or all bytes
        without a span. :func:`cut_of` says when more is locked. The mapping must not be unmapped
        before :meth:`end`."""
        cut = cut_of(slot_bytes, span or (0, slot_bytes), self._piece_bytes)
        region = _Region(_address(buffer), buffer.nbytes, cut)
        self._regions[region.base] = region
        self._submit(region)

    def cuts(self, part: torch.Tensor) -> tuple[int, ...] | None:
        """None unless all of a slot's part is locked. Otherwise the offsets in it at which two
        pieces meet, because no DMA may cross those."""
        start, size = part.data_ptr(), part.nbytes
        for one in self._regions.values():
            if one.base <= start < one.base + one.size:
                return one.cuts(start, size)
        return None

    def look(self) -> None:
        """Called from time to time: pause locking while the calling thread captures a graph."""
        (self.hold if self._capturing() else self.go_on)()

    def hold(self) -> None:
        """Lock nothing until :meth:`go_on`. Waits for the piece that is being locked."""
        self._held = True
        for region in self._regions.values():
            with region.guard:
                pass

    def go_on(self) -> None:
        """Lock again after :meth:`hold`. At any other time it does nothing."""
        if not self._held:
            return
        self._held = False
        for region in self._regions.values():
            with region.guard:
                waiting, region.waiting = region.waiting, False
            if waiting:
                self._submit(region)

    def end(self, buffer: memoryview) -> None:
        """Unlock a mapping. Every copy from it and to it must be done. Waits for the piece that is
        being locked."""
        region = self._regions.pop(_address(buffer), None)
        if region is None:
            return
        with region.guard, self._on_device():
            region.ended = True
            for piece in region.pieces:
                self._runtime.cudaHostUnregister(piece)

    def close(self) -> None:
        """Stop. Every mapping must have been ended."""
        self._lane.close(_CLOSE_S)

    def _submit(self, region: _Region) -> None:
        if not self._lane.submit(partial(self._lock_piece, region)) and not region.ended:
            logger.warning(
                "page-locking of %d bytes stopped after %d pieces: its lane is full or closed",
                region.size,
                len(region.pieces),
            )

    def _lock_piece(self, region: _Region) -> None:
        """On the lane's thread. After a refusal the driver leaves the thread's last error set, and
        here it is set on the lane's thread only."""
        with region.guard, self._on_device():
            piece = region.next()
            if region.ended or piece is None:
                return
            if self._held:
                region.waiting = True
                return
            begun = time.perf_counter()
            refusal = _code(self._runtime.cudaHostRegister(*piece, 0))
            took = time.perf_counter() - begun
            if refusal:
                logger.warning(
                    "cudaHostRegister refused %d bytes (error %d) after %d pieces of up to %d in a "
                    "mapping of %d: copies of the other slots go through a buffer and are slower; "
                    "see `ulimit -l` and free memory",
                    piece[1],
                    refusal,
                    len(region.pieces),
                    region.cut.piece,
                    region.size,
                )
                return
            region.pieces.append(piece[0])
            more = region.next() is not None
        if more:
            self._rest(took)
            self._submit(region)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Choose the device. A thread that never chose one would open a context on the first
        device."""
        return contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device)


def _address(buffer: memoryview) -> int:
    return int(slot_tensor(buffer).data_ptr())


def _code(error: Any) -> int:
    """CUDA's error code as a number. torch returns an enumeration."""
    return int(getattr(error, "value", error))
