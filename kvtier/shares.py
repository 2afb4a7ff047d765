"""Shares: how many slots of one pool each engine may hold at once, and how often one may look at all chunks. Pure.

A slot is held while an engine fills it (a save lease) or reads it (a load lease): nobody else can use it then, however
long that takes. So what may be held must be bounded, and not only by a tenant's name, which is claimed and not proven.

The rule is the dynamic threshold of shared-memory switches (Choudhury and Hahne, IEEE/ACM Trans. Networking 6(2),
1998): each may hold up to three times what nobody holds. One engine by itself gets three quarters of the pool. With n
that take all they can get, 1/(3n + 1) of the pool stays for the next one, whoever it is. Nothing is ever taken back,
which would not be safe while the holder may still write.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.steps import Steps

_TIMES = 3
_REST = 99
"""After a look at all chunks it pauses so many times as long: one part in a hundred of the time."""


class Shares:
    """Slots of a pool, ``slots()`` of them now, that are held. Not thread-safe: for the server's loop."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self._slots = slots
        self.held = 0
        """By all together."""

    def left(self, own: int) -> int:
        """How many more slots somebody may take who holds ``own``."""
        nobodys = self._slots() - self.held
        return max(0, (_TIMES * nobodys - own) // (_TIMES + 1), int(not own and nobodys > 0))

    def take(self, count: int) -> None:
        """``count`` more are held; fewer if it is negative."""
        self.held += count


class Pace:
    """Bounds looks at everything, which cannot be cut into pieces, to a hundredth of the time, whoever asks for them.

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
