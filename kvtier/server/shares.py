"""Shares: how many slots of one pool each engine may take at once, and how often a client may ask
for work over all chunks. Pure.

An engine takes a slot while it fills it (a save lease) or reads it (a load lease). No other engine
can use the slot then, however long that takes. So the number of taken slots must be bounded. A
bound by tenant name is not enough, because a name is claimed and not proved.

With n engines attached, one part in 2(n + 1) of the slots is a reserve, which no engine gets that
has taken many. A single engine gets three quarters of the pool, and more engines get more together.
One half of the reserve is divided among the engines that have taken few. The other half is for
engines to come. So no engine is kept out by what others have taken, whatever names they use and
whenever they came. Slots are never taken back from an engine, because that would not be safe while
it may still write.

Streams of one client from another host count as one engine together, however many connections it
opens. What that engine gets is divided among its streams by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvtier.core.steps import Steps

_REST = 99
"""Times as long as the work: it takes one part in a hundred of the time."""
R = TypeVar("R")


class Shares:
    """Slots of one pool that engines have taken. Not thread-safe: for the server's loop."""

    def __init__(self, slots: Callable[[], int], within: Share | None = None) -> None:
        self._slots = slots
        self._within = within
        self._shares: set[Share] = set()
        self._clients: dict[str, Shares] = {}

    def join(self) -> Share:
        share = Share(self._slots, self._shares, self._within)
        self._shares.add(share)
        return share

    def join_stream(self, client: str) -> Share:
        """A stream's share of what its client may have with all its streams together."""
        self._clients = {name: one for name, one in self._clients.items() if one._shares}
        if client not in self._clients:
            whole = self.join()
            self._clients[client] = Shares(lambda: whole.held + whole.left, whole)
        return self._clients[client].join()


class Share:
    """``shares``: all engines' of the pool. ``within``: the share that this one is a part of."""

    __slots__ = ("_held", "_shares", "_slots", "_within")

    def __init__(
        self, slots: Callable[[], int], shares: set[Share], within: Share | None = None
    ) -> None:
        self._slots, self._shares, self._within = slots, shares, within
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    @held.setter
    def held(self, slots: int) -> None:
        if self._within is not None:
            self._within.held += slots - self._held
        self._held = slots

    @property
    def left(self) -> int:
        slots, count = self._slots(), len(self._shares)
        free = slots - sum(one.held for one in self._shares)
        reserve = slots // (2 * (count + 1))
        own = max(1, reserve // (2 * count))
        return max(0, free - reserve, min(own - self.held, free))

    def leave(self) -> None:
        """No effect the second time."""
        self._shares.discard(self)
        if self._within is not None and not self._shares:
            self._within.leave()


class ScanLimiter:
    """Bounds work over all chunks, which cannot be cut into pieces, to a hundredth of the time. For
    the server's loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._after = 0.0

    def looking(self, look: Callable[[], R]) -> Steps[R]:
        while (left := self._after - self._clock()) > 0:
            yield left
        begun = self._clock()
        found = look()
        now = self._clock()
        self._after = now + _REST * (now - begun)
        return found
