"""Forecasts: how long a tier's reads, a prefill and a copy will take, learned from how long they took; and what of a
hit to take. Pure: every time comes from the caller, monotonic seconds; no clock, lock or I/O.

What is unknown is taken to be fast: a hit is tried, and teaches. What is learned is forgotten with time or work, so
that a tier or an engine that changes is believed to have changed. Owners guard these objects with their own lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtier.chunk import ChunkKey
from kvtier.directory import FILLING, READY, Directory
from kvtier.steps import Steps

_FORGET_S = 2.0
"""After this time without a sample the next one has 63 % of the say."""
_LEAST_SAY = 1 / 8
_PROBE_S, _PROBE_READS, _LONGEST_PROBE_S = 2.0, 4.0, 30.0
"""Pause between trial reads of a tier that is declined: this, and this many reads of it; at most so long."""
_LEAST_ODDS = 0.02
_MOST_STEPS = 32

_LEAST_TOKENS = 128
"""Of a step beyond one a request, to learn prefill from it; with fewer, what each step costs anyway hides it."""
_HALF_TOKENS = 32_768
"""Half of what is known of prefill comes from this many tokens."""
_DEPTHS_APART = 256.0
"""Steps whose depths are closer than this many tokens do not tell what depth costs."""

_SAFETY = 0.9
"""Waiting must cost less than this part of what it saves: at the break-even point nothing is gained by either."""
_PATIENCE, _LEAST_PATIENCE = 3.0, 1 / 8
"""A load is given up after this multiple of what was forecast, and no sooner than this part of what it saves: the first
reads of a tier open connections and touch memory, and to lose seconds of compute over milliseconds is no bargain."""


class Average:
    """Exponentially weighted moving average (Roberts 1959) of samples that come at irregular times.

    A sample's weight grows with the time since the last one (the "last point" scheme of Zumbach and Müller, *Operators
    on inhomogeneous time series*, 2001), from 1/8 in a burst to nearly 1 after a long silence.
    """

    __slots__ = ("at", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        """None before the first sample."""
        self.at = 0.0
        """Of the last sample."""

    def add(self, sample: float, now: float) -> None:
        """A sample that is negative or not finite (a clock that jumped) is left out."""
        if not 0 <= sample < math.inf:
            return
        if self.value is None:
            self.value = sample
        else:
            say = max(_LEAST_SAY, 1 - math.exp(-max(0.0, now - self.at) / _FORGET_S))
            self.value = (1 - say) * self.value + say * sample
        self.at = now


class Pace:
    """One tier's lane: what its threads do now, what waits for them, how long one chunk takes.

    All chunks of a Store are equally large, so latency and bandwidth need not be told apart: seconds a chunk, measured
    with as many reads beside it as there usually are.
    """

    def __init__(self, threads: int) -> None:
        self.queued = 0.0
        """Reads, and parts of reads, submitted and not begun."""
        self.odds = 1.0
        """Which part of what a shared tier is asked for it turns out to hold."""
        self._threads = max(1, threads)
        self._reads, self._writes = Average(), Average()
        self._begun: dict[int, float] = {}
        self._calls = 0
        self._probing = False
        self._probed_at = -math.inf

    @property
    def chunk_s(self) -> float | None:
        """Seconds of one read; before there was one, of one write; None before there was any."""
        return self._writes.value if self._reads.value is None else self._reads.value

    def begun(self, now: float) -> int:
        """A thread calls the tier; give the number back when the call ends."""
        self._calls += 1
        self._begun[self._calls] = now
        return self._calls

    def read(self, call: int, now: float, whole: bool, parts: float = 1) -> None:
        """A read ended, of one of so many parts. One that failed says how slow the tier can be, never how fast."""
        self._took((now - self._begun.pop(call)) * parts, now, whole)

    def wrote(self, call: int, now: float, stored: bool) -> None:
        seconds = now - self._begun.pop(call)
        if stored:
            self._writes.add(seconds, now)

    def asked(self, call: int, now: float, found: float) -> None:
        """A find ended; ``found``: which part of the run is held. It is no slower than a read, or shows that."""
        self._took(now - self._begun.pop(call), now, whole=False)
        self.odds += _LEAST_SAY * (found - self.odds)

    def wait(self, reads: int, now: float) -> float | None:
        """Seconds until ``reads`` more reads have ended, behind all that is queued and under way; None: unknown.

        A fluid queue of equal threads: each takes work from when it is free, and all end together. A call that is
        overdue is expected to last as long again as it has lasted (Lindy's law), so a tier that stalls is believed
        slow before the first call fails.
        """
        ages = [max(0.0, now - at) for at in self._begun.values()]
        one = self.chunk_s
        if one is None:
            if not ages:
                return None
            one = max(ages)
        free = sorted(age if age > one else one - age for age in ages)[: self._threads]
        free = [0.0] * (self._threads - len(free)) + free
        work, end = (self.queued + reads) * one, 0.0
        for threads in range(1, self._threads + 1):
            end = (work + sum(free[:threads])) / threads
            if threads == self._threads or end <= free[threads]:
                break
        return max(end, free[0] + one)

    def probe_due(self, now: float) -> bool:
        """May one chunk be read for the sake of learning? If so, :meth:`probed` must follow."""
        pause = min(_PROBE_S + _PROBE_READS * (self.chunk_s or 0.0), _LONGEST_PROBE_S)
        if self._probing or now - self._probed_at < pause:
            return False
        self._probing = True
        return True

    def probed(self, now: float) -> None:
        self._probing, self._probed_at = False, now

    def _took(self, seconds: float, now: float, whole: bool) -> None:
        if whole or seconds > (self.chunk_s or 0.0):
            self._reads.add(seconds, now)


class Asking(NamedTuple):
    """What asking a shared tier for the unknown rest of a run would take."""

    answer_s: float | None
    """Seconds until it has answered; None: unknown."""
    arrive_s: float | None
    """Seconds until all of the rest is in RAM, if it has it."""
    odds: float
    """How likely it has it."""


class Outlook(NamedTuple):
    """How far a run can be served, and when."""

    steps: Sequence[tuple[int, float | None]]
    """``(chunks, seconds)``: so many leading chunks are in RAM so many seconds after they are claimed; None: unknown.
    The first step is what is there now, in no time; the last is all that is known of."""
    asking: Asking | None = None
    why: str = ""
    """The reason why there is no more of the run: see :mod:`kvtier.reasons`; "": there is all, or nobody answered."""

    @property
    def ready(self) -> int:
        return self.steps[0][0]

    @property
    def known(self) -> int:
        return self.steps[-1][0]


NOTHING = Outlook([(0, 0.0)])


_AT_ONCE = 1024
"""Chunks in one piece of :func:`look`: a few tenths of a millisecond."""
Wait = Callable[[int], float | None]
"""Seconds until so many more reads of one tier have ended; None: unknown."""


def look(directory: Directory, waits: Sequence[Wait], keys: Sequence[ChunkKey]) -> Steps[Outlook]:
    """The outlook of a run, but for asking. One step for each change of place, as between two changes the time saved
    by loading one chunk more only grows: the best place to stop is an end (:func:`choose`). In pieces, each under the
    Store's lock."""
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
    return Outlook([*steps, (end, _arrival(waits, reads))])


def _arrival(waits: Sequence[Wait], reads: Mapping[int, int]) -> float | None:
    """When all ``reads`` by tier, and what is on its way from those tiers already, have ended."""
    seconds = [waits[index](count) for index, count in reads.items()]
    known = [one for one in seconds if one is not None]
    return max(known, default=0.0) if len(known) == len(seconds) else None


class Prefill:
    """Seconds to compute ``n`` tokens behind ``c`` that are there: ``n * a + (n * c + n * n / 2) * d``.

    ``a`` is the weights' share of a token, ``d`` causal attention's for each token it looks back at. Both come from a
    weighted least squares line, seconds a token over mean depth, whose past fades with the tokens computed since
    (recursive least squares with exponential forgetting; Haykin, *Adaptive Filter Theory*, chapter 10, in its sums
    form). Weights are squares of tokens: what a step costs whatever it computes is an error of constant size. ``d`` is
    drawn to its first value (ridge) as long as all steps are equally deep, and neither is ever negative.
    """

    def __init__(self, per_token: float | None = None, per_depth: float = 0.0) -> None:
        """``per_token`` and ``per_depth``: an estimate to start from, see :meth:`guess`; None: unknown."""
        self._first_depth = per_depth
        self._sums = [0.0] * 5
        self._line: tuple[float, float] | None = None
        if per_token is not None:
            self.guess(per_token)

    def guess(self, per_token: float) -> None:
        """Seconds a token, worth a step of 128 tokens; where something is known already, no effect."""
        if self._line is None and 0 < per_token < math.inf:
            weight = float(_LEAST_TOKENS**2)
            self._sums = [weight, 0.0, weight * per_token, 0.0, 0.0]
            self._line = per_token, self._first_depth

    def seconds(self, tokens: int, cached: int) -> float | None:
        """None while nothing is known."""
        if self._line is None:
            return None
        flat, slope = self._line
        return tokens * flat + (tokens * cached + tokens * tokens / 2) * slope

    def learn(self, tokens: int, looks: float, seconds: float) -> None:
        """A step computed ``tokens`` tokens, which looked back at ``looks`` tokens in all, in ``seconds``."""
        if tokens < 1 or not 0 < seconds < math.inf:
            return
        weight, depth, each = float(tokens) ** 2, looks / tokens, seconds / tokens
        fade = 0.5 ** (tokens / _HALF_TOKENS)
        sample = (1.0, depth, each, depth * depth, depth * each)
        self._sums = [old * fade + weight * new for old, new in zip(self._sums, sample, strict=True)]
        total, *rest = self._sums
        x, y, xx, xy = (one / total for one in rest)
        ridge = _DEPTHS_APART**2
        slope = max(0.0, (xy - x * y + ridge * self._first_depth) / (max(0.0, xx - x * x) + ridge))
        self._line = (y - slope * x, slope) if y > slope * x else (0.0, xy / xx)


class StepClock:
    """How long the engine was busy with a step: from when it was planned, or the step before had ended if that is
    later, until its output was seen by the scheduler.

    That is a first-come-first-served server's service time, so neither idle time nor steps planned ahead (asynchronous
    scheduling, pipeline stages) count; and it needs no clock of the device, whose work is asynchronous to the worker's
    calls. It holds what a prompt really waits for: the forward pass, sampling, messages and scheduling.
    """

    def __init__(self, prefill: Prefill) -> None:
        self.number = 0
        """Of the last step planned."""
        self._prefill = prefill
        self._planned: dict[int, tuple[float, int, int, float]] = {}
        self._seen, self._seen_at = 0, -math.inf
        self._small = Average()
        self._warm = False

    def plan(self, now: float, work: Sequence[tuple[int, int]]) -> int:
        """A step that computes, for each request, ``(tokens, tokens there before)``; its number."""
        self.number += 1
        tokens = sum(new for new, _ in work)
        looks = sum(new * before + new * new / 2 for new, before in work)
        self._planned[self.number] = now, tokens, len(work), looks
        return self.number

    def end(self, number: int, now: float, elsewhere: float) -> None:
        """The step's output was seen; ``elsewhere``: seconds of it that went into copies, which would not be there
        without them. A step whose output was never seen spoils the next one, which is left out."""
        step = self._planned.pop(number, None)
        in_turn, since = number == self._seen + 1, self._seen_at
        self._seen, self._seen_at = number, now
        for missed in [one for one in self._planned if one < number]:
            del self._planned[missed]
        if step is None or not in_turn:
            return
        planned_at, tokens, requests, looks = step
        seconds = now - max(planned_at, since) - elsewhere
        if tokens - requests >= _LEAST_TOKENS:
            if self._warm:
                self._prefill.learn(tokens, looks, seconds - min(self._small.value or 0.0, seconds / 2))
            else:  # an engine's first prefill loads what the others find loaded: a hint, no measure
                self._prefill.guess(seconds / tokens)
            self._warm = True
        elif 0 < tokens == requests:
            self._small.add(seconds, now)


class Choice(NamedTuple):
    """What of a hit to take."""

    chunks: int
    """Leading chunks to claim."""
    ask: bool
    """Claim the unknown rest too."""
    within_s: float
    """When to take what is there and compute the rest."""


def choose(outlook: Outlook, rest: int, saved: Callable[[int], float | None]) -> Choice:
    """The part of a run of ``rest`` chunks that is soonest served.

    ``saved(chunks)``: seconds of compute, less those of the copy, that so many leading chunks save; None: unknown,
    and then all is taken. Only ends of the outlook's steps are looked at: between them waiting grows evenly while what
    a chunk saves grows with its depth, so the difference has its maximum at an end.

    The deadline is a multiple of the forecast, at least an eighth and never more than what computing would have cost:
    waiting in vain at most doubles the time to the first token, once (the competitive ratio 2 of ski rental, Karlin et
    al. 1988).
    """
    ready = outlook.ready
    best, worth, wait = ready, saved(ready), 0.0
    if worth is None:
        return Choice(outlook.known, outlook.asking is not None, math.inf)
    if worth < 0:
        best, worth = 0, 0.0
    at_once = worth
    soon: float | None = wait
    for chunks, seconds in outlook.steps[1:]:
        gain = (saved(chunks) or 0.0) - (seconds or 0.0) / _SAFETY
        if chunks > best and gain > worth:
            best, worth, soon = chunks, gain, seconds
    ask = best == outlook.known and _worth_asking(outlook, best, rest, saved)
    if ask and outlook.asking is not None:
        soon = outlook.asking.arrive_s
    most = (saved(rest if ask else best) or 0.0) - at_once
    patience = math.inf if soon is None else max(_PATIENCE * soon, _LEAST_PATIENCE * most)
    return Choice(best, ask, max(0.0, min(patience, most)))


def _worth_asking(outlook: Outlook, chunks: int, rest: int, saved: Callable[[int], float | None]) -> bool:
    """Is what a shared tier may have worth the answer that it has nothing?"""
    asking = outlook.asking
    if asking is None:
        return False
    gain = (saved(rest) or 0.0) - (saved(chunks) or 0.0) - (asking.arrive_s or 0.0) / _SAFETY
    odds = max(asking.odds, _LEAST_ODDS)
    return odds * gain > (1 - odds) * (asking.answer_s or 0.0)
