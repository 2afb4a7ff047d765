"""Returns: when sessions come back, learnt from nothing but their prompts, and what a slot is worth
until then. Pure and deterministic.

The age of a session is cut into bins. The chance that it comes back in a bin, if it has not come
back before, is a logistic regression over what is known of its last prompts (a discrete-time hazard
model: Cox, *Regression models and life-tables*, JRSS B 34(2), 1972), learnt online (AdaGrad: Duchi,
Hazan, Singer, JMLR 12, 2011). From these chances follows the most hits that a slot can have in a
second if the session keeps it from its present age on and gives it back at the best time (Gittins,
*Bandit processes and dynamic allocation indices*, JRSS B 41(2), 1979).

Nothing is learnt from the future: a bin is learnt when the session has come back in it, or has
passed it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from heapq import heappop, heappush
from itertools import pairwise

EDGES = (0, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1200, 2400, 4800)
"""Seconds of age at which the bins begin."""
_BINS = len(EDGES)
_SECONDS = (*(float(end - begin) for begin, end in pairwise(EDGES)), 4800.0)
"""The length of each bin. The last one has no end: it counts as long as all before it."""
_LEARNT_UNTIL = EDGES.index(4800)
"""The first bin that is not learnt: sessions this old are given up."""
_ERAS = tuple((at >= 8) + (at >= 60) + (at >= 300) for at in EDGES)
"""What is known of a prompt weighs differently in seconds, in a minute, in minutes and later."""
_NEW_ERA = (*(at for at in range(1, _LEARNT_UNTIL) if _ERAS[at] > _ERAS[at - 1]), _LEARNT_UNTIL)
"""Bins at which what was passed before is learnt at once."""
_CLASSES, _FEATURES, _LAST_ERA = 16, 9, 3
_RATE = 0.12
_FIRST_GUESS = -3.0
_TAUGHT_BY_ALL = 2000
"""Prompts after which it is enough to learn from a part of the sessions."""
_BUSY = 1e3
"""Hits in a second: more than any session is worth."""
_ANSWERED_WITHIN = EDGES.index(120)
"""The bin in which an answer is waited for no longer."""
_NO_GAP = _CLASSES - 1
_MOST_SESSIONS = 16_384
"""A session takes 0.7 KiB."""
_LEAST_PROMPTS = 200
"""With fewer prompts nothing is known: all sessions are worth the same."""


class LastPrompt:
    """A session after its last prompt."""

    __slots__ = (
        "answer",
        "answer_before",
        "at",
        "bin",
        "chunks",
        "gap",
        "growth",
        "index",
        "learnt",
        "mean_gap",
        "message",
        "new",
        "places",
        "tokens",
        "turn",
    )

    def __init__(self, at: float, tokens: int, chunks: int) -> None:
        self.at, self.tokens, self.chunks = at, tokens, chunks
        self.new = chunks
        """Chunks that the prompt before did not have."""
        self.answer = self.answer_before = 0
        """Tokens of the answers to its last prompt and the one before. 0: not known."""
        self.turn, self.message = 1, tokens
        """``message``: tokens that the last prompt has and neither the one before nor its
        answer."""
        self.gap, self.mean_gap, self.growth = -1.0, -1.0, -1.0
        """Seconds between the last two prompts, their mean, and how much longer the last one is.
        Negative: there was only one."""
        self.bin = self.learnt = 0
        """``learnt``: the first bin that was not learnt yet."""
        self.places: list[int] = []
        """Of its weights, in each era."""
        self.index: list[float] = []
        """The worth of a slot by bin."""

    def follow(self, before: LastPrompt) -> None:
        """This is the same session's next prompt."""
        self.turn = before.turn + 1
        self.gap = self.at - before.at
        known = before.mean_gap
        self.mean_gap = self.gap if known < 0 else 0.7 * known + 0.3 * self.gap
        self.answer_before = before.answer
        self.message = max(0, self.tokens - before.tokens - before.answer)
        self.new = max(0, self.chunks - before.chunks)
        self.growth = self.tokens / max(1, before.tokens)

    def features(self) -> tuple[int, ...]:
        """A class for each, below 16."""
        return (
            _top((self.turn * self.turn).bit_length()),
            _top((self.tokens >> 6).bit_length()),
            _top(self.answer.bit_length()),
            _top(self.message.bit_length()),
            _gap_class(self.gap),
            _gap_class(self.mean_gap),
            _top(self.answer_before.bit_length()),
            _top(self.new.bit_length()),
            _NO_GAP if self.growth < 0 else min(_NO_GAP - 1, max(0, int(8 * self.growth - 7))),
        )


def _top(number: int) -> int:
    return min(number, _CLASSES - 1)


def _gap_class(seconds: float) -> int:
    return _NO_GAP if seconds < 0 else min(bin_of(seconds), _NO_GAP - 1)


def bin_of(age: float) -> int:
    """The bin of this age in seconds."""
    return max(0, bisect_right(EDGES, age) - 1)


class Learner:
    """The weights of one model's sessions."""

    __slots__ = ("_base", "_base_sums", "_sums", "_weights", "prompts")

    def __init__(self) -> None:
        count, eras = _FEATURES * _CLASSES, range(_LAST_ERA + 1)
        self._base, self._base_sums = [_FIRST_GUESS] * _BINS, [0.0] * _BINS
        self._weights = [[0.0] * count for _ in eras]
        """By era."""
        self._sums = [[0.0] * count for _ in eras]
        """Of the squares of each weight's gradients."""
        self.prompts = 0

    def places(self, features: tuple[int, ...]) -> list[int]:
        """Where the weights of these classes are."""
        return [number * _CLASSES + each for number, each in enumerate(features)]

    def learn(self, places: list[int], first: int, end: int, *, came: bool) -> None:
        """A session passed the bins from ``first`` to before ``end``, all of one era, or it came
        back in the last one of these."""
        era, base, base_sums = _ERAS[first], self._base, self._base_sums
        weights, sums, sqrt = self._weights[era], self._sums[era], math.sqrt
        known, slope = sum([weights[place] for place in places]), 0.0
        for at in range(first, end):
            error = 1.0 / (1.0 + math.exp(-base[at] - known))
            if came and at == end - 1:
                error -= 1.0
            total = base_sums[at] = base_sums[at] + error * error
            base[at] -= _RATE * error / sqrt(total)
            slope += error
        square, rate = slope * slope, _RATE * slope
        for place in places:
            total = sums[place] = sums[place] + square
            weights[place] -= rate / sqrt(total)

    def index(self, places: list[int]) -> list[float]:
        """For each bin: the most hits that a slot can have in a second, if the session keeps it
        from this bin on for as many bins as is best."""
        exp = math.exp
        sums = [sum([weights[place] for place in places]) for weights in self._weights]
        hits, seconds, alive = [], [], 1.0
        for base, era, length in zip(self._base, _ERAS, _SECONDS, strict=True):
            chance = 1.0 / (1.0 + exp(-base - sums[era]))
            hits.append(alive * chance)
            seconds.append(alive * length * (1.0 - 0.5 * chance))
            alive *= 1.0 - chance
        return _best_ratios(hits, seconds)


def _best_ratios(hits: list[float], seconds: list[float]) -> list[float]:
    """For each place the largest ratio of sums that begin there, wherever they end. From the end
    on, a stretch takes in the next one while that is the better one."""
    found, stretches = list[float](), [(0.0, 1.0)]
    for own, length in zip(reversed(hits), reversed(seconds), strict=True):
        hit, second = own, length
        more, longer = stretches[-1]
        while more * second > hit * longer:
            hit, second = hit + more, second + longer
            stretches.pop()
            more, longer = stretches[-1]
        stretches.append((hit, second))
        found.append(hit / second if second else 0.0)
    found.reverse()
    return found


class Returns:
    """The sessions of one place's prompts. Used by one thread at a time. Times are seconds, which
    never go back."""

    __slots__ = ("_due", "_learner", "_seen")

    def __init__(self) -> None:
        self._learner = Learner()
        self._seen: OrderedDict[int, LastPrompt] = OrderedDict()
        self._due: list[tuple[float, int, float]] = []
        """When a session passes its bin, its number, and the time of its last prompt: another one
        since then, and this is void. A heap."""

    def prompt(
        self, session: int, now: float, tokens: int, chunks: int, *, is_answered: bool = False
    ) -> None:
        """A session's prompt. ``is_answered``: :meth:`answered` will follow. Until then, but not
        for longer than :data:`_ANSWERED_WITHIN`, the session is worth more than any that waits."""
        learner, seen = self._learner, LastPrompt(now, tokens, chunks)
        learner.prompts += 1
        before = self._seen.pop(session, None)
        if before is not None:
            seen.follow(before)
            if not before.index:
                self._weigh(session, before)
            if before.bin < _LEARNT_UNTIL and self._teaches(session):
                self._learn(before, before.bin)
                learner.learn(before.places, before.learnt, before.bin + 1, came=True)
        self._seen[session] = seen
        if not is_answered:
            self._weigh(session, seen)
        heappush(self._due, (now + EDGES[1], session, now))
        if len(self._seen) > _MOST_SESSIONS:
            self._seen.popitem(last=False)

    def answered(self, session: int, tokens: int) -> bool:
        """The answer to the session's last prompt had so many tokens. False: it is not known."""
        seen = self._seen.get(session)
        if seen is None:
            return False
        seen.answer = tokens
        self._weigh(session, seen)
        return True

    def over(self, session: int) -> None:
        """A hint says that the session has ended. Hints are not learnt from."""
        self._seen.pop(session, None)

    def begin_anew(self) -> None:
        """Prompts came that were not told. What was learnt stays known."""
        self._seen.clear()
        self._due.clear()

    def _teaches(self, session: int) -> bool:
        """Whether the session is learnt from: all are at first, and a third of them later."""
        return self._learner.prompts < _TAUGHT_BY_ALL or not session % 3

    def _weigh(self, session: int, seen: LastPrompt) -> None:
        """What is known of the session is all that will be known before its next prompt."""
        learner = self._learner
        seen.places = learner.places(seen.features())
        seen.index = learner.index(seen.places)

    def _learn(self, seen: LastPrompt, now: int) -> None:
        """The session has passed all eras before that of this bin."""
        for end in _NEW_ERA:
            if seen.learnt < end <= now:
                self._learner.learn(seen.places, seen.learnt, end, came=False)
                seen.learnt = end

    def pass_time(self, now: float, most: int) -> list[int]:
        """The time is ``now``. Returns up to ``most`` sessions that have passed a bin, each of
        which is worth something else now."""
        due, passed = self._due, list[int]()
        while due and due[0][0] <= now and len(passed) < most:
            _, session, at = heappop(due)
            seen = self._seen.get(session)
            if seen is None or seen.at != at:
                continue
            if not seen.index and seen.bin >= _ANSWERED_WITHIN:
                self._weigh(session, seen)
            seen.bin += 1
            if seen.index and seen.bin in _NEW_ERA and self._teaches(session):
                self._learn(seen, seen.bin)
            passed.append(session)
            if seen.bin + 1 < _BINS:
                heappush(due, (at + EDGES[seen.bin + 1], session, at))
        return passed

    def worth(self, session: int) -> tuple[float, float]:
        """Hits in a second of a slot that the session has, and the age in seconds at which its bin
        begins: infinite as long as nothing is known."""
        seen = self._seen.get(session)
        if self._learner.prompts < _LEAST_PROMPTS:
            return 0.0, math.inf
        if seen is None:
            return 0.0, float(EDGES[-1])
        return seen.index[seen.bin] if seen.index else _BUSY, float(EDGES[seen.bin])
