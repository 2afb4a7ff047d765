"""Bytes between SGLang's host memory and a server's slots.

SGLang's threads call, and lanes do the work, which may wait for a server longer. A call that is
over hands its memory back to SGLang, which gives it to other prompts. So a :class:`Transfer` that
has ended copies nothing more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

Piece = tuple[int, int]
"""Address and bytes."""


class Transfer:
    """Copies of one call, made without the GIL. ``pieces``: of each chunk, in host memory.
    ``taken``: which chunks have been read."""

    def __init__(self, chunks: int) -> None:
        self.pieces: Sequence[Sequence[Piece]] = ()
        self.taken = [False] * chunks
        self._lock, self._over = threading.Lock(), False

    def fill(self, place: int, slot: memoryview) -> bool:
        """Zeros behind the pieces: the slot may have held another prompt."""
        with self._lock:
            at = _address(slot)
            end = at + len(slot)
            for address, size in () if self._over else self.pieces[place]:
                ctypes.memmove(at, address, size)
                at += size
            if not self._over:
                ctypes.memset(at, 0, end - at)
            return not self._over

    def take(self, place: int, slot: memoryview) -> bool:
        with self._lock:
            at = _address(slot)
            for address, size in () if self._over else self.pieces[place]:
                ctypes.memmove(address, at, size)
                at += size
            self.taken[place] |= not self._over
            return not self._over

    def end(self) -> None:
        """Copy nothing more. Waits for a chunk that is being copied."""
        with self._lock:
            self._over = True


def _address(slot: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))
