"""A device made of threads, for real engines on a CPU: side streams run by themselves, late, at
odds with each other.

The engine's own stream is the thread that computes: what it queues it does at once, so a wait of
its stream is a wait of its own. Copies that are right here were ordered by nothing but streams and
events.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from kvtier.gpu.streams import CudaStreams

_LATE_S = 0.002


class ThreadedEvent:
    def __init__(self) -> None:
        self._happened, self.at = threading.Event(), 0.0

    def happen(self) -> None:
        self.at = time.perf_counter()
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self._happened.wait()

    def elapsed_time(self, end_event: ThreadedEvent) -> float:
        return 1000 * (end_event.at - self.at)


class ThreadedStream:
    """A thread that does what is queued, each thing some time later."""

    def __init__(self, seed: int) -> None:
        self.queue = SimpleQueue[Callable[[], object]]()
        self._draw = random.Random(seed)
        threading.Thread(target=self._run, daemon=True).start()

    def wait_event(self, event: ThreadedEvent) -> None:
        self.queue.put(event.synchronize)

    def _run(self) -> None:
        while True:
            work = self.queue.get()
            time.sleep(self._draw.random() * _LATE_S)
            work()


class ComputingThread:
    def wait_event(self, event: ThreadedEvent) -> None:
        event.synchronize()


class ThreadedStreams(CudaStreams):
    room = free = 1 << 24

    def __init__(self) -> None:
        self._engine, self._made = ComputingThread(), 0

    def current(self) -> ComputingThread:
        return self._engine

    def side(self) -> ThreadedStream:
        self._made += 1
        return ThreadedStream(self._made)

    def do(self, stream: ThreadedStream, work: Callable[[], object]) -> None:
        stream.queue.put(work)

    def record(self, stream: Any, *, timing: bool = False) -> ThreadedEvent:
        event = ThreadedEvent()
        if isinstance(stream, ComputingThread):
            event.happen()
        else:
            stream.queue.put(event.happen)
        return event

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)
