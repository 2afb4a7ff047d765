"""A device made of threads, for real engines on a CPU: side streams run by themselves, late, at
odds with each other.

The engine's own stream is the thread that computes: what it queues it does at once, so a wait of
its stream is a wait of its own. Copies that are right here were ordered by nothing but streams and
events.
"""

import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from kvtier.gpu.staging import CudaStreams

_LATE_S = 0.002


class ThreadedEvent:
    def __init__(self):
        self._happened, self.at = threading.Event(), 0.0

    def happen(self):
        self.at = time.perf_counter()
        self._happened.set()

    def query(self):
        return self._happened.is_set()

    def synchronize(self):
        self._happened.wait()

    def elapsed_time(self, end_event):
        return 1000 * (end_event.at - self.at)


class ThreadedStream:
    """A thread that does what is queued, each thing some time later."""

    def __init__(self, seed):
        self.queue = SimpleQueue[Callable[[], object]]()
        self._draw = random.Random(seed)
        threading.Thread(target=self._run, daemon=True).start()

    def wait_event(self, event):
        self.queue.put(event.synchronize)

    def _run(self):
        while True:
            work = self.queue.get()
            time.sleep(self._draw.random() * _LATE_S)
            with torch.inference_mode():
                work()


class ComputingThread:
    def wait_event(self, event):
        event.synchronize()


class ThreadedStreams(CudaStreams):
    room = free = 1 << 24

    def __init__(self):
        self._engine, self._made = ComputingThread(), 0

    def current(self):
        return self._engine

    def side(self):
        self._made += 1
        return ThreadedStream(self._made)

    apart = torch.inference_mode

    def do(self, stream, work):
        stream.queue.put(work)

    def record(self, stream, *, timing=False):
        event = ThreadedEvent()
        if isinstance(stream, ComputingThread):
            event.happen()
        else:
            stream.queue.put(event.happen)
        return event

    def host_buffer(self, size):
        return torch.zeros(size, dtype=torch.uint8)
