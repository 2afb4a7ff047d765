"""Bytes between SGLang's host memory and a server's slots, and waits that end.

SGLang's threads call; lanes do the work and may wait for a server longer. A call that is over hands
its memory back to SGLang, which gives it to other prompts. So a :class:`Transfer` that has ended
copies nothing more.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as LateError
from typing import Any, TypeVar

from kvtier.core.lanes import Lane, future_of

logger = logging.getLogger("kvtier.sglang")

_QUEUED_CALLS, _QUEUED_OPENINGS = 16, 64
_CLOSE_S = 2.0
R = TypeVar("R")
Piece = tuple[int, int]
"""Address and bytes."""


class Pieces:
    """Chunks in host memory, each of pieces. Copies are made without the GIL."""

    def __init__(self, chunks: Sequence[Sequence[Piece]]) -> None:
        self._chunks = chunks

    @classmethod
    def of_tensors(cls, tensors: Sequence[Any]) -> Pieces:
        """The caller holds the tensors, which are contiguous."""
        return cls([[(one.data_ptr(), one.nbytes)] for one in tensors])

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
        Pieces.of_tensors([page]).fill(0, slot)

    def take(self, place: int, slot: memoryview) -> None:
        page = self._pool.get_dummy_flat_data_page()
        Pieces.of_tensors([page]).take(0, slot)
        self._pool.set_from_flat_data_page(self._firsts[place], page)


Copy = Pieces | FlatPages


class Transfer:
    """Copies of one call. ``taken``: which chunks have been read."""

    def __init__(self, chunks: int) -> None:
        self.copies: Copy = Pieces(())
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


class Bounded:
    """Lanes, for whose work SGLang's threads wait a bounded time. A lookup never queues behind
    copies, nor a load behind saves."""

    def __init__(self) -> None:
        self.finds = Lane("sglang-find", 2, urgent_bound=0, bound=_QUEUED_CALLS)
        self.loads = Lane("sglang-load", 1, urgent_bound=0, bound=_QUEUED_CALLS)
        self.saves = Lane("sglang-save", 1, urgent_bound=0, bound=_QUEUED_CALLS)
        self.opens = Lane("sglang-open", 2, urgent_bound=0, bound=_QUEUED_OPENINGS)

    def call(self, lane: Lane, work: Callable[[], R], otherwise: R, within_s: float) -> R:
        """Result of ``work``, or ``otherwise`` where it fails or takes longer."""
        answer = future_of(lane, work)
        try:
            return answer.result(within_s) if answer is not None else otherwise
        except LateError:
            logger.warning("no answer of the kvtier server within %g s: misses", within_s)
        except Exception:
            logger.exception("a call failed; SGLang goes on without it")
        if answer is not None:
            answer.cancel()
        return otherwise

    def close(self) -> None:
        for lane in (self.finds, self.loads, self.saves, self.opens):
            lane.close(_CLOSE_S)


def _address(slot: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))
