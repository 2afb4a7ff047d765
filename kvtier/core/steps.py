"""Steps: work on many chunks in short pieces, so that other users of a lock or a loop get their
turn in between. Pure.

The work is a generator. It yields the seconds that it wants to pause, nearly always 0, and returns
its result. On a thread of its own :func:`whole` does all of it at once. On a loop its owner calls
``next`` as often as there is time (:mod:`kvtier.server.connection`). Each piece takes a lock for
itself, and no lock is held during a pause.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

AT_ONCE = 128
"""Chunks in one piece: a few tenths of a millisecond."""
T = TypeVar("T")
Steps = Generator[float, None, T]


def whole(steps: Steps[T]) -> T:
    """Do all of the work now."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def pieces(items: Sequence[T], size: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """``items`` in pieces of ``size``. No items give one empty piece."""
    for first in range(0, max(1, len(items)), size):
        yield items[first : first + size]
