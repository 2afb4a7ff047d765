"""LibraryProcess: a library in a process of its own (:mod:`kvtier.tiers.away.library_main`), where
it may hold its interpreter's lock, take memory up to its limit, hang or crash without harm to an
engine. A call that takes too long ends it, and the memory that both processes map.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, NamedTuple

import numpy as np

from kvtier.core import processes

_LOG = logging.getLogger(__name__)
_MAIN = str(Path(__file__).with_name("library_main.py"))
_LOAD_S = 20.0
_ANSWER_BYTES = 1 << 20
"""Most bytes of an answer. Codes of 512 names, or an error's words, are much less."""
_END_S = 3.0
_INCOMPLETE = "{name}'s library is not complete here ({text}); install what it needs"

Ask = Callable[..., Any]
"""Function of a method's name and arguments that returns the library's answer."""


class LibraryError(Exception):
    """Failed call. ``kind`` and ``text``: of the library's error. ``text`` may hold a secret."""

    def __init__(self, words: str, kind: str = "", text: str = "") -> None:
        super().__init__(words)
        self.kind, self.text = kind, text


class HopelessError(LibraryError):
    """Failure that waiting does not mend."""


class Library(NamedTuple):
    name: str
    file: str
    """Path of the program that speaks to it: FILE of :mod:`kvtier.tiers.away.library_main`."""
    python: str
    """Interpreter that has the library."""
    setup: Callable[[], object]
    """Maker of ``begin``'s argument, at each start. Raises LibraryError to prevent one."""
    begin_s: float
    most_bytes: int = 0
    """Limit of memory that is not shared. 0 for no limit."""


class _Seat(NamedTuple):
    """Connection to a thread that takes one call at a time. ``view``: memory for its chunk."""

    connection: Connection
    view: memoryview


class LibraryProcess:
    """Calls to a library in a process of its own.

    Args:
        library: runs in the process.
        room: bytes of memory for each call.
        calls: the most at once.
        limit_s: time for one call.
        environment: of the process, with the library's own secrets and no others: the library's
            other end may be hostile.

    The process starts with the first call. Threads: any."""

    def __init__(
        self,
        library: Library,
        room: int,
        calls: int,
        limit_s: float,
        environment: Mapping[str, str],
    ) -> None:
        self._library, self._limit_s = library, limit_s
        self._start = partial(_Process, library, room, calls, limit_s, environment)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False

    @contextmanager
    def seat(self) -> Iterator[tuple[Ask, memoryview]]:
        """Lend a seat for calls one after another. Lending and calls raise LibraryError, and
        HopelessError where the library says why it does not start."""
        name = self._library.name
        if not self._lock.acquire(timeout=self._limit_s):
            raise LibraryError(f"{name}'s client is being started")
        try:
            if self._closed:
                raise LibraryError("it is closed")
            if self._process is None or self._process.over:
                self._process = self._start()
            process = self._process
        finally:
            self._lock.release()
        try:
            seat = process.free.get(timeout=self._limit_s)
        except Empty:
            raise LibraryError(f"all calls wait for {name}'s client") from None
        try:
            yield partial(process.asked, seat.connection), seat.view
        finally:
            process.free.put(seat)

    def close(self) -> None:
        with self._lock:
            process, self._process, self._closed = self._process, None, True
        if process is not None:
            process.end()


class _Process:
    """Process of a library. Raises LibraryError if it does not start, HopelessError if told why."""

    def __init__(
        self,
        library: Library,
        room: int,
        calls: int,
        limit_s: float,
        environment: Mapping[str, str],
    ) -> None:
        setup = library.setup()
        self._library, self._limit_s = library, limit_s
        memory = os.memfd_create("kvtier-library", os.MFD_CLOEXEC)
        pairs = [socket.socketpair() for _ in range(calls + 1)]
        ours = [_bounded(one, max(limit_s, 1.0)) for one, _ in pairs]
        theirs = [two.fileno() for _, two in pairs]
        try:
            os.ftruncate(memory, room * calls)
            self._map = mmap.mmap(memory, room * calls)
            quiet = None if _LOG.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
            numbers = map(str, (theirs[0], memory, *theirs[1:]))
            self._process = processes.start(
                processes.python(library.python, _MAIN, library.file, *numbers),
                environment,
                pass_fds=(memory, *theirs),
                stdin=subprocess.DEVNULL,
                stdout=quiet,
                stderr=quiet,
                process_group=0,  # a terminal's Ctrl-C is the engine's; a new session would have a
                # share of the CPU of its own, for which each hand-over waits
            )
        except OSError as error:
            raise LibraryError(
                f"no process for {library.name}'s client: {error.strerror}"
            ) from None
        finally:
            os.close(memory)
            for _, two in pairs:
                two.close()
        weakref.finalize(self, _killed, self._process).atexit = False
        self.over = False
        self._control = ours[0]
        view = memoryview(self._map)
        self.free: LifoQueue[_Seat] = LifoQueue()
        """Free seats, last in, first out: that seat's memory is in the CPU's caches."""
        self._told(library.most_bytes, _LOAD_S, _INCOMPLETE)
        self._told([room, setup], library.begin_s, "{text}")
        for index, one in enumerate(ours[1:]):
            self.free.put(_Seat(one, view[index * room : (index + 1) * room]))

    def _told(self, what: object, limit_s: float, words: str) -> None:
        """Do a step of the start. Raises HopelessError with ``words`` about a fault."""
        if fault := self._answer(self._control, what, limit_s):
            self.end()
            _, kind, text = fault
            name = self._library.name
            raise HopelessError(words.format(name=name, text=text), kind, text)

    def asked(self, connection: Connection, *what: object) -> Any:
        """Send a call and return its answer. Without one, end the process. Raises LibraryError."""
        answer, *fault = self._answer(connection, what, self._limit_s)
        if fault:
            kind, text = fault
            raise LibraryError(f"{self._library.name}'s library fails ({kind})", kind, text)
        return answer

    def _answer(self, connection: Connection, what: object, limit_s: float) -> Any:
        name = self._library.name
        try:
            connection.send_bytes(json.dumps(what).encode())
            if connection.poll(limit_s):
                return json.loads(connection.recv_bytes(_ANSWER_BYTES))
            why = f"{name}'s client gives no answer in {limit_s:.0f} s"
        except ValueError:
            why = f"{name}'s client gives an answer that cannot be read"
        except (EOFError, OSError):
            why = f"the process of {name}'s client has ended"
        except BaseException:  # the answer comes later, and is not the next call's
            self._kill()
            raise
        self._kill()
        raise LibraryError(why)

    def _kill(self) -> None:
        self.over = True
        _killed(self._process)

    def end(self) -> None:
        """End the library in order, so that it gives back memory that it registered."""
        self.over = True
        with suppress(OSError):
            self._control.send_bytes(b"end")
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()


def copied(source: bytes | memoryview, into: memoryview, at: int = 0) -> int:
    """Copy without the GIL. Returns the end in ``into``."""
    end = at + memoryview(source).nbytes
    np.copyto(np.frombuffer(into[at:end], np.uint8), np.frombuffer(source, np.uint8))
    return end


def _bounded(ours: socket.socket, limit_s: float) -> Connection:
    """Make a connection whose calls end after ``limit_s``, even within a message."""
    limit = struct.pack("ll", int(limit_s), 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return Connection(ours.detach())


def _killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
