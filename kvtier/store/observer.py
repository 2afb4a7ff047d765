"""Observer: what a Store reports to the objects that watch it. A new kind of watcher is a new file.

The index reports which chunk came to which place and which one left it, and which runs are used
and saved. The Store reports how long work took, what a load has read, and what requests say. An
Observer overrides the methods that it needs. A method that is not overridden is never called.

A place is 0 for RAM and ``1 + index`` for tier ``index`` (:mod:`kvtier.core.lookup`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Asker, Ended, Served
from kvtier.eviction.hints import Hint
from kvtier.store.entry import Entry


class Left(IntEnum):
    """Reason why a chunk ceased to be held, by its name in lower case."""

    EVICTED = 1
    CORRUPT = 2
    FORGOTTEN = 3


class Observer:
    """Base of all observers. No event has an effect here.

    The Store's lock is held during the calls that say so. Such a call only appends to something
    bounded. It neither waits nor raises, takes no lock that is held while the Store is called, and
    calls neither the Store nor its index.
    """

    # ---- under the Store's lock: the index -------------------------------------------------------

    def came(self, place: int, key: ChunkKey) -> None:
        """The chunk can be served from this place now."""

    def left(self, place: int, key: ChunkKey, how: Left) -> None:
        """The chunk has left this place."""

    def missing(self, key: ChunkKey, how: Left) -> None:
        """The chunk is in no place, and perhaps never was: a read did not find it, or its key was
        invalidated."""

    def used(self, run: Sequence[ChunkKey]) -> None:
        """A prompt asked for a part of its run. The parts come last first."""

    def stored(self, run: Sequence[ChunkKey]) -> None:
        """A part of a run is being saved, or has been saved. The parts come last first."""

    # ---- under the Store's lock: the work on it --------------------------------------------------

    def took(self, what: str, place: str, seconds: float) -> None:
        """Work took this long: a ``lookup``, ``load_wait``, ``save``, ``load``, ``promotion`` or
        ``spill``. ``place``: the slowest place that a load's chunks came from, or the tier of a
        promotion or spill, else empty."""

    def loaded(self, entries: Sequence[Entry]) -> None:
        """A load ends. ``entries`` are its ready chunks, still pinned."""

    def served(self, served: Served) -> None:
        """A prompt got its blocks."""

    # ---- on any thread, without the lock: requests -----------------------------------------------

    def prompt(self, run: Sequence[ChunkKey], asker: Asker) -> None:
        """A prompt asked for this run."""

    def hint(self, run: Sequence[ChunkKey], session: str, hint: Hint) -> None:
        """A hint about this run. Without a run it is about the last prompt of the session."""

    def finished(self, ended: Ended) -> None:
        """A prompt's request has ended."""

    # ---- the Store's own questions ---------------------------------------------------------------

    def counted(self) -> Mapping[str, int]:
        """Return counts for ``Store.stats()``, which adds equal names. Under the Store's lock."""
        return {}

    def close(self, timeout_s: float) -> bool:
        """End with the Store. Returns False if something hangs."""
        return True


class Observers:
    """Observers of one index: for each event, the methods that override it.

    Guarded by the Store's lock. An event is told by ``for tell in observers.came: tell(...)``, and
    the calls without the lock read one of these tuples at a time."""

    def __init__(self, *observers: Observer) -> None:
        self._set(observers)

    def _set(self, observers: tuple[Observer, ...]) -> None:
        def calls(event: str) -> tuple[Any, ...]:
            silent = getattr(Observer, event)
            return tuple(
                getattr(each, event)
                for each in observers
                if getattr(type(each), event) is not silent
            )

        self.all = observers
        self.came: tuple[Callable[[int, ChunkKey], None], ...] = calls("came")
        self.left: tuple[Callable[[int, ChunkKey, Left], None], ...] = calls("left")
        self.missing: tuple[Callable[[ChunkKey, Left], None], ...] = calls("missing")
        self.used: tuple[Callable[[Sequence[ChunkKey]], None], ...] = calls("used")
        self.stored: tuple[Callable[[Sequence[ChunkKey]], None], ...] = calls("stored")
        self.took: tuple[Callable[[str, str, float], None], ...] = calls("took")
        self.loaded: tuple[Callable[[Sequence[Entry]], None], ...] = calls("loaded")
        self.served: tuple[Callable[[Served], None], ...] = calls("served")
        self.prompt: tuple[Callable[[Sequence[ChunkKey], Asker], None], ...] = calls("prompt")
        self.hint: tuple[Callable[[Sequence[ChunkKey], str, Hint], None], ...] = calls("hint")
        self.finished: tuple[Callable[[Ended], None], ...] = calls("finished")

    def add(self, observer: Observer) -> None:
        """Add an observer behind the others. A second time has no effect."""
        if observer not in self.all:
            self._set((*self.all, observer))

    def remove(self, observer: Observer) -> None:
        self._set(tuple(each for each in self.all if each is not observer))
