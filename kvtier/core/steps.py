"""Steps: work on many chunks in short pieces, so that whoever shares a lock or a loop has a turn in
between. Pure.

The work is a generator. It yields the seconds that it wants to pause, nearly always 0, and returns
its result. On a thread of its own it is done at a stretch by :func:`whole`; on a loop its owner
calls ``next`` as often as there is time (:mod:`kvtier.server.connection`). Each piece takes a lock
for itself, and holds none while it pauses.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

AT_ONCE = 128
"""Chunks in one piece: a few tenths of a millisecond."""
T = TypeVar("T")
Steps = Generator[float, None, T]


def whole(steps: Steps[T]) -> T:
    """Do all of it now."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def pieces(items: Sequence[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """``items`` in pieces of ``size``; no items are one empty piece."""
    for first in range(0, max(1, len(items)), size):
        yield items[first : first + size]
