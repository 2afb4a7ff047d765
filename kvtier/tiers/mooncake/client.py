"""MooncakeStore: Mooncake's store through a process of its own
(:mod:`kvtier.tiers.mooncake.child`), so that nothing that happens in the library happens to an
engine.

Chunks cross by memory that both processes map. A call that takes too long ends that process: the
memory goes with it, so that no late byte lies in what is used again. The next call starts another
one.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from kvtier.core.environment import environment
from kvtier.core.errors import TierError
from kvtier.tiers.mooncake.url import MooncakeUrl, parse
from kvtier.tiers.objects.layout import HEADER_BYTES, room

_LOG = logging.getLogger(__name__)
_CHILD = str(Path(__file__).with_name("child.py"))
_CONNECT_S = 2.0
_START_S = 20.0
_ANSWER_S = 5.0
_SLOWEST = 8 << 20
"""Bytes a second. A call that is slower has failed."""
_SLOWEST_LENT = 1 << 30
"""Bytes a second of the memory that is lent: it may have to be made ready for RDMA."""
_MOST_ANSWER = 1 << 20
"""Bytes. Codes of 512 names, or an error in words, are much less."""
_END_S = 3.0
_LOCAL_BUFFER = 1 << 20
"""For Mooncake itself. Chunks lie in the memory that is shared."""

_GONE = (-703, -704, -712)
"""Not complete, not there, no longer there."""
_OTHER_LENGTH = -600
_FULL = -200
_WORDS = {
    -101: "no host lends memory to the pool",
    -707: "the transfer took longer than the pool keeps what is read",
    -800: "the host that has the chunk, or is to take it, does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}


class MooncakeError(Exception):
    """A call that failed, in words."""


class HopelessError(MooncakeError):
    """Waiting mends nothing."""


Ask = Callable[[str, Sequence[str], int], list[int]]
"""What is asked, of which names, and the bytes that lie in the seat's memory."""


class _Seat(NamedTuple):
    """One call at a time, and the memory for its chunk."""

    connection: Connection
    view: memoryview


class _Child:
    """The process, while it is well. Raises MooncakeError where it does not start, and
    HopelessError where it says why."""

    def __init__(self, url: MooncakeUrl, room_: int, seats: int, python: str) -> None:
        own = _own_address(url)
        memory = os.memfd_create("kvtier-mooncake", os.MFD_CLOEXEC)
        pairs = [socket.socketpair() for _ in range(seats + 1)]
        ours = [Connection(one.detach()) for one, _ in pairs]
        theirs = [two.fileno() for _, two in pairs]
        try:
            os.ftruncate(memory, room_ * seats)
            self._map = mmap.mmap(memory, room_ * seats)
            quiet = None if _LOG.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
            numbers = map(str, (theirs[0], memory, *theirs[1:]))
            self.process = subprocess.Popen(
                [python, "-P", _CHILD, *numbers],
                pass_fds=(memory, *theirs),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=quiet,
                stderr=quiet,
                process_group=0,  # a terminal's Ctrl-C is the engine's; a new session would have a
                # share of the CPU of its own, for which each hand-over waits
            )
        except OSError as error:
            raise MooncakeError(f"no process for Mooncake's client: {error.strerror}") from None
        finally:
            os.close(memory)
            for _, two in pairs:
                two.close()
        self._control = ours[0]
        view = memoryview(self._map)
        self._all = [
            _Seat(one, view[index * room_ : (index + 1) * room_])
            for index, one in enumerate(ours[1:])
        ]
        self.free: SimpleQueue[_Seat] = SimpleQueue()
        setup = [url.own_host or own, url.metadata, url.segment, _LOCAL_BUFFER]
        asked = [room_, [*setup, url.protocol, url.device, url.master]]
        until_set_up = _ANSWER_S + url.segment // _SLOWEST_LENT
        for what, limit_s in (("load", _START_S), (asked, until_set_up)):
            if failed := self.asked(self._control, what, limit_s):
                self.end()
                raise HopelessError(str(failed))
        for seat in self._all:
            self.free.put(seat)

    def asked(self, connection: Connection, what: object, limit_s: float) -> object:
        """The answer. Raises MooncakeError, and has ended the process then."""
        try:
            connection.send_bytes(json.dumps(what).encode())
            if connection.poll(limit_s):
                return json.loads(connection.recv_bytes(_MOST_ANSWER))
            why = f"Mooncake's client gives no answer in {limit_s:.0f} s"
        except ValueError:
            why = "Mooncake's client gives an answer that cannot be read"
        except (EOFError, OSError):
            why = "the process of Mooncake's client has ended"
        self.kill()
        raise MooncakeError(why)

    def kill(self) -> None:
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)

    def end(self) -> None:
        """As a user of Mooncake ends, who takes back what was lent."""
        with suppress(OSError):
            self._control.send_bytes(b"end")
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()


class MooncakeStore:
    """Objects in Mooncake's pool.

    Args:
        url: where its master is.
        chunk_bytes: the largest chunk. A call may take as long as one needs at 8 MiB/s, and five
            seconds more.
        calls: at once. Each has memory for one chunk.
        python: runs Mooncake's client. It has the library.

    Raises ConfigError for a URL that cannot be read. Threads: any. Every method blocks until there
    is an answer or time is over, and raises MooncakeError.
    """

    faults: tuple[type[Exception], ...] = (MooncakeError,)

    def __init__(
        self, url: str, chunk_bytes: int, calls: int, python: str = sys.executable
    ) -> None:
        self.url = parse(url)
        self.label = self.url.label
        self._room, self._calls, self._python = room(chunk_bytes), calls, python
        self._limit_s = _ANSWER_S + chunk_bytes // _SLOWEST
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    def greet(self, folder: str = "") -> None:
        """Start, and ask the master once. Raises MooncakeError when it is away, TierError for what
        only the operator can mend."""
        try:
            self.has([f"{folder}/trial"])
        except HopelessError as error:
            raise TierError(f"{self.label}: {error}") from None

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """See :meth:`~kvtier.tiers.whole_objects.WholeObjects.put`."""
        length = 0
        with self._seat() as (ask, room_):
            for part in parts:
                length = _copied(part, room_, length)
            (code,) = ask("put", [name], length)
        if code == _FULL:
            return 0
        _check(code)
        return length

    def fetch(self, name: str, into: memoryview) -> bytes | None:
        """See :meth:`~kvtier.tiers.whole_objects.WholeObjects.fetch`."""
        head = b""
        with self._seat() as (ask, room_):
            (length,) = ask("get", [name], 0)
            if length == room(into.nbytes):
                _copied(room_[HEADER_BYTES:length], into)
                head = bytes(room_[:HEADER_BYTES])
        if length in _GONE:
            return None
        if length != _OTHER_LENGTH:
            _check(length)
        return head

    def has(self, names: Sequence[str]) -> int:
        """How many of ``names``, from the first on without a gap, are there."""
        with self._seat() as (ask, _):
            codes = ask("has", names, 0)
        held = next((index for index, code in enumerate(codes) if code != 1), len(codes))
        if held < len(codes):
            _check(codes[held])
        return held

    def delete(self, names: Sequence[str]) -> int:
        """See :meth:`~kvtier.tiers.whole_objects.WholeObjects.delete`."""
        with self._seat() as (ask, _):
            codes = ask("delete", names, 0)
        for code in codes:
            if code not in _GONE:
                _check(code)
        return len(names)

    def told(self, error: Exception) -> str:
        return str(error)

    def close(self) -> None:
        """No call may come after it."""
        with self._lock:
            child, self._child, self._closed = self._child, None, True
        if child is not None:
            child.end()

    @contextmanager
    def _seat(self) -> Iterator[tuple[Ask, memoryview]]:
        """One call: what asks, and the memory for its chunk."""
        if not self._lock.acquire(timeout=self._limit_s):
            raise MooncakeError("Mooncake's client is being started")
        try:
            if self._closed:
                raise MooncakeError("it is closed")
            if self._child is None:
                self._child = _Child(self.url, self._room, self._calls, self._python)
            child = self._child
        finally:
            self._lock.release()
        try:
            seat = child.free.get(timeout=self._limit_s)
        except Empty:
            raise MooncakeError("all calls wait for Mooncake's client") from None
        yield partial(self._asked, child, seat), seat.view
        child.free.put(seat)

    def _asked(
        self, child: _Child, seat: _Seat, what: str, names: Sequence[str], size: int
    ) -> list[int]:
        try:
            answer = child.asked(seat.connection, [what, list(names), size], self._limit_s)
            return _codes(answer, len(names))
        except MooncakeError:
            child.kill()
            with self._lock:
                if self._child is child:
                    self._child = None
            raise


def _copied(source: bytes | memoryview, into: memoryview, at: int = 0) -> int:
    """Copy, and let other threads run meanwhile. Where it ended."""
    end = at + memoryview(source).nbytes
    np.copyto(np.frombuffer(into[at:end], np.uint8), np.frombuffer(source, np.uint8))
    return end


def _codes(answer: object, count: int) -> list[int]:
    """One code for each name. Raises MooncakeError for anything else that the library answers."""
    if (
        not isinstance(answer, list)
        or len(answer) != count
        or not all(type(code) is int for code in answer)
    ):
        raise MooncakeError("Mooncake's library gives an answer that makes no sense")
    return answer


def _check(code: int) -> None:
    if code < 0:
        raise MooncakeError(_WORDS.get(code, f"Mooncake's error {code}"))


def _own_address(url: MooncakeUrl) -> str:
    """The address from which this host reaches the master. Raises MooncakeError where nobody
    listens there: Mooncake's client would try for minutes."""
    try:
        with socket.create_connection((url.host.strip("[]"), url.port), _CONNECT_S) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        reason = error.strerror or "no answer in time"
        raise MooncakeError(
            f"no master listens at {url.host}:{url.port} ({reason}); start mooncake_master, or "
            "correct mooncake_url"
        ) from None
