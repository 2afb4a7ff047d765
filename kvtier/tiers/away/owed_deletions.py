"""OwedDeletions: what a tier shall delete and could not, because its medium is away. It is deleted
when the medium answers again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvtier.core.chunk import ChunkKey

_AT_ONCE = 32
_MOST = 65_536


class OwedDeletions:
    """``delete`` deletes some chunks. It owes them again (:meth:`add`) where that fails.

    Threads: any. The lock is never held during I/O.
    """

    def __init__(self, delete: Callable[[Sequence[ChunkKey]], None]) -> None:
        self._delete = delete
        self._lock = threading.Lock()
        self._owed: dict[ChunkKey, None] = {}
        self.going: set[ChunkKey] = set()
        """Chunks that are being deleted now."""

    def __len__(self) -> int:
        return len(self._owed)

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Owe these deletions too. Of more than 65,536 the oldest is given up."""
        with self._lock:
            self._owed.update(dict.fromkeys(keys))
            while len(self._owed) > _MOST:
                del self._owed[next(iter(self._owed))]

    def cancel(self, key: ChunkKey) -> bool:
        """The chunk is about to be written anew: its deletion is not owed any more. False: it is
        being deleted now, and a write would be hit by that."""
        with self._lock:
            if key in self.going:
                return False
            self._owed.pop(key, None)
            return True

    def make_good(self) -> None:
        """The medium answers: delete a few of the chunks that are owed."""
        if not self._owed:
            return
        with self._lock:
            keys = [key for key in islice(self._owed, _AT_ONCE) if key not in self.going]
            for key in keys:
                del self._owed[key]
            self.going.update(keys)
        try:
            self._delete(keys)
        finally:
            with self._lock:
                self.going.difference_update(keys)
