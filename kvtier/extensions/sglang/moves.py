"""Bytes between SGLang's host memory and a server's slots.

SGLang's threads call, and lanes do the work, which may wait for a server longer. A call that is
over hands its memory back to SGLang, which gives it to other prompts. So a :class:`Transfer` that
has ended copies nothing more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

Piece = tuple[int, int]
"""Address and bytes."""


class Pieces:
    """Chunks in host memory, each of pieces. Copies are made without the GIL."""

    def __init__(self, chunks: Sequence[Sequence[Piece]]) -> None:
        self._chunks = chunks

    def fill(self, place: int, slot: memoryview) -> None:
        """Zeros behind the pieces: the slot may have held another prompt."""
        at = _address(slot)
        end = at + len(slot)
        for address, size in self._chunks[place]:
            ctypes.memmove(at, address, size)
            at += size
        ctypes.memset(at, 0, end - at)

    def take(self, place: int, slot: memoryview) -> None:
        at = _address(slot)
        for address, size in self._chunks[place]:
            ctypes.memmove(address, at, size)
            at += size


class FlatPages:
    """Pages of a host pool that has no pieces to point at: it makes a tensor of a page, and reads
    one."""

    def __init__(self, pool: Any, firsts: Sequence[int]) -> None:
        self._pool, self._firsts = pool, firsts

    def fill(self, place: int, slot: memoryview) -> None:
        page = self._pool.get_data_page(self._firsts[place], flat=True).contiguous()
        Pieces([[(page.data_ptr(), page.nbytes)]]).fill(0, slot)

    def take(self, place: int, slot: memoryview) -> None:
        page = self._pool.get_dummy_flat_data_page()
        Pieces([[(page.data_ptr(), page.nbytes)]]).take(0, slot)
        self._pool.set_from_flat_data_page(self._firsts[place], page)


class Transfer:
    """Copies of one call. ``taken``: which chunks have been read."""

    def __init__(self, chunks: int) -> None:
        self.copies: Pieces | FlatPages = Pieces(())
        self.taken = [False] * chunks
        self._lock, self._over = threading.Lock(), False

    def fill(self, place: int, slot: memoryview) -> bool:
        with self._lock:
            if not self._over:
                self.copies.fill(place, slot)
            return not self._over

    def take(self, place: int, slot: memoryview) -> bool:
        with self._lock:
            if not self._over:
                self.copies.take(place, slot)
                self.taken[place] = True
            return not self._over

    def end(self) -> None:
        """Copy nothing more. Waits for a chunk that is being copied."""
        with self._lock:
            self._over = True


def _address(slot: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))
