"""Lane: the threads and bounded queues of one tier. No other file starts threads.

A full lane refuses work and does not queue it. So a slow tier costs misses, and never memory or its
host's time. Reads go before writes, because a request waits for a read and none waits for a write.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger("kvtier.lanes")

Work = Callable[[], None]
R = TypeVar("R")


def future_of(lane: Lane, work: Callable[[], R], *, urgent: bool = False) -> Future[R] | None:
    """Return the future result of ``work`` on the lane, or None if there was no room."""
    future: Future[R] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - for who waits
                future.set_exception(error)

    return future if lane.submit(run, urgent=urgent) else None


class Lane:
    """Two queues and their threads, daemons: a tier that hangs does not keep the process alive."""

    def __init__(self, name: str, threads: int, *, urgent_bound: int, bound: int) -> None:
        self.name = name
        self.threads = threads
        self._bounds = {True: urgent_bound, False: bound}
        self.queues: dict[bool, deque[Work]] = {True: deque(), False: deque()}
        self._changed = threading.Condition()
        self.closed = False
        self._running = 0
        self.failures = 0
        """Number of jobs that raised, which is a bug in a tier. It is logged and never fatal."""
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvtier-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> tuple[int, int]:
        """Numbers of jobs that wait now: urgent ones and others."""
        return len(self.queues[True]), len(self.queues[False])

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        with self._changed:
            return self._done()

    def _done(self) -> bool:
        """Whether no job waits or runs, under the lock."""
        return not self._running and not any(self.queues.values())

    def submit(self, work: Work, *, urgent: bool = False) -> bool:
        """Queue ``work``, urgent work first. False if there was no room: it will never run."""
        with self._changed:
            queue = self.queues[urgent]
            if self.closed or len(queue) >= self._bounds[urgent]:
                return False
            queue.append(work)
            self._changed.notify()
            return True

    def close(self, timeout_s: float) -> bool:
        """Refuse new work, and finish the rest within ``timeout_s``. False if some was not done."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self.closed = True
            self._changed.notify_all()
            while not self._done() and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            clean = self._done()
            for queue in self.queues.values():
                queue.clear()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return clean

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:
                self.failures += 1
                logger.exception("lane %s: work failed; the chunk is dropped", self.name)
            finally:
                del work  # an idle lane keeps nothing alive
                with self._changed:
                    self._running -= 1
                    if self.closed:
                        self._changed.notify_all()

    def _next(self) -> Work | None:
        with self._changed:
            while not any(self.queues.values()):
                if self.closed:
                    return None
                self._changed.wait()
            self._running += 1
            return self.queues[bool(self.queues[True])].popleft()
