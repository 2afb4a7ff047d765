"""WholeObjectTier: common parts of tiers whose store keeps a chunk as one object, whole or not at
all: a bucket, a pool of other hosts' memory::

    <prefix>/kvtier-1/<namespace>/<key>          header, 80 bytes, then the payload

The format's version is in the name, so that servers of different versions never read each other's
bytes. A reader compares XXH3-128 over key and payload, so a wrong byte is a miss and a count, and
never served.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from xxhash import xxh3_128

from kvtier.core.chunk import KEY_BYTES, ChunkKey
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.away.tier import AwayTier
from kvtier.tiers.breaker import Breaker

FORMAT_VERSION = 1
CHECKSUM_BYTES = 16
_MAGIC = b"kvtier/O"
_HEAD = struct.Struct(f"<8sHHIQ{KEY_BYTES}s")
HEADER_BYTES = _HEAD.size + CHECKSUM_BYTES
_NAMESPACE_BYTES = 32


class ObjectForm:
    """Names of one model's chunks. ``namespace``: for the model, its layout and the encryption key.
    Raises ConfigError for one that cannot be used."""

    def __init__(self, prefix: str, namespace: bytes) -> None:
        if not 1 <= len(namespace) <= _NAMESPACE_BYTES:
            raise ConfigError(
                f"a namespace of {len(namespace)} bytes, expected 1 to {_NAMESPACE_BYTES}"
            )
        self.folder = (
            f"{prefix}/" if prefix else ""
        ) + f"kvtier-{FORMAT_VERSION}/{namespace.hex()}"
        """Prefix of the names of all chunks, and of trials."""

    def name(self, key: ChunkKey) -> str:
        return f"{self.folder}/{key.hex()}"

    def key(self, name: str) -> ChunkKey | None:
        """Return the key of a chunk's name, or None for a trial's or any other name."""
        text = name.removeprefix(f"{self.folder}/")
        if text == name or len(text) != 2 * KEY_BYTES:
            return None
        try:
            found = ChunkKey(bytes.fromhex(text))
        except ValueError:
            return None
        return found if found.hex() == text else None


def header(key: ChunkKey, payload: memoryview) -> bytes:
    """Make a header: key, payload's length, and XXH3-128 over key and payload."""
    digest = xxh3_128(key)
    digest.update(payload)
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, 0, 0, payload.nbytes, key) + digest.digest()


def room(length: int) -> int:
    return HEADER_BYTES + length


T = TypeVar("T")


class WholeObjects(Protocol):
    """A store of named objects. Threads: any. Methods block for a bounded time, or raise."""

    label: str
    faults: tuple[type[Exception], ...]

    def greet(self, folder: str) -> None:
        """Try once everything that a tier does, below ``folder``. Raises ``faults`` when the store
        cannot be reached now, TierError for what only the operator can mend."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """Write an object whole, or not at all. Returns its bytes, or 0 if there is no room now."""

    def fetch(self, name: str, into: memoryview) -> bytes | None:
        """Fill ``into`` with the payload, and return the header. Returns b"" for an object of
        another length, None if there is none."""

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects. Returns the number of names. A missing object is no fault."""

    def told(self, error: Any) -> str:
        """Return a fault in words that hold no secret."""

    def close(self) -> None:
        """End all connections. No call may come after it."""


class Deletions:
    """Counts of own deletions: a store of memory reuses a deleted chunk's room during a read."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.begun += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.ended += 1


S = TypeVar("S", bound=WholeObjects)


class WholeObjectTier(AwayTier, Generic[S]):
    """Chunks as objects, in our share (``bytes_``) of a store, which the tier closes.

    A store that cannot be reached is no error: the tier misses and refuses until it answers. Raises
    TierError for what waiting does not heal, and without room for a chunk. Threads: any number of
    lane threads."""

    _share: str
    """Name of the key or parameter that gives more room."""

    def __init__(
        self,
        store: S,
        form: ObjectForm,
        bytes_: int,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(f"{self.name} tier {store.label}", chunk_bytes, clock)
        self.chunk_room = room(chunk_bytes)
        self.capacity = bytes_ // self.chunk_room
        if not self.capacity:
            raise TierError(
                f"{self._place}: {bytes_:,} bytes hold no chunk; give at least "
                f"{self._share}={self.chunk_room:,}"
            )
        self._store, self._form = store, form
        self._breaker = Breaker(clock)
        self._deletions = Deletions()
        try:
            store.greet(form.folder)
        except store.faults as error:
            self._failed(self._breaker, "failed_finds", store.told(error))
        except TierError:
            store.close()
            raise

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        super().close(coldest_first)
        self._store.close()

    @property
    def nodes_away(self) -> Sequence[str]:
        return (self._store.label,) if self._breaker.open else ()

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        self._check_size(data)
        if not self._owed.cancel(key):
            self._events.add("refused")
            return False
        put = partial(self._put, self._form.name(key), [header(key, data), data], owner)
        done = self._call("failed_writes", put)
        if done is None:
            self._owed.add([key])  # it may be there all the same: an answer that was lost
            return False
        if not done:
            self._events.add("refused")
            return False
        self._events.add("writes")
        self._events.add("bytes_written", data.nbytes)
        return True

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        name, ended = self._form.name(key), self._deletions.ended
        answer = self._call("failed_reads", lambda: [self._store.fetch(name, into)])
        if answer is None:
            return None
        (found,) = answer
        if found is None:
            self._events.add("misses")
            return False
        if found == header(key, into):
            self._events.add("reads")
            self._events.add("bytes_read", into.nbytes)
            return True
        if self._deletions.begun != ended:
            self._events.add("misses")  # its room may have become another chunk's meanwhile
            return False
        self._events.add("corrupt")
        self._events.log_first("corrupt", key.hex())
        self.delete(key)
        return False

    def may_read(self, key: ChunkKey) -> bool:
        return self._breaker.reserves()

    def _put(self, name: str, parts: Sequence[bytes | memoryview], owner: int) -> int:
        """:meth:`WholeObjects.put`, for stores that keep no owners."""
        return self._store.put(name, parts)

    # ---- faults ----------------------------------------------------------------------------------

    def _call(self, count: str, action: Callable[[], T], *, settle: bool = True) -> T | None:
        """Return the result of ``action``, or None when the store fails or is left alone."""
        if self._closed or not self._breaker.allows():
            self._events.add("refused")
            return None
        try:
            result = action()
        except self._store.faults as error:
            self._failed(self._breaker, count, self._store.told(error))
            return None
        self._answered(self._breaker, settle=settle)
        return result

    def _unlink(self, keys: Sequence[ChunkKey]) -> None:
        names = [self._form.name(key) for key in keys]
        with self._deletions:
            delete = partial(self._store.delete, names)
            if self._call("failed_deletes", delete, settle=False) is None:
                self._owed.add(keys)
