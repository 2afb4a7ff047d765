"""Streams for tests of staged copies on CPU tensors: one kind that runs work at once, one that
holds it back."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from kvtier.gpu.staging import CudaStreams


class Inline(CudaStreams):
    """Streams whose work runs when it is queued, so every event has happened when it is
    recorded."""

    room = free = 1 << 20

    def __init__(self):
        pass

    def current(self):
        return self

    def side(self):
        return self

    apart = torch.inference_mode

    def do(self, stream, work):
        work()

    def record(self, stream, *, timing=False):
        return self

    def host_buffer(self, size):
        return torch.zeros(size, dtype=torch.uint8)

    def wait_event(self, event): ...
    def query(self):
        return True

    def synchronize(self): ...
    def elapsed_time(self, end_event):
        return 2000.0


class HeldEvent:
    """An event of :class:`Held`. ``error`` is what the work before it failed with."""

    def __init__(self, streams):
        self.happened, self.at = False, -1
        self.error: Exception | None = None
        self._streams = streams

    def query(self):
        if self.error is not None:
            raise self.error
        return self.happened

    def synchronize(self):
        while not self.query():
            assert self._streams.turn(), "nothing can go on: this event never happens"

    def elapsed_time(self, end_event):
        """A millisecond a turn."""
        return float(end_event.at - self.at)


class HeldStream:
    """A queue of work, events to record, and events to wait for."""

    def __init__(self):
        self.queue: deque[Any] = deque()
        self.error: Exception | None = None

    def wait_event(self, event):
        self.queue.append(event.query)

    @property
    def blocked(self):
        """Nothing to run, or an event to wait for that has not happened."""
        head = self.queue[0] if self.queue else None
        return head is None or (
            getattr(head, "__func__", None) is HeldEvent.query and not head.__self__.happened
        )


class Held(CudaStreams):
    """Streams that run one thing a turn, in any order a device could: each stream's own order, and
    its waits, hold.

    ``dice`` picks which stream is next. Without, the first that can go on. Work that raises fails
    its stream and every stream that waits for it, as on a device.
    """

    room = free = 0

    def __init__(self, room=1 << 20, dice=None):
        self.room = self.free = room
        self.turns = 0
        self.engine = HeldStream()
        self.all = [self.engine]
        self.host_buffers = 0
        self._dice = dice

    def current(self):
        return self.engine

    def side(self):
        self.all.append(HeldStream())
        return self.all[-1]

    apart = torch.inference_mode

    def do(self, stream, work):
        stream.queue.append(work)

    def record(self, stream, *, timing=False):
        event = HeldEvent(self)
        stream.queue.append(event)
        return event

    def host_buffer(self, size):
        self.host_buffers += 1
        return torch.zeros(size, dtype=torch.uint8)

    # ---- the test's hands ------------------------------------------------------------------------

    def turn(self, *streams):
        """Run one thing of one stream (of the given ones). False: none can go on."""
        ready = [stream for stream in streams or self.all if not stream.blocked]
        if not ready:
            return False
        self._run(self._dice.choice(ready) if self._dice else ready[0])
        return True

    def run(self, *streams):
        """Run the given streams (all of them) as far as they can go."""
        while self.turn(*streams):
            pass

    def _run(self, stream):
        head = stream.queue.popleft()
        self.turns += 1
        if isinstance(head, HeldEvent):
            head.happened, head.at, head.error = True, self.turns, stream.error
            return
        try:
            if stream.error is None:
                with torch.inference_mode():
                    head()
        except RuntimeError as error:
            stream.error = error
