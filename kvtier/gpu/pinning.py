"""Page-locking of shared regions, so that a device's DMA reaches slots without the host's help."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.lanes import Lane
from kvtier.gpu.regions import slot_tensor

logger = logging.getLogger("kvtier.gpu")

_PIECE_BYTES = 64 << 20
_LEAST_SPAN_BYTES = 1 << 20
_AHEAD_BYTES = 512 << 20
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Cut:
    """Parts of a mapping to register: the ``length`` bytes from ``offset`` on of every ``step``
    bytes, at most ``piece`` bytes in one call."""

    step: int
    offset: int
    length: int
    piece: int

    @property
    def pieces(self) -> int:
        """Number of pieces in one step."""
        return -(-self.length // self.piece)


def cut_of(slot_bytes: int, span: tuple[int, int], piece_bytes: int) -> _Cut:
    """Cut a rank's own span of each slot, in whole pages, if that saves at least half of the slot
    and is 1 MiB or more: a call costs the driver tens of microseconds, whatever its size. Else cut
    whole slots, as many as fit in a piece. A piece has at most ``piece_bytes`` (or one page), and
    holds whole slots or lies inside one slot."""
    piece = max(PAGE_BYTES, piece_bytes // PAGE_BYTES * PAGE_BYTES)
    begin, end = span[0] // PAGE_BYTES * PAGE_BYTES, -(-span[1] // PAGE_BYTES) * PAGE_BYTES
    if _LEAST_SPAN_BYTES <= end - begin <= slot_bytes // 2:
        return _Cut(slot_bytes, begin, end - begin, piece)
    step = max(1, piece // slot_bytes) * slot_bytes
    return _Cut(step, 0, step, min(piece, step))


@dataclass
class _Region:
    """A mapping. Its pieces have numbers, in the order of addresses. ``guard`` is locked while the
    driver works on a piece. ``short`` guards what both threads change; nobody waits while holding
    it."""

    base: int
    size: int
    cut: _Cut
    is_lent: bool
    wanted: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Pieces to be locked, the next one first."""
    locked: set[int] = field(default_factory=set)
    """Pieces that copies may use."""
    registered: dict[int, int] = field(default_factory=dict)
    """Address of each piece that the driver has. Only with ``guard`` held."""
    has_turn: bool = False
    """Whether it is queued on the lane, or waits until page-locking goes on."""
    waiting: bool = False
    """Whether it is not queued on the lane because page-locking is paused."""
    ended: bool = False
    """Whether nothing is locked any more: the mapping ended, or the driver or the lane refused."""
    guard: threading.Lock = field(default_factory=threading.Lock)
    short: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        steps, rest = divmod(self.size, self.cut.step)
        return steps * self.cut.pieces - (-max(0, rest - self.cut.offset) // self.cut.piece)

    def where(self, number: int) -> tuple[int, int]:
        """Return ``(address, bytes)`` of a piece."""
        step, piece = divmod(number, self.cut.pieces)
        first, at = step * self.cut.step + self.cut.offset, piece * self.cut.piece
        end = min(first + self.cut.length, first + at + self.cut.piece, self.size)
        return self.base + first + at, end - first - at

    def pieces(self, start: int, size: int) -> range:
        """Return the pieces with these bytes. Empty if some bytes are in none."""
        step, at = divmod(start - self.base, self.cut.step)
        at -= self.cut.offset
        if at < 0 or at + size > self.cut.length or start + size > self.base + self.size:
            return range(0)
        first = step * self.cut.pieces
        return range(first + at // self.cut.piece, first + (at + size - 1) // self.cut.piece + 1)

    def want(self, numbers: Iterable[int]) -> bool:
        """Add pieces to be locked. Returns whether the region has to be queued on the lane."""
        with self.short:
            self.wanted.update((one, None) for one in numbers if one not in self.locked)
            queues = bool(self.wanted) and not self.has_turn and not self.ended
            self.has_turn |= queues
            return queues

    def take(self) -> int | None:
        with self.short:
            self.has_turn = bool(self.wanted) and not self.ended
            return self.wanted.popitem(last=False)[0] if self.has_turn else None

    def took(self, number: int) -> bool:
        """Note a locked piece, unless it is wanted again, because its pages were replaced
        meanwhile. Returns whether the region stays in the lane's queue."""
        with self.short:
            if number not in self.wanted:
                self.locked.add(number)
            self.has_turn = bool(self.wanted)
            return self.has_turn


class Pinning:
    """Page-locking of host memory. Only the worker's thread calls its methods.

    A lane's thread locks in the background, in pieces of at most 64 MiB. A registration reads every
    page table entry and has the driver's and the process's memory locks meanwhile. So after each
    piece the thread rests as long as the piece took, and others get those locks. When the driver
    refuses, the locked pieces stay locked, the rest is copied through a small buffer, and the log
    says so once.

    Of a pool that a server *lends*, others use slots too. So a slot is locked when a copy first
    needs it, and with it the 512 MiB that follow. That copy goes through the small buffer. When the
    server gives a slot's memory back to the host and later takes new memory for it, the device
    still has the old pages. So the worker says which slots have other pages (:meth:`renew`). No
    piece has parts of two slots, because copies of other slots may be running then.

    A registration from any thread may spoil a CUDA graph that is being captured. So nothing is
    locked from :meth:`hold` to :meth:`go_on`, nor between two calls of :meth:`look` if the first
    finds a capture.
    """

    def __init__(
        self,
        device: torch.device | None,
        *,
        runtime: Any = None,
        lane: Lane | None = None,
        piece_bytes: int = _PIECE_BYTES,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        rest: Callable[[float], object] = time.sleep,
    ) -> None:
        """``device``: None for the calling thread's. ``runtime`` stands for
        ``torch.cuda.cudart()``. ``piece_bytes``: most bytes in one registration. ``capturing``:
        whether the calling thread captures a CUDA graph now. ``rest`` takes seconds."""
        self._device = device
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        self._lane = Lane("pinning", 1, urgent_bound=1, bound=16) if lane is None else lane
        self._piece_bytes = piece_bytes
        self._capturing, self._rest = capturing, rest
        self._regions: dict[int, _Region] = {}
        self._known = dict[tuple[int, int], tuple[int, ...]]()
        """Cuts of locked parts, by address and bytes."""
        self._held = False

    def begin(
        self,
        buffer: memoryview,
        slot_bytes: int,
        span: tuple[int, int] | None = None,
        *,
        is_lent: bool = False,
    ) -> None:
        """Start to lock a mapping of whole slots: ``span`` of each, or more (:func:`cut_of`). With
        ``is_lent`` only slots that copies need are locked. The mapping must not be unmapped before
        :meth:`end`."""
        most = min(self._piece_bytes, slot_bytes) if is_lent else self._piece_bytes
        cut = cut_of(slot_bytes, span or (0, slot_bytes), most)
        region = _Region(_address(buffer), buffer.nbytes, cut, is_lent)
        self._regions[region.base] = region
        self._want(region, () if is_lent else range(region.count))

    def cuts(self, part: torch.Tensor) -> tuple[int, ...] | None:
        """Return the offsets in a slot's part at which two pieces meet: no DMA may cross those.
        None unless all of the part is locked."""
        start, size = where = part.data_ptr(), part.nbytes
        if (known := self._known.get(where)) is not None:
            return known
        for one in self._regions.values():
            if one.base <= start < one.base + one.size:
                numbers = one.pieces(start, size)
                if numbers and one.locked.issuperset(numbers):
                    found = tuple(one.where(number)[0] - start for number in numbers[1:])
                    return self._known.setdefault(where, found)
                if numbers and one.is_lent:
                    ahead = _AHEAD_BYTES // min(one.cut.length, one.cut.piece)
                    self._want(one, range(numbers[0], min(numbers[-1] + 1 + ahead, one.count)))
                return None
        return None

    def renew(self, part: torch.Tensor) -> None:
        """Lock a slot's part again, whose pages were replaced. No copy of it may be running."""
        self._known.clear()
        start, size = part.data_ptr(), part.nbytes
        for one in self._regions.values():
            if one.base <= start < one.base + one.size:
                numbers = one.pieces(start, size)
                with one.short:
                    one.locked.difference_update(numbers)
                self._want(one, numbers)

    def look(self) -> None:
        """Pause locking while the calling thread captures a graph."""
        (self.hold if self._capturing() else self.go_on)()

    def hold(self) -> None:
        """Lock nothing until :meth:`go_on`. Waits for the piece that is being locked."""
        self._held = True
        for region in self._regions.values():
            with region.guard:
                pass

    def go_on(self) -> None:
        if not self._held:
            return
        self._held = False
        for region in self._regions.values():
            with region.guard:
                waiting, region.waiting = region.waiting, False
            if waiting:
                self._submit(region)

    def end(self, buffer: memoryview) -> None:
        """Unlock a mapping whose copies are all done. Waits for the piece that is being locked."""
        self._known.clear()
        region = self._regions.pop(_address(buffer), None)
        if region is None:
            return
        with region.guard, self._on_device():
            region.ended = True
            for piece in region.registered.values():
                self._runtime.cudaHostUnregister(piece)

    def close(self) -> None:
        """Stop the lane, when every mapping was ended."""
        self._lane.close(_CLOSE_S)

    def _want(self, region: _Region, numbers: Iterable[int]) -> None:
        if region.want(numbers):
            self._submit(region)

    def _submit(self, region: _Region) -> None:
        if not self._lane.submit(partial(self._lock_piece, region)) and not region.ended:
            region.ended = True
            logger.warning(
                "page-locking of %d bytes stopped after %d pieces: its lane is full or closed",
                region.size,
                len(region.locked),
            )

    def _lock_piece(self, region: _Region) -> None:
        """Lock the next piece. A refusal leaves an error set on its thread, which is the lane's."""
        with region.guard, self._on_device():
            if self._held and not region.ended:
                region.waiting = True
                return
            number = region.take()
            if number is None:
                return
            address, size = region.where(number)
            begun = time.perf_counter()
            if region.registered.pop(number, None) is not None:
                self._runtime.cudaHostUnregister(address)
            answer = self._runtime.cudaHostRegister(address, size, 0)
            refusal = int(getattr(answer, "value", answer))  # torch returns an enumeration
            took = time.perf_counter() - begun
            if refusal:
                region.ended = True
                logger.warning(
                    "cudaHostRegister refused %d bytes (error %d) after %d pieces of up to %d in a "
                    "mapping of %d: copies of the other slots go through a buffer and are slower; "
                    "see `ulimit -l` and free memory",
                    size,
                    refusal,
                    len(region.registered),
                    region.cut.piece,
                    region.size,
                )
                return
            region.registered[number] = address
            more = region.took(number)
        if more:
            self._rest(took)
            self._submit(region)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Choose the device: a thread that never did would open a context on the first one."""
        return contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device)


def _address(buffer: memoryview) -> int:
    return int(slot_tensor(buffer).data_ptr())
