"""Steps: work on many chunks in short pieces, so that other users of a lock or a loop get their
turn in between. Pure.

The work is a generator. It yields the seconds that it wants to pause, nearly always 0, and returns
its result. On a thread of its own :func:`whole` does all of it at once. On a loop its owner calls
``next`` as often as there is time (:mod:`kvtier.server.connection`). Each piece takes a lock for
itself, and no lock is held during a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

PIECE_CHUNKS = 128
"""Chunks in one piece: a few tenths of a millisecond."""
P = ParamSpec("P")
T = TypeVar("T")
Steps = Generator[float, None, T]


def whole(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def pieces(items: Sequence[T], size: int = PIECE_CHUNKS) -> Iterator[Sequence[T]]:
    """Cut ``items`` into pieces of ``size``. No items give one empty piece."""
    if len(items) <= size:
        return iter((items,))
    return (items[first : first + size] for first in range(0, len(items), size))


class InPieces(Generic[P, T]):
    """A call that does all its work now. ``steps``: the same call, which returns the work."""

    def __init__(self, steps: Callable[P, Steps[T]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __call__(self, *args: P.args, **named: P.kwargs) -> T:
        return whole(self.steps(*args, **named))


class in_pieces(Generic[P, T]):  # noqa: N801 a decorator
    """Decorator that makes :class:`InPieces` of a method that returns :data:`Steps`."""

    def __init__(self, method: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> InPieces[P, T]:
        made = InPieces[P, T](self._method.__get__(owner, kind))
        if owner is not None:
            owner.__dict__[self._name] = made
        return made
