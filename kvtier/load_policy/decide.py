"""Judge: what of a hit the engine takes, by what loading and computing it are forecast to take. Memory only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvtier.load_policy.choose import Choice, choose
from kvtier.load_policy.latency import Average
from kvtier.load_policy.outlook import Outlook
from kvtier.load_policy.prefill import Prefill, StepClock

_COPY_KNOWN_S = 10.0
"""What was measured of copies holds for so long; then they are free until the next is measured, so that hits which
were declined because of them are tried again."""


class Judge:
    """Learns from every step of one engine. Called by vLLM's scheduling loop, one thread.

    Args:
        timeout_s: longest a load may be waited for, whatever the forecast.
        always: take every hit whole; for comparison.
        prefill: what is known of the engine's speed at the start.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        always: bool = False,
        prefill: Prefill | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._timeout_s = timeout_s
        self._always = always
        self._prefill = prefill or Prefill()
        self._steps = StepClock(self._prefill)
        self._copy = Average()
        """Seconds of one token's copy from slots to blocks."""

    def choose(self, outlook: Outlook, rest: int, begin: int, end: Callable[[int], int]) -> Choice:
        """What to take of a run of ``rest`` chunks for a request that has ``begin`` tokens. ``end(n)``: how many it
        has with ``n`` leading chunks of the run loaded."""

        copied = self._copy.at + _COPY_KNOWN_S > self.clock()
        copy_s = (self._copy.value or 0.0) if copied else 0.0

        def saved(chunks: int) -> float | None:
            tokens = max(0, end(chunks) - begin)
            compute = self._prefill.seconds(tokens, begin)
            return None if compute is None else compute - tokens * copy_s

        if self._always:
            choice = Choice(outlook.known, outlook.asking is not None, math.inf)
        else:
            choice = choose(outlook, rest, saved)
        return choice._replace(within_s=min(choice.within_s, self._timeout_s))

    # ---- learning ------------------------------------------------------------------------------------------------

    def planned(self, work: Sequence[tuple[int, int]]) -> int:
        """A step was planned that computes ``(tokens, tokens there before)`` of each request; its number."""
        return self._steps.plan(self.clock(), work)

    def ended(self, step: int, loaded: int, load_s: float, elsewhere: float) -> None:
        """A step's report came: ``loaded`` tokens were copied in ``load_s``; ``elsewhere``: seconds that went into
        saves and into waiting."""
        now = self.clock()
        if loaded:
            self._copy.add(load_s / loaded, now)
        self._steps.end(step, now, load_s + elsewhere)
