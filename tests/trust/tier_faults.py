"""What backends come to while they are used: a Redis or an object store that is paused, slow to a
byte a second, dead or flapping. A disk that hangs. A process without free descriptors. Each is a
context. When it ends, the backend is well again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import threading
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import Any

import kvtier.tiers.nvme.files
from kvtier.bench.throttled import Throttle
from tests.child_process import ChildProcess

_PIECE = 64 << 10
_ON_S, _OFF_S = 0.3, 0.7


class Passage(Throttle):
    """A proxy before a server. ``rate``: single bytes a second of its answers. None: all there is.
    A server that is not there is one that refuses: the connection is closed."""

    async def _serve(self, reader, writer):
        try:
            await super()._serve(reader, writer)
        except OSError:
            writer.close()

    async def _pipe(self, reader, writer, slowed):
        try:
            while piece := await reader.read(_PIECE):
                while slowed and piece and (rate := self.rate) is not None:
                    writer.write(piece[:1])
                    await writer.drain()
                    piece = piece[1:]
                    await asyncio.sleep(1 / rate)
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@contextmanager
def paused(server, passage):
    """SIGSTOP."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def dripping(server, passage):
    """One byte a second."""
    passage.rate = 1.0
    try:
        yield
    finally:
        passage.rate = None


@contextmanager
def dead(server, passage):
    """kill -9. It comes back empty."""
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def flapping(server, passage):
    """SIGSTOP and SIGCONT in turns, for ever."""
    over = threading.Event()

    def flap():
        while not over.is_set():
            server.pause()
            over.wait(_OFF_S)
            server.resume()
            over.wait(_ON_S)

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


Fault = Callable[[ChildProcess, Passage], contextlib.AbstractContextManager[None]]
SERVER_FAULTS: dict[str, Fault] = {
    "paused": paused,
    "1 byte/s": dripping,
    "dead": dead,
    "flapping": flapping,
}


class HangingDisk:
    """Stands in for ``os`` in :mod:`kvtier.tiers.nvme.files`: while ``hangs``, no payload comes or
    goes."""

    def __init__(self):
        self._goes = threading.Event()
        self._goes.set()

    def __getattr__(self, name):
        return getattr(os, name)

    def pwritev(self, fd, parts, at):
        self._goes.wait()
        return os.pwritev(fd, parts, at)

    def preadv(self, fd, parts, at):
        self._goes.wait()
        return os.preadv(fd, parts, at)

    @contextmanager
    def hangs(self):
        self._goes.clear()
        try:
            yield
        finally:
            self._goes.set()


@contextmanager
def hanging_disk():
    """NVMe tiers lie on it."""
    files: Any = kvtier.tiers.nvme.files
    files.os = disk = HangingDisk()
    try:
        yield disk
    finally:
        files.os = os


@contextmanager
def nothing_more_to_open(pid, free=0):
    """The process keeps what it has open and may have so many descriptors more. Then it gets
    EMFILE."""
    gc.collect()  # if it is this one: nothing that was forgotten shall free any meanwhile
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    gaps: list[int] = []
    while pid == os.getpid() and (not gaps or gaps[-1] < max(_open_in(pid))):
        gaps.append(os.open(os.devnull, os.O_RDONLY))  # dup2 onto one above the limit would fail
    taken = _open_in(pid)
    numbers = (number for number in count() if number not in taken)
    lowest = [next(numbers) for _ in range(free + 1)]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest[-1], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for gap in gaps:
            os.close(gap)


def _open_in(pid):
    folder = f"/proc/{pid}/fd"
    return {int(number) for number in os.listdir(folder) if os.path.lexists(f"{folder}/{number}")}
