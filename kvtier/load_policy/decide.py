"""LoadPolicy: what of a hit the engine takes, by what loading and computing it are forecast to
take. Memory only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvtier.core.lookup import LookupResult
from kvtier.load_policy.choose import Choice, choose
from kvtier.load_policy.latency import Average
from kvtier.load_policy.prefill import Prefill, StepClock

_COPY_KNOWN_S = 10.0
"""What was measured of copies holds for so long; then they are free until the next is measured, so
that hits which were declined because of them are tried again."""


class LoadPolicy:
    """Learns from every step of one engine. Called by vLLM's scheduling loop, one thread.

    Args:
        timeout_s: longest a load may be waited for, whatever the forecast.
        always: take every hit whole; for comparison.
        prefill: what is known of the engine's speed at the start.
        slice_s: where workers copy by themselves, the longest that copies make a step longer: these
            seconds, or this part of the step. None: a device copies beside the steps.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        always: bool = False,
        prefill: Prefill | None = None,
        slice_s: tuple[float, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._timeout_s = timeout_s
        self._always = always
        self._prefill = prefill or Prefill()
        self._steps = StepClock(self._prefill)
        self._slice_s = slice_s
        self._copy = Average()
        """Seconds of one token's copy from slots to blocks."""
        self._step_s = Average()
        """Of a step that computes."""
        self._queued = 0
        """Tokens of loads that have begun and not ended."""

    def choose(
        self,
        result: LookupResult,
        rest: int,
        begin: int,
        end: Callable[[int], int],
        *,
        busy: bool = False,
    ) -> Choice:
        """What to take of a run of ``rest`` chunks for a request that has ``begin`` tokens.
        ``end(n)``: how many it has with ``n`` leading chunks of the run loaded. ``busy``: the
        engine computes for other requests."""

        def saved(chunks: int) -> float | None:
            tokens = max(0, end(chunks) - begin)
            compute = self._prefill.seconds(tokens, begin)
            return (
                compute if compute is None or not tokens else compute - self._load_s(tokens, busy)
            )

        if self._always:
            choice = Choice(result.known, result.asking is not None, math.inf)
        else:
            choice = choose(result, rest, saved)
        return choice._replace(within_s=min(choice.within_s, self._timeout_s))

    def _load_s(self, tokens: int, busy: bool) -> float:
        """From the grant until the request can go on: the copies before it and its own; in a busy
        engine also the rest of the step in which it was granted, and as many steps as its copies
        are spread over."""
        copied = self._copy.at + _COPY_KNOWN_S > self.clock()
        copy_s = (tokens + self._queued) * (self._copy.value or 0.0) if copied else 0.0
        step_s = self._step_s.value or 0.0
        if not busy:
            return copy_s
        if self._slice_s is None:
            return step_s + copy_s
        least, part = self._slice_s
        return step_s * (1 + copy_s / max(least, part * step_s))

    # ---- learning --------------------------------------------------------------------------------

    def planned(self, work: Sequence[tuple[int, int]]) -> int:
        """A step was planned that computes ``(tokens, tokens there before)`` of each request; its
        number."""
        return self._steps.plan(self.clock(), work)

    def load_began(self, tokens: int) -> None:
        """A load of so many tokens was promised."""
        self._queued += tokens

    def load_ended(self, tokens: int) -> None:
        """One that began has ended, well or not."""
        self._queued -= tokens

    def ended(self, step: int, loaded: float, load_s: float, elsewhere: float) -> None:
        """A step's report came: ``loaded`` tokens were copied in ``load_s``; ``elsewhere``: seconds
        that went into saves."""
        now = self.clock()
        if loaded:
            self._copy.add(load_s / loaded, now)
        seconds = self._steps.end(step, now, load_s + elsewhere)
        if seconds is not None:
            self._step_s.add(seconds, now)
