"""Shares: how many slots of one pool each engine may hold at once, and how often one may look at
all chunks. Pure.

A slot is held while an engine fills it (a save lease) or reads it (a load lease): nobody else can
use it then, however long that takes. So what may be held must be bounded, and not only by a
tenant's name, which is claimed and not proven.

With n engines attached, the 2(n + 1)th part of the slots is a reserve, which no engine gets that
holds much: one engine by itself gets three quarters of the pool, and the more there are, the more
they have together. Half of the reserve is divided among those that hold little, the other half is
for those to come. So nobody is kept out by what others hold, whoever they say they are and whenever
they came, and nothing is ever taken back from a holder, which would not be safe while he may still
write.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.core.steps import Steps

_REST = 99
"""After a look at all chunks it pauses so many times as long: one part in a hundred of the time."""


class Shares:
    """What is held of a pool with ``slots()`` slots. Not thread-safe: for the server's loop."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self._slots = slots
        self._shares: set[Share] = set()

    def join(self) -> Share:
        """Somebody is attached."""
        share = Share(self)
        self._shares.add(share)
        return share

    def leave(self, share: Share) -> None:
        """He is not any more, and holds nothing. No effect the second time."""
        self._shares.discard(share)

    def left(self, share: Share) -> int:
        """How many more slots he may take."""
        nobodys = self._slots() - sum(one.held for one in self._shares)
        count = len(self._shares)
        reserve = self._slots() // (2 * (count + 1))
        own = max(1, reserve // (2 * count))
        return max(0, nobodys - reserve, min(own - share.held, nobodys))


class Share:
    """One engine's. ``held``: slots that its leases hold now."""

    __slots__ = ("_shares", "held")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.held = 0

    @property
    def left(self) -> int:
        """How many more slots it may take."""
        return self._shares.left(self)

    def leave(self) -> None:
        """It is not attached any more."""
        self._shares.leave(self)


class Pace:
    """Bounds looks at everything, which cannot be cut into pieces, to a hundredth of the time,
    whoever asks for them.

    ``clock``: seconds that only grow. Not thread-safe: for the server's loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._after = 0.0

    def turn(self) -> Steps[None]:
        """Pauses until the next look may begin."""
        while (left := self._after - self._clock()) > 0:
            yield left

    def looked(self, begun: float) -> None:
        """A look began at ``begun`` and has just ended."""
        now = self._clock()
        self._after = now + _REST * (now - begun)

    def now(self) -> float:
        """By the clock."""
        return self._clock()
