"""Lookup: how much of a run a Directory can serve, and when. Pure: the caller gives the times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import Steps
from kvtier.store.directory import Directory
from kvtier.store.entry import FILLING, READY

_MOST_STEPS = 32
_PIECE_CHUNKS = 1024
"""Chunks in one piece of :func:`lookup_run`, which takes a few tenths of a millisecond."""
Wait = Callable[[int], float | None]
"""Function that returns the seconds until this many more reads of a tier have ended, or None."""


def is_known(directory: Directory, key: ChunkKey) -> bool:
    """Return whether the chunk is in RAM, on its way there, or in a tier that need not be asked."""
    entry = directory.get(key)
    if entry is None:
        return next(directory.holders(key), None) is not None
    return entry.state is READY or (entry.state is FILLING and entry.origin is not None)


def lookup_run(
    directory: Directory, waits: Sequence[Wait], keys: Sequence[ChunkKey]
) -> Steps[list[tuple[int, float | None]]]:
    """Return the steps of a lookup, which shared tiers are not asked for. In pieces, each under the
    Store's lock.

    The result has one step for each change of place: between two changes the time saved by one more
    chunk only grows, so the best place to stop is always an end of a step."""
    steps: list[tuple[int, float | None]] = []
    reads: dict[int, int] = {}
    here, end, get = -1, len(keys), directory.get
    ready = directory.ready_run(keys[: _PIECE_CHUNKS - 1])
    for at, key in enumerate(keys[ready:], ready):
        if at % _PIECE_CHUNKS == _PIECE_CHUNKS - 1:
            yield 0.0
        entry = get(key)
        if entry is None:
            place = next(directory.holders(key), None)
        elif entry.state is READY:
            continue
        else:
            place = entry.origin if entry.state is FILLING else None
        if place is None:
            end = at
            break
        if place != here and len(steps) < _MOST_STEPS:
            steps.append((at, _arrival(waits, reads)))
        here = place
        if place >= 0 and (entry is None or place not in reads):
            reads[place] = reads.get(place, 0) + (entry is None)
    return [*steps, (end, _arrival(waits, reads))]


def _arrival(waits: Sequence[Wait], reads: Mapping[int, int]) -> float | None:
    """Return the seconds until ``reads`` more reads of each tier have ended. None if unknown."""
    seconds = [waits[index](count) for index, count in reads.items()]
    known = [one for one in seconds if one is not None]
    return max(known, default=0.0) if len(known) == len(seconds) else None
