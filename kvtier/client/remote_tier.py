"""RemoteTier: a kvtier server on another host as the lowest tier of an engine's own Store.

Each call uses one connection, which is kept for the next call. The bytes of a chunk go straight
between socket and slot, and both ends check their hash. A lane thread and a slot wait for each
call, so it ends in time however slowly the server gives its bytes.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import xxhash

from kvtier.client.connect import PLAIN, ServerAccess, enter
from kvtier.core.chunk import ChunkKey
from kvtier.core.deadline import Deadline, KeptConnections
from kvtier.core.errors import KVTierError, TierError
from kvtier.core.lookup import REMOTE
from kvtier.core.tenant import UNOWNED
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.protocol.wire import proven
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import Breaker

logger = logging.getLogger("kvtier.tiers.remote")

_PIECE_BYTES = 512 * 1024
_CALL_S = 5.0
"""Longest time of a question and its answer, and of the Welcome of a new connection."""
_SLOWEST_BYTES_S = 4 << 20
"""Slowest pace of a chunk's bytes, whose time is added to a call's."""
_MAX_ANSWER_BYTES = 4096
_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
"""Pauses after a fault, doubling from the first to the last. One fault is enough for a pause: a
lane thread waits long for a dead server. The first is short: a broken connection is a fault too."""
_APART_S = 10.0
"""Time between questions, on misses, whether the server keeps the model in another chunk size."""
_REMEMBERED_FACTOR, _LEAST_REMEMBERED_CHUNKS = 2, 131_072
"""Chunks in this engine's directory for each one that fits in the server, and the least number of
them. More than fit: a chunk that leaves the directory is deleted in the server, where others may
still use it."""
R = TypeVar("R")
A = TypeVar("A", bound=wire.Message)


class RemoteTier(Tier):
    """Chunks of ``chunk_bytes`` bytes in the server behind ``access``.

    Threads: all methods from any thread. A connection serves one call at a time. While the server
    cannot be reached, calls fail at once, and one of them tries it again after 0.1 to 5 s.

    Raises ConfigError when the server refuses us at the start. When it is not there, the engine
    starts without it."""

    name = REMOTE
    shared = True

    def __init__(self, access: ServerAccess, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts: Counter[str] = Counter()
        self._access = access
        self._chunk_bytes = access.hello.chunk_bytes
        self._lines = KeptConnections(self._connect)
        self._lock = threading.Lock()
        self._apart = False
        self._clock, self._apart_due = clock, clock()
        self._breaker = Breaker(clock, 1, _WAIT_S, _LONGEST_WAIT_S)
        self.capacity = _LEAST_REMEMBERED_CHUNKS
        if access.is_plain:
            logger.warning(PLAIN, access.address)
        try:
            welcomed = enter(access)
        except TierError as error:
            self._failed(error)
        else:
            self.capacity = max(self.capacity, _REMEMBERED_FACTOR * welcomed.welcome.capacity)
            self._lines.keep(_Line(welcomed.socket))

    @property
    def counts(self) -> Mapping[str, int]:
        """``failed`` calls, ``corrupt`` chunks and ``breaker_trips`` since the start."""
        return self._counts

    @property
    def nodes_away(self) -> Sequence[str]:
        return (str(self._access.address),) if self._breaker.open else ()

    @property
    def is_apart(self) -> bool:
        return self._apart

    def find(self, keys: Sequence[ChunkKey]) -> int:
        found = min(self._call(lambda line: line.find(keys), 0), len(keys))
        if not found and self._clock() >= self._apart_due:
            self._apart_due = self._clock() + _APART_S
            self._apart = self._call(lambda line: line.find([wire.OTHER_SIZE]), 0) > 0
        return found

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        return self._call(lambda line: line.put(key, data), False)

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        """Read a chunk. None, not False, for damaged bytes too: the server has the right ones."""
        return self._call(lambda line: line.get(key, into), None)

    def may_read(self, key: ChunkKey) -> bool:
        return self._breaker.reserves()

    def delete(self, key: ChunkKey) -> None:
        self._call(lambda line: line.delete(key), None)

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Close all connections. The order is not used: the server has its own."""
        self._lines.close()

    # ---- connections -----------------------------------------------------------------------------

    def _call(self, work: Callable[[_Line], R], fallback: R) -> R:
        """Do ``work`` on a connection. Returns ``fallback`` if the server fails, or is left alone
        after a fault."""
        if not self._breaker.allows():
            return fallback
        try:
            with self._lines.lent() as line:
                result = work(line)
        except (OSError, KVTierError) as error:
            self._failed(error)
            return fallback
        if self._breaker.ok():
            logger.info("server at %s: answers again", self._access.address)
        return result

    def _connect(self) -> _Line:
        if self._lines.closed:
            raise TierError("the tier is closed")
        return _Line(enter(self._access, _CALL_S).socket)

    def _failed(self, error: Exception) -> None:
        """Leave the server alone for a while. Each time that it is found dead is logged once."""
        opened = self._breaker.fault()
        with self._lock:
            self._counts["failed"] += 1
            self._counts["corrupt"] += isinstance(error, _CorruptError)
            self._counts["breaker_trips"] += opened
            if self._lines.closed or not opened:
                return
        logger.warning("server at %s: %s; misses for a while", self._access.address, error)


class _CorruptError(KVTierError): ...


class _Line:
    """One connection after its handshake, with a bound in time for each call: five seconds, and for
    a chunk what its bytes need at 4 MiB/s. Cannot be used after an exception."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._number = 0
        self._inbox: Inbox[wire.StreamAnswer] = Inbox(wire.StreamAnswer, _MAX_ANSWER_BYTES)
        self._deadline = Deadline(_CALL_S)

    def find(self, keys: Sequence[ChunkKey]) -> int:
        asked = wire.joined(keys[: wire.MAX_KEYS])
        return self._ask(wire.Found, wire.Find(self._begin(), asked)).count

    def delete(self, key: ChunkKey) -> None:
        self._ask(wire.Done, wire.Delete(self._begin(), key))

    def put(self, key: ChunkKey, data: memoryview) -> bool:
        go = self._ask(wire.Go, wire.Put(self._begin(len(data)), key))
        if not go.send:
            return go.held
        hashed = xxhash.xxh3_128(key)
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            hashed.update(piece)
            self._deadline.send(self._socket, piece)
        return self._ask(wire.Stored, wire.Seal(hashed.digest())).kept

    def get(self, key: ChunkKey, into: memoryview) -> bool:
        chunk = self._ask(wire.Chunk, wire.Get(self._begin(len(into)), key))
        if not chunk.size:
            return False
        if chunk.size != len(into):
            raise wire.WireError(f"a chunk of {chunk.size} bytes, expected {len(into)}")
        hashed = xxhash.xxh3_128(key)
        at = self._inbox.drain(into)
        hashed.update(into[:at])
        while at < len(into):
            count = self._deadline.receive(self._socket, into[at : at + _PIECE_BYTES])
            hashed.update(into[at : at + count])
            at += count
        seal = self._receive(wire.Seal)
        if not proven(hashed.digest(), seal.checksum):
            raise _CorruptError(f"chunk {key.hex()[:16]} came with a wrong checksum")
        return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    # ---- messages --------------------------------------------------------------------------------

    def _begin(self, chunk_bytes: int = 0) -> int:
        self._deadline = Deadline(_CALL_S + chunk_bytes / _SLOWEST_BYTES_S)
        self._number = self._number % (2**32 - 1) + 1
        return self._number

    def _ask(self, kind: type[A], question: wire.StreamQuestion) -> A:
        self._deadline.send(self._socket, wire.frame(question))
        return self._receive(kind)

    def _receive(self, kind: type[A]) -> A:
        while (answer := self._inbox.next()) is None:
            self._inbox.filled(self._deadline.receive(self._socket, self._inbox.room()))
        if isinstance(answer, wire.Refused):
            raise TierError(f"the server ended the connection: {answer.reason}")
        if not isinstance(answer, kind):
            raise wire.WireError(f"{type(answer).__name__} instead of {kind.__name__}")
        if getattr(answer, "id", self._number) != self._number:
            raise wire.WireError(f"{kind.__name__} for another question")
        return answer
