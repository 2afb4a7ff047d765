"""Bytes between SGLang's host memory and a server's slots.

SGLang's threads call, and lanes do the work, which may wait for a server longer. A call that is
over hands its memory back to SGLang, which gives it to other prompts. So a :class:`Transfer` that
has ended copies nothing more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import partialmethod


class Transfer:
    """Copies of one call, made without the GIL. ``pieces``: of each chunk, addresses and bytes in
    host memory. ``copied``: which chunks have been."""

    def __init__(self, chunks: int) -> None:
        self.pieces: Sequence[Sequence[tuple[int, int]]] = ()
        self.copied = [False] * chunks
        self._lock, self._over = threading.Lock(), False

    def _copy(self, place: int, slot: memoryview, *, fills: bool) -> bool:
        """Copy a chunk. A slot is filled up with zeros: it may have held another prompt."""
        first = at = ctypes.addressof(ctypes.c_char.from_buffer(slot))
        with self._lock:
            if self._over:
                return False
            for address, size in self.pieces[place]:
                ctypes.memmove(*((at, address) if fills else (address, at)), size)
                at += size
            if fills:
                ctypes.memset(at, 0, first + len(slot) - at)
            self.copied[place] = True
            return True

    fill = partialmethod(_copy, fills=True)
    take = partialmethod(_copy, fills=False)

    def end(self) -> None:
        """Copy nothing more. Waits for a chunk that is being copied."""
        with self._lock:
            self._over = True
