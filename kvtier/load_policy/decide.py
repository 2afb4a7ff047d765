"""LoadPolicy: whether a hit is loaded or declined. It estimates how long the engine would compute,
and :func:`kvtier.load_policy.choose.choose` compares that with the tiers. Memory only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtier.load_policy.choose import HitEnd, LoadPlan, choose, load_all
from kvtier.load_policy.latency import Average
from kvtier.load_policy.prefill import Certainty, Prefill, StepClock, Work

BUSY_COPY_S, BUSY_COPY_PART = 0.005, 0.05
"""Longest time, in seconds or as a part of its forward pass, whichever is longer, that copies of
loads add to a step that computes. Counts where workers copy by themselves."""
_COPY_KNOWN_S = 10.0
"""Time for which a measured speed of copies holds. Afterwards copies count as free until one is
measured, so that hits which were declined because of them are tried again."""

_DOUBT_FACTOR = 4.0
"""Factor by which remembered speeds must call the first load too slow before they forbid it: the
host may be busier than it was, and computing slower too."""
_TRIFLE_S = 0.25
"""Longest estimate of a load that is never declined before the engine was measured in this run: on
a busy host a small model may compute much slower than in an earlier run."""
_SLOWEST_BYTES_S, _SLOWEST_CHUNK_S = 50e6, 0.1
"""Bytes a second, and seconds for each chunk, of the slowest tier that is worth having. A load that
was begun on a guess has the time that it takes at this pace, if chunks keep coming."""
_PART_S = 0.0025
"""Shortest copy of one part of a load. Each part costs a step in which nothing else may be done,
which takes less than half of this."""
_TOGETHER_STEPS = 16
"""Most steps without a prompt or a load that are learned from together. Caches that a step has
emptied are filled once for all of them."""


class LoadPolicy:
    """Choice of loads that learns from every step of one engine, in its scheduling loop's thread.

    An engine that has just started knows nothing of its speed, or what an earlier run has measured.
    Until its first load has ended it loads what it can: a local disk beats computing on every
    engine that is known, and a wrong guess costs one prompt. Then the tiers have shown their pace,
    and a plan of the engine's speed or a bound of it counts where the pace is slow.

    Args:
        timeout_s: longest that nothing may arrive of a load that is waited for.
        always: take every hit whole, for comparison.
        prefill: what is known of the engine's speed at the start.
        slowest_s: of loading a token, see :func:`slowest_token_s`.
        slice_s: where workers copy by themselves, :data:`BUSY_COPY_S` and :data:`BUSY_COPY_PART`.
            None: a device copies beside the steps.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        always: bool = False,
        prefill: Prefill | None = None,
        slowest_s: float = 0.0,
        slice_s: tuple[float, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.timeout_s = timeout_s
        self._always = always
        self.prefill = prefill or Prefill()
        self._steps = StepClock(self.prefill)
        self._slowest_s, self._slice_s = slowest_s, slice_s
        self._tried = False
        self._copy = Average()
        """Seconds of one token's copy from slots to blocks."""
        self._step_s = Average()
        self._queued = 0
        self._prompt_step = 0
        """Number of the last planned step that computes tokens of a prompt."""
        self._ended: list[tuple[int, float, float]] = []
        """Arguments of :meth:`StepClock.end`, of steps that nothing was learned from yet."""

    def choose(self, ends: Sequence[HitEnd], before: int, *, busy: bool = False) -> LoadPlan:
        """Choose the load of a request that has ``before`` tokens by itself. ``ends``: where its
        hit may end, at least one row. ``busy``: the engine computes for other requests."""
        self._learn()
        saved_s = [self._saved_s(end.tokens, before, busy) for end in ends]
        return self._guessed(ends, saved_s) or choose(ends, _all(saved_s))

    def choose_in_parts(
        self, ends: Sequence[HitEnd], before: int, turns: Sequence[int], *, busy: bool = False
    ) -> LoadPlan:
        """Choose the load of a hit that is promised before all of it is in RAM. The first row is in
        RAM.

        A wait counts twice, because its distance from its mean is not measured. In a busy
        engine a row also waits for its ``turns``: how often all slots that it may have are filled,
        copied in one step and confirmed in the next.
        """
        self._learn()
        saved_s = [self._saved_s(end.tokens, before, busy) for end in ends]
        if (guessed := self._guessed(ends, saved_s)) is not None:
            return guessed
        step_s = 2 * (self._step_s.value or 0.0) if busy else 0.0
        sure = [
            end
            if end.wait_s is None or not turn
            else end._replace(wait_s=2 * end.wait_s + turn * step_s)
            for end, turn in zip(ends, turns, strict=True)
        ]
        return choose(sure, _all(saved_s))

    def _guessed(self, ends: Sequence[HitEnd], saved_s: Sequence[float | None]) -> LoadPlan | None:
        """Return the plan while too little is known to decide; None if enough is known. Its
        deadline is no guess: it grows with the bytes."""
        if self._always:
            return load_all(ends)
        known, wait_s = self.prefill.known, ends[-1].wait_s
        is_first = not self._tried and known < Certainty.MEASURED
        is_trifle = wait_s is not None and wait_s <= _TRIFLE_S and known < Certainty.MEASURED
        if None in saved_s or is_trifle or (known <= Certainty.GUESSED and is_first):
            plan = load_all(ends)
        elif is_first:
            plan = choose([_hoped(end) for end in ends], _all(saved_s))
        else:
            return None
        tokens = ends[-1].tokens - ends[0].tokens
        return plan._replace(within_s=self.timeout_s + tokens * self._slowest_s)

    def parts(self, tokens: int) -> int:
        """Return into how many parts the copy of ``tokens`` is worth dividing, 0 if its pace is not
        known."""
        return int(tokens * (self._copy.value or 0.0) / _PART_S)

    def _saved_s(self, tokens: int, before: int, busy: bool) -> float | None:
        """Return the seconds that ``tokens`` in RAM save, less their copy's. None if unknown."""
        compute_s = self.prefill.seconds(tokens, before)
        if compute_s is None or not tokens:
            return compute_s
        return compute_s - self._load_s(tokens, busy)

    def _load_s(self, tokens: int, busy: bool) -> float:
        """Return the seconds from the grant until the request can go on: the copies before it and
        its own. In a busy engine also the rest of the step in which it was granted, and as many
        steps as its copies are spread over."""
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

    def planned(self, work: Work) -> int:
        """Note that a step with this work is planned. Returns its number."""
        number = self._steps.plan(self.clock(), work)
        if work.tokens > work.requests:
            self._prompt_step = number
        return number

    def load_began(self, tokens: int) -> None:
        self._queued += tokens

    def load_ended(self, tokens: int) -> None:
        self._queued -= tokens
        self._tried = True

    def gave_up(self) -> None:
        self._tried = True

    def ended(self, step: int, loaded: float, load_s: float, elsewhere: float) -> None:
        """Learn from the report of a step, in which ``loaded`` tokens were copied in ``load_s``.
        ``elsewhere``: seconds that went into saves."""
        now = self.clock()
        self._ended.append((step, now, load_s + elsewhere))
        if loaded:
            self._copy.add(load_s / loaded, now)
        if loaded or step <= self._prompt_step or len(self._ended) == _TOGETHER_STEPS:
            self._learn()

    def _learn(self) -> None:
        """Learn from the steps that have ended since the last call."""
        for step, now, elsewhere in self._ended:
            seconds = self._steps.end(step, now, elsewhere)
            if seconds is not None:
                self._step_s.add(seconds, now)
        self._ended.clear()


def slowest_token_s(chunk_tokens: int, chunk_bytes: int) -> float:
    """Return the most seconds a token that a load on a guess may take."""
    return (_SLOWEST_CHUNK_S + chunk_bytes / _SLOWEST_BYTES_S) / chunk_tokens


def _hoped(end: HitEnd) -> HitEnd:
    """Return ``end`` with each of its waits divided by the factor of doubt."""

    def least(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / _DOUBT_FACTOR

    asking = end.asking and end.asking._replace(
        answer_s=least(end.asking.answer_s), arrive_s=least(end.asking.arrive_s)
    )
    return HitEnd(end.tokens, least(end.wait_s), asking)


def _all(saved_s: Sequence[float | None]) -> list[float]:
    return [seconds for seconds in saved_s if seconds is not None]
