"""Shares: how many slots of one pool each engine may take at once, and how often a client may ask
for work over all chunks. Pure.

An engine takes a slot while it fills it (a save lease) or reads it (a load lease). Nobody else can
use the slot then, however long that takes. So the number of taken slots must be bounded. A bound by
tenant name is not enough, because a name is claimed and not proved.

With n engines attached, one part in 2(n + 1) of the slots is a reserve, which no engine gets that
has taken many. A single engine gets three quarters of the pool, and more engines get more together.
One half of the reserve is divided among the engines that have taken few. The other half is for
engines to come. So no engine is kept out by what others have taken, whatever names they use and
whenever they came. Slots are never taken back from an engine, because that would not be safe while
it may still write.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.core.steps import Steps

_REST = 99
"""After work over all chunks, pause this many times as long: the work takes one part in a hundred
of the time."""


class Shares:
    """What engines have taken of a pool with ``slots()`` slots. Not thread-safe: for the server's
    loop."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self._slots = slots
        self._shares: set[Share] = set()

    def join(self) -> Share:
        """An engine is attached. Returns its share."""
        share = Share(self)
        self._shares.add(share)
        return share

    def leave(self, share: Share) -> None:
        """The engine is not attached any more and has no slots. No effect the second time."""
        self._shares.discard(share)

    def left(self, share: Share) -> int:
        """How many more slots this engine may take."""
        free = self._slots() - sum(one.held for one in self._shares)
        count = len(self._shares)
        reserve = self._slots() // (2 * (count + 1))
        own = max(1, reserve // (2 * count))
        return max(0, free - reserve, min(own - share.held, free))


class Share:
    """One engine's share. ``held``: the slots that its leases have now."""

    __slots__ = ("_shares", "held")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.held = 0

    @property
    def left(self) -> int:
        """How many more slots the engine may take."""
        return self._shares.left(self)

    def leave(self) -> None:
        """The engine is not attached any more."""
        self._shares.leave(self)


class Pace:
    """Bounds work over all chunks, which cannot be cut into pieces, to a hundredth of the time,
    whoever asks for it.

    ``clock``: monotonic seconds. Not thread-safe: for the server's loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._after = 0.0

    def turn(self) -> Steps[None]:
        """Pauses until the next such work may begin."""
        while (left := self._after - self._clock()) > 0:
            yield left

    def looked(self, begun: float) -> None:
        """Such work began at ``begun`` and has just ended."""
        now = self._clock()
        self._after = now + _REST * (now - begun)

    def now(self) -> float:
        """The time by the clock."""
        return self._clock()
