"""Copies between blocks in device memory and slots in host memory, on side streams, through staging buffers.

A chunk is gathered by one kernel into a contiguous buffer on the device (one kernel for each group of regions that lie
at one distance: all layers of vLLM's one allocation), and moved by one DMA; loads go the other way. Who waits for whom,
always on the device, never the host:

======================  =================================================  =========================================
a save's gather         the engine's stream: the forward pass wrote it     the DMA that empties its staging buffer
a save's DMA            its gather
the engine's stream     the gathers, so that it may overwrite the blocks   not the DMAs
a load's DMA            the scatter that empties its staging buffer        not the engine's stream: it may run ahead
a load's scatter        its DMA; the engine's stream: blocks' last users   nothing that the engine queues later
the engine's stream                                                        loads: it uses blocks of done ones only
======================  =================================================  =========================================

A slot that is not page-locked (yet) goes through one of two page-locked buffers; the host copies between buffer and
slot, for a save when somebody asks :meth:`Copy.done`. Such copies are slower, and from the third of a call on the host
waits for a buffer: for a save until the forward pass is through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, cycle

import torch

from kvtier.gpu.regions import widest_word
from kvtier.gpu.slots import Copy, Job, cut
from kvtier.gpu.streams import Event, Streams

_LOADING, _BOUNCING = 4, 2
_MOST_SAVING = 64


class StagedCopier:
    """``pinned`` tells whether a slot's part is page-locked now. One thread.

    A step that saves more than its staging buffers hold makes the engine's stream wait for the DMA of the rest: there
    are as many as the device has room for, at least 2.
    """

    def __init__(
        self,
        groups: Sequence[torch.Tensor],
        blocks_per_chunk: int,
        streams: Streams,
        pinned: Callable[[torch.Tensor], bool],
    ) -> None:
        word = widest_word(groups)
        self._device = groups[0].device
        self._paged = [group.view(word) for group in groups]
        shapes = [(paged.shape[0], blocks_per_chunk, paged.shape[2]) for paged in self._paged]
        words = sum(layers * blocks * width for layers, blocks, width in shapes)
        self._streams, self._pinned = streams, pinned
        self._gathering, self._leaving, self._coming, self._scattering = (streams.side() for _ in range(4))
        fit = max(2, min(_MOST_SAVING, streams.room // (words * word.itemsize)))
        self._saving = cycle([_Staging(words, word, self._device, shapes) for _ in range(fit)])
        self._loading = cycle([_Staging(words, word, self._device, shapes) for _ in range(min(_LOADING, fit))])
        self._bounces = [_Bounce(streams, words * word.itemsize) for _ in range(_BOUNCING)]
        self._bouncing = cycle(self._bounces)
        for stream in (self._gathering, self._leaving, self._coming, self._scattering):
            stream.wait_event(streams.record(streams.current()))  # the buffers' memory may just have been others'

    # ---- saves ---------------------------------------------------------------------------------------------------

    def save(self, jobs: Sequence[Job]) -> Copy:
        with self._nothing_left():
            engine, legs = self._streams.current(), list[_LastLeg]()
            self._gathering.wait_event(self._streams.record(engine))
            ids = self._ids(jobs)
            for number, (part, _, _) in enumerate(jobs):
                legs += self._save_chunk(part, partial(ids, number))
            engine.wait_event(self._streams.record(self._gathering))
            end = self._streams.record(self._leaving)
            return StagedCopy(jobs, end, end, legs)

    def _save_chunk(self, part: torch.Tensor, ids: Callable[[], torch.Tensor]) -> list[_LastLeg]:
        staging, legs = next(self._saving), list[_LastLeg]()
        staging.refill_on(self._gathering)
        self._streams.do(self._gathering, partial(self._gather, staging, ids))
        self._leaving.wait_event(self._streams.record(self._gathering))
        if self._pinned(part):
            self._streams.do(self._leaving, partial(_move, part, staging.bytes))
        else:
            bounce = next(self._bouncing).free()
            self._streams.do(self._leaving, partial(_move, bounce.bytes, staging.bytes))
            legs.append(_LastLeg(part, bounce.bytes, self._streams.record(self._leaving)))
            bounce.user = legs[0].wait
        staging.user = self._streams.record(self._leaving)
        return legs

    def _gather(self, staging: _Staging, ids: Callable[[], torch.Tensor]) -> None:
        with torch.inference_mode():
            for paged, rows in zip(self._paged, staging.rows, strict=True):
                torch.index_select(paged, 1, ids(), out=rows)

    # ---- loads ---------------------------------------------------------------------------------------------------

    def load(self, jobs: Sequence[Job]) -> Copy:
        with self._nothing_left():
            ids = self._ids(jobs)
            self._scattering.wait_event(self._streams.record(self._streams.current()))
            start = self._streams.record(self._scattering, timing=True)
            for number, job in enumerate(jobs):
                self._load_chunk(job, partial(ids, number))
            return StagedCopy(jobs, start, self._streams.record(self._scattering, timing=True), [])

    def _load_chunk(self, job: Job, ids: Callable[[], torch.Tensor]) -> None:
        part, first, blocks = job
        staging, bounce = next(self._loading), None
        staging.refill_on(self._coming)
        if not self._pinned(part):
            bounce = next(self._bouncing).free()
            _move(bounce.bytes, part)
            part = bounce.bytes
        self._streams.do(self._coming, partial(_move, staging.bytes, part))
        arrived = self._streams.record(self._coming)
        if bounce is not None:
            bounce.user = arrived.synchronize
        self._scattering.wait_event(arrived)
        self._streams.do(self._scattering, partial(self._scatter, staging, first, len(blocks), ids))
        staging.user = self._streams.record(self._scattering)

    def _scatter(self, staging: _Staging, first: int, count: int, ids: Callable[[], torch.Tensor]) -> None:
        with torch.inference_mode():
            for paged, rows in zip(self._paged, staging.rows, strict=True):
                paged.index_copy_(1, ids(), rows[:, first : first + count])

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _ids(self, jobs: Sequence[Job]) -> Callable[[int], torch.Tensor]:
        """``number`` of a job -> its block ids on the device. They go there together, from page-locked memory so that
        the host does not wait, on the stream that asks first: no other may ask."""
        every, made = [block for _, _, blocks in jobs for block in blocks], list[torch.Tensor]()
        starts = list(accumulate((len(blocks) for _, _, blocks in jobs), initial=0))

        def of(number: int) -> torch.Tensor:
            if not made:
                ids = torch.tensor(every, dtype=torch.int64)
                cuda = self._device.type == "cuda"
                made.append(ids.pin_memory().to(self._device, non_blocking=True) if cuda else ids)
            return made[0][starts[number] : starts[number + 1]]

        return of

    @contextlib.contextmanager
    def _nothing_left(self) -> Iterator[None]:
        """A call that fails half-way waits for what it has queued: its slots and blocks may then be others' at once."""
        try:
            yield
        except BaseException:
            for stream in (self._gathering, self._leaving, self._coming, self._scattering):
                self._streams.record(stream).synchronize()
            for bounce in self._bounces:
                bounce.free()
            raise


class StagedCopy(Copy):
    """A save or load under way."""

    def __init__(self, jobs: Sequence[Job], start: Event, end: Event, legs: Sequence[_LastLeg]) -> None:
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


class _Staging:
    """One chunk in device memory, whole (``words``, ``bytes``) and as each group's rows. ``user``: its last user is
    through."""

    def __init__(
        self, words: int, word: torch.dtype, device: torch.device, shapes: Sequence[tuple[int, int, int]]
    ) -> None:
        self.words = torch.empty(words, dtype=word, device=device)
        self.bytes = self.words.view(torch.uint8)
        self.rows = list(cut(self.words, shapes))
        self.user: Event | None = None

    def refill_on(self, stream: torch.cuda.Stream) -> None:
        """What is queued on ``stream`` from now on may fill it."""
        if self.user is not None:
            stream.wait_event(self.user)


class _Bounce:
    """One chunk in page-locked host memory, made when first needed; ``user`` waits until its last user is through."""

    def __init__(self, streams: Streams, size: int) -> None:
        self._streams, self._size = streams, size
        self._bytes: torch.Tensor | None = None
        self.user: Callable[[], None] | None = None

    @property
    def bytes(self) -> torch.Tensor:
        if self._bytes is None:
            self._bytes = self._streams.host_buffer(self._size)
        return self._bytes

    def free(self) -> _Bounce:
        """This buffer, when nobody uses it any more."""
        if self.user is not None:
            self.user()
        return self


class _LastLeg:
    """The end of a save whose slot is not page-locked: from the buffer to the slot, by the host, when the DMA is
    through. Runs once, by whoever comes first: the copy's owner, or the buffer's next user."""

    def __init__(self, part: torch.Tensor, buffer: torch.Tensor, arrived: Event) -> None:
        self._way: tuple[torch.Tensor, torch.Tensor] | None = part, buffer
        self._arrived = arrived

    def done(self) -> bool:
        if self._way is not None and self._arrived.query():
            _move(*self._way)
            self._way = None
        return self._way is None

    def wait(self) -> None:
        if self._way is not None:
            self._arrived.synchronize()
            self.done()


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """In inference mode, as all work here: an engine may have made its tensors in it, and such change in it only."""
    with torch.inference_mode():
        target.copy_(source, non_blocking=True)
