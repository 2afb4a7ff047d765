"""MooncakeTier: chunks in the memory that many hosts lend to Mooncake's pool, over TCP or RDMA.

The pool drops what was not used for long, and a dead host's chunks are gone: both are misses.
Mooncake cannot list its objects, so a start recovers nothing: lookups find them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvtier.core.chunk import ChunkKey
from kvtier.core.deadline import Deadline, reach
from kvtier.core.errors import TierError
from kvtier.core.processes import chosen, environment
from kvtier.extensions.mooncake.url import MooncakeUrl, parse
from kvtier.tiers.away import library_process
from kvtier.tiers.away.whole_objects import HEADER_BYTES, ObjectForm, WholeObjectTier, room

MooncakeError = library_process.LibraryError

_CHILD = str(Path(__file__).with_name("child.py"))
_CONNECT_S = 2.0
_ANSWER_S = 5.0
_SLOWEST_BYTES_S = 8 << 20
"""Pace below which a call has failed."""
_LENT_BYTES_S = 1 << 30
"""Pace assumed for making lent memory ready for RDMA."""
_BUFFER_BYTES = 1 << 20
"""Memory for Mooncake's own use. Chunks lie in the shared memory."""

_GONE = (-703, -704, -712)
"""Mooncake's codes of missing objects: not complete, not there, no longer there."""
_OTHER_LENGTH = -600
_FULL = -200
_WORDS = {
    -101: "no host lends memory to the pool",
    -707: "the transfer took longer than the pool keeps what is read",
    -800: "the host that has the chunk, or is to take it, does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}

_VARIABLES = (
    *("MC_*", "MOONCAKE_*", "WITH_NVIDIA_PEERMEM", "GLOG_*", "IBV_*", "RDMAV_*", "MLX4_*"),
    *("MLX5_*", "CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "ASCEND_*", "SSL_CERT_*"),
)


class MooncakeStore:
    """Objects in Mooncake's pool. ``calls``: most at once, each with memory for one chunk.
    ``python``: the interpreter that has Mooncake's library.

    Raises ConfigError for a URL that cannot be read. Threads: any. Every method blocks until there
    is an answer or time is over (five seconds, and what ``chunk_bytes`` need at 8 MiB/s), and
    raises MooncakeError."""

    faults: tuple[type[Exception], ...] = (MooncakeError,)

    def __init__(
        self, url: str, chunk_bytes: int, calls: int, python: str = sys.executable
    ) -> None:
        self.url = parse(url)
        self.label = self.url.label
        limit_s = _ANSWER_S + chunk_bytes // _SLOWEST_BYTES_S
        begin_s = _ANSWER_S + self.url.segment // _LENT_BYTES_S
        library = library_process.Library("Mooncake", _CHILD, python, self._setup, begin_s)
        self._process = library_process.LibraryProcess(
            library, room(chunk_bytes), calls, limit_s, chosen(environment(), *_VARIABLES)
        )

    def _setup(self) -> list[object]:
        """Return arguments of the client's set-up. Raises MooncakeError if no master listens."""
        url, own = self.url, _own_address(self.url)
        setup = [url.own_host or own, url.metadata, url.segment, _BUFFER_BYTES]
        return [*setup, url.protocol, url.device, url.master]

    def greet(self, folder: str = "") -> None:
        """Ask the master once. Raises MooncakeError, or TierError if waiting will not help."""
        try:
            self.has([f"{folder}/trial"])
        except library_process.HopelessError as error:
            raise TierError(f"{self.label}: {error}") from None

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        length = 0
        with self._process.seat() as (ask, room_):
            for part in parts:
                length = library_process.copied(part, room_, length)
            (code,) = self._asked(ask, "put", [name], length)
        if code == _FULL:
            return 0
        _check(code)
        return length

    def fetch(self, name: str, into: memoryview) -> bytes | None:
        head = b""
        with self._process.seat() as (ask, room_):
            (length,) = self._asked(ask, "get", [name])
            if length == room(into.nbytes):
                library_process.copied(room_[HEADER_BYTES:length], into)
                head = bytes(room_[:HEADER_BYTES])
        if length in _GONE:
            return None
        if length != _OTHER_LENGTH:
            _check(length)
        return head

    def has(self, names: Sequence[str]) -> int:
        with self._process.seat() as (ask, _):
            codes = self._asked(ask, "has", names)
        held = next((index for index, code in enumerate(codes) if code != 1), len(codes))
        if held < len(codes):
            _check(codes[held])
        return held

    def delete(self, names: Sequence[str]) -> int:
        with self._process.seat() as (ask, _):
            codes = self._asked(ask, "delete", names)
        for code in codes:
            if code not in _GONE:
                _check(code)
        return len(names)

    def told(self, error: Exception) -> str:
        return str(error)

    def close(self) -> None:
        self._process.close()

    def _asked(
        self, ask: library_process.Ask, what: str, names: Sequence[str], *more: int
    ) -> list[int]:
        """Ask the library for one code a name. Raises MooncakeError for any other answer."""
        answer = ask(what, list(names), *more)
        if (
            not isinstance(answer, list)
            or len(answer) != len(names)
            or not all(type(code) is int for code in answer)
        ):
            raise MooncakeError("Mooncake's library gives an answer that makes no sense")
        return answer


def _check(code: int) -> None:
    if code < 0:
        raise MooncakeError(_WORDS.get(code, f"Mooncake's error {code}"))


def _own_address(url: MooncakeUrl) -> str:
    """Return this host's address towards the master. Raises MooncakeError if the port is closed:
    Mooncake's client would try for minutes."""
    try:
        with reach(url.host.strip("[]"), url.port, Deadline(_CONNECT_S)) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        reason = error.strerror or "no answer in time"
        raise MooncakeError(
            f"no master listens at {url.host}:{url.port} ({reason}); start mooncake_master, or "
            "correct mooncake_url"
        ) from None


class MooncakeTier(WholeObjectTier[MooncakeStore]):
    """Chunks in Mooncake's pool. What this process lent to it is taken back by :meth:`close`.

    A master that does not answer is no error: the tier misses and refuses until it does. Raises
    TierError for what waiting does not heal: no library, no such protocol, no room for a chunk.

    Threads: any number of lane threads."""

    name = "mooncake"
    _share = "bytes in mooncake_url"

    def __init__(
        self,
        store: MooncakeStore,
        form: ObjectForm,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, form, store.url.bytes_, chunk_bytes, clock)

    def _held(self, run: Sequence[ChunkKey]) -> int:
        names = [self._form.name(key) for key in run]
        return self._call("failed_finds", partial(self._store.has, names)) or 0

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """Return nothing, as an incomplete answer: the pool keeps no owners and cannot list."""
        return [], False
