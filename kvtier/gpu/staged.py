"""Copies between blocks in device memory and slots in host memory, on side streams, through staging
memory.

One launch (:mod:`kvtier.gpu.rows`) gathers the blocks of some chunks into staging memory on the
device (:mod:`kvtier.gpu.staging`), which has the layout of a slot. One DMA for each chunk moves
them on to the slot. Loads go the other way. DMAs are not merged: the slots of a hit are seldom
neighbours, and a chunk is long enough for a DMA. All waiting is on the device and never on the
host:

- A save's gather waits for the engine's stream, because the forward pass wrote the blocks, and for
  the DMAs that empty its staging memory.
- A save's DMAs wait for their gather.
- The engine's stream waits for the gathers where the caller says that it may overwrite the blocks
  from there on (:meth:`StagedCopier.settle`). It does not wait for the DMAs. When a step saves more
  than staging memory holds, later gathers wait for earlier DMAs, so a caller that knows that the
  blocks stay as they are lets the engine compute meanwhile.
- A load's DMAs wait for the scatter that empties their staging memory. They do not wait for the
  engine's stream and may run ahead of it.
- A load's scatter waits for its DMAs, and for the last use of the blocks on the engine's stream. It
  does not wait for what the engine queues later.
- The engine's stream does not wait for loads, because it uses only blocks of loads that are done.

A slot that is not page-locked (yet) goes through one of two page-locked buffers. The host copies
between buffer and slot. For a save it does so in :meth:`Copy.done`. Such copies
are slower. From the third one in a call on, the host waits for a buffer: for a save until the
forward pass has run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, groupby, pairwise

import numpy as np
import torch

from kvtier.gpu.regions import Array, Copy, Job, widest_word
from kvtier.gpu.rows import MakeRows, rows_of
from kvtier.gpu.staging import CudaStreams, Ring, StagingBatch, StagingSlot, budget, rings

_BOUNCING = 2
Cuts = Callable[[torch.Tensor], Sequence[int] | None]
"""Function that returns the offsets in a slot's part (or a piece of it) at which one DMA must end
and another begin, because two registrations meet there. None if not all of it is page-locked."""
Moves = list[tuple[torch.Tensor, torch.Tensor]]
"""DMAs as (target, source)."""
Staged = tuple[StagingSlot, torch.Tensor]
"""A staging place, and the part of a slot that is staged in it."""


class StagedCopier:
    """Copier for one thread. Raises LayoutError if the device has no room for staging memory."""

    def __init__(
        self,
        groups: Sequence[torch.Tensor],
        blocks_per_chunk: int,
        streams: CudaStreams,
        locked: Cuts,
        make_rows: MakeRows = rows_of,
        sharers: int = 1,
    ) -> None:
        word = widest_word(groups)
        self._device = groups[0].device
        sizes = [
            blocks_per_chunk * group.shape[2] for group in groups for _ in range(group.shape[0])
        ]
        self.budget = budget(sizes, streams.room // sharers, streams.free)
        self.rows = make_rows([group.view(word) for group in groups], blocks_per_chunk)
        self._streams, self._locked = streams, locked
        self._sides = [streams.side() for _ in range(4)]
        self._gathering, self._leaving, self._coming, self._scattering = self._sides
        self._saving, self._loading = rings(self.budget, word, self._device)
        self._bounces = [_Bounce(streams, self.budget.place_bytes) for _ in range(_BOUNCING)]
        self._bouncing = cycle(self._bounces)
        self._unread: torch.cuda.Event | None = None
        """Event of saves' last read of blocks, if the engine's stream does not wait for it yet."""
        for stream in self._sides:
            # others may just have used the memory
            stream.wait_event(streams.record(streams.current()))

    # ---- saves -----------------------------------------------------------------------------------

    def save(self, jobs: Sequence[Job], ids: Array) -> Copy:
        """Queue a save. ``ids``: the blocks of all jobs."""
        if not jobs:
            return Copy(jobs)
        with self._nothing_left():
            engine, legs = self._streams.current(), list[_LastLeg]()
            self._gathering.wait_event(self._streams.record(engine))
            batches, table = self._plan(jobs, ids, self._saving)
            for batch, parts in batches:
                legs += self._save_batch(batch, parts, table)
            self._unread = self._streams.record(self._gathering)
            end = self._streams.record(self._leaving)
            return StagedCopy(jobs, end, end, legs)

    def settle(self) -> None:
        if self._unread is not None:
            self._streams.current().wait_event(self._unread)
            self._unread = None

    def _save_batch(
        self, batch: StagingBatch, parts: Sequence[torch.Tensor], table: _Table
    ) -> list[_LastLeg]:
        places = [place for place, _, _ in batch.chunks]
        _refill(places[-1], self._gathering)
        self._streams.do(self._gathering, partial(_launch, self.rows.gather, batch, table))
        self._leaving.wait_event(self._streams.record(self._gathering))
        pairs, legs = [*zip(places, parts, strict=True)], list[_LastLeg]()
        # the next launch uses the first of these places again, while the DMAs of the last run
        last = max(0, len(pairs) - self._saving.spare)
        for run in filter(None, (pairs[:last], pairs[last:])):
            direct, bouncing = self._ways(batch.number, run)
            for part, staged in bouncing:
                bounce = next(self._bouncing).free()
                buffer = bounce.bytes[: batch.piece.size]
                self._streams.do(self._leaving, partial(_move, [(buffer, staged)]))
                legs.append(_LastLeg(part, buffer, self._streams.record(self._leaving)))
                bounce.user = legs[-1].wait
            if direct:
                self._streams.do(self._leaving, partial(_move, direct))
            _used(run, self._streams.record(self._leaving))
        return legs

    # ---- loads -----------------------------------------------------------------------------------

    def load(self, jobs: Sequence[Job], ids: Array) -> Copy:
        if not jobs:
            return Copy(jobs)
        with self._nothing_left():
            batches, table = self._plan(jobs, ids, self._loading)
            self._scattering.wait_event(self._streams.record(self._streams.current()))
            start = self._streams.record(self._scattering, timing=True)
            for batch, parts in batches:
                self._load_batch(batch, parts, table)
            return StagedCopy(jobs, start, self._streams.record(self._scattering, timing=True), [])

    def _load_batch(
        self, batch: StagingBatch, parts: Sequence[torch.Tensor], table: _Table
    ) -> None:
        pairs = [(place, part) for (place, _, _), part in zip(batch.chunks, parts, strict=True)]
        for _, each in groupby(pairs, lambda pair: pair[0].user):
            run = [*each]
            _refill(run[0][0], self._coming)
            direct, bouncing = self._ways(batch.number, run)
            for part, staged in bouncing:
                bounce = next(self._bouncing).free()
                buffer = bounce.bytes[: batch.piece.size]
                _move([(buffer, part)])
                self._streams.do(self._coming, partial(_move, [(staged, buffer)]))
                bounce.user = self._streams.record(self._coming).synchronize
            if direct:
                moves = [(staged, part) for part, staged in direct]
                self._streams.do(self._coming, partial(_move, moves))
        self._scattering.wait_event(self._streams.record(self._coming))
        self._streams.do(self._scattering, partial(_launch, self.rows.scatter, batch, table))
        _used(pairs, self._streams.record(self._scattering))

    # ---- steps -----------------------------------------------------------------------------------

    def _ways(self, number: int, run: Sequence[Staged]) -> tuple[Moves, Moves]:
        direct, bouncing = Moves(), Moves()
        for place, part in run:
            staged, cuts = place.bytes(number), self._locked(part)
            if cuts is None:
                bouncing.append((part, staged))
            else:
                direct += _cut(part, staged, cuts) if cuts else ((part, staged),)
        return direct, bouncing

    def _plan(
        self, jobs: Sequence[Job], ids: Array, ring: Ring
    ) -> tuple[list[tuple[StagingBatch, list[torch.Tensor]]], _Table]:
        firsts, counts = [first for _, first, _ in jobs], [len(blocks) for _, _, blocks in jobs]
        batches, bases, start = list[tuple[StagingBatch, list[torch.Tensor]]](), list[int](), 0
        for number, piece in enumerate(self.budget.pieces):
            parts = [part for part, _, _ in jobs]
            if len(self.budget.pieces) > 1:
                parts = [part[piece.start : piece.start + piece.size] for part in parts]
            for at in range(0, len(jobs), ring.batch):
                own = slice(at, at + ring.batch)
                places = ring.take(len(counts[own]))
                chunks = [*zip(places, firsts[own], counts[own], strict=True)]
                batches.append((StagingBatch(number, piece, start, chunks), parts[own]))
                bases += [place.address - piece.start for place in places]
                start += sum(counts[own])
        return batches, _Table(ids, firsts, counts, bases, self._device)

    @contextlib.contextmanager
    def _nothing_left(self) -> Iterator[None]:
        """Wait, if a call fails, for its work: others may use its slots and blocks after that."""
        try:
            with self._streams.apart():
                yield
        except BaseException:
            for stream in self._sides:
                self._streams.record(stream).synchronize()
            for bounce in self._bounces:
                bounce.free()
            raise


class StagedCopy(Copy):
    def __init__(
        self,
        jobs: Sequence[Job],
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        legs: Sequence[_LastLeg],
    ) -> None:
        super().__init__(jobs)
        self._start, self._end, self._legs = start, end, legs

    def done(self) -> bool:
        if not all(leg.done() for leg in self._legs) or not self._end.query():
            return False
        if self._start is not self._end:
            self.seconds = self._start.elapsed_time(self._end) / 1000
        return True

    def wait(self) -> None:
        for leg in self._legs:
            leg.wait()
        self._end.synchronize()


class _Table:
    """Rows of a call's launches. They go to the device together, from page-locked memory so that
    the host does not wait, on the stream that asks first. No other stream may ask."""

    def __init__(
        self,
        ids: Array,
        firsts: Sequence[int],
        counts: Sequence[int],
        bases: Sequence[int],
        device: torch.device,
    ) -> None:
        pieces, each = len(bases) // len(counts), np.array(counts)
        rows = np.empty((3, pieces, len(ids)), dtype=np.int64)
        rows[0] = ids
        rows[1] = np.array(bases, dtype=np.int64).reshape(pieces, -1).repeat(each, axis=1)
        before = np.array(firsts) - (each.cumsum() - each)
        rows[2] = np.arange(len(ids)) + before.repeat(each)
        self._rows, self._device = torch.from_numpy(rows.reshape(3, -1)), device
        self._made: torch.Tensor | None = None

    @property
    def on_device(self) -> torch.Tensor:
        if self._made is None:
            cuda = self._device.type == "cuda"
            self._made = (
                self._rows.pin_memory().to(self._device, non_blocking=True) if cuda else self._rows
            )
        return self._made


class _Bounce:
    """A page-locked host buffer for one place, made when it is first needed."""

    def __init__(self, streams: CudaStreams, size: int) -> None:
        self._streams, self._size = streams, size
        self._bytes: torch.Tensor | None = None
        self.user: Callable[[], None] | None = None

    @property
    def bytes(self) -> torch.Tensor:
        if self._bytes is None:
            self._bytes = self._streams.host_buffer(self._size)
        return self._bytes

    def free(self) -> _Bounce:
        """Wait until the last user of the buffer is done."""
        if self.user is not None:
            self.user()
        return self


class _LastLeg:
    """Last step of a save whose slot is not page-locked: the host copies from the buffer to the
    slot when the DMA has run. Its first caller runs it: the copy's owner, or the buffer's next
    user."""

    def __init__(self, part: torch.Tensor, buffer: torch.Tensor, arrived: torch.cuda.Event) -> None:
        self._way: tuple[torch.Tensor, torch.Tensor] | None = part, buffer
        self._arrived = arrived

    def done(self) -> bool:
        if self._way is not None and self._arrived.query():
            with torch.inference_mode():
                _move([self._way])
            self._way = None
        return self._way is None

    def wait(self) -> None:
        if self._way is not None:
            self._arrived.synchronize()
            self.done()


def _refill(place: StagingSlot, stream: torch.cuda.Stream) -> None:
    """Let later work of ``stream`` fill the place, and those that the ring gave before it: one
    stream empties all of them, in the ring's order."""
    if place.user is not None:
        stream.wait_event(place.user)


def _used(run: Sequence[Staged], until: torch.cuda.Event) -> None:
    for place, _ in run:
        place.user = until


def _cut(target: torch.Tensor, source: torch.Tensor, cuts: Sequence[int]) -> Moves:
    bounds = [0, *cuts, len(target)]
    return [(target[begin:end], source[begin:end]) for begin, end in pairwise(bounds)]


def _launch(
    move: Callable[[StagingBatch, torch.Tensor], None], batch: StagingBatch, table: _Table
) -> None:
    move(batch, table.on_device)


def _move(moves: Moves) -> None:
    for target, source in moves:
        target.copy_(source, non_blocking=True)
