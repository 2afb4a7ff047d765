"""What a Directory and its tiers' queues say of a run. Pure: the caller gives the times; no clock,
lock or I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import LookupResult
from kvtier.core.steps import Steps
from kvtier.store.directory import FILLING, READY, Directory

_MOST_STEPS = 32
_AT_ONCE = 1024
"""Chunks in one piece of :func:`lookup_run`: a few tenths of a millisecond."""
Wait = Callable[[int], float | None]
"""Seconds until so many more reads of one tier have ended; None: unknown."""


def lookup_run(
    directory: Directory, waits: Sequence[Wait], keys: Sequence[ChunkKey]
) -> Steps[LookupResult]:
    """How far a run can be served, and when, but for asking; in pieces, each under the Store's
    lock. There is one step for each change of place."""
    steps: list[tuple[int, float | None]] = []
    reads: dict[int, int] = {}
    here, end = -1, len(keys)
    for at, key in enumerate(keys):
        if at % _AT_ONCE == _AT_ONCE - 1:
            yield 0.0
        entry = directory.get(key)
        if entry is None:
            place = next(directory.holders(key), None)
        elif entry.state is READY:
            place = here
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
    return LookupResult([*steps, (end, _arrival(waits, reads))])


def _arrival(waits: Sequence[Wait], reads: Mapping[int, int]) -> float | None:
    """When all ``reads`` by tier, and what is on its way from those tiers already, have ended."""
    seconds = [waits[index](count) for index, count in reads.items()]
    known = [one for one in seconds if one is not None]
    return max(known, default=0.0) if len(known) == len(seconds) else None
