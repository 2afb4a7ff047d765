"""Which chunks a server holds, asked in the background: vLLM asks chunk by chunk, step by step, on
its scheduler's thread. Pure: no I/O, lock, thread or log.

An answer that does not come in time is a miss, so no request is deferred for longer. A verdict
stands until the last request that asked for it has ended. So a chunk that was found and then could
not be loaded does not send its request round and round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Answer = Sequence[tuple[bytes, bool]]
GROUP_BYTES = 4
"""The end of a vLLM key: its cache group."""


@dataclass(slots=True)
class _Verdict:
    until: float
    held: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """One thread calls it, but for :meth:`answered`.

    Args:
        clock: seconds.
        timeout_s: how long an answer may take.
        counts: of answers, by what they were.
    """

    def __init__(self, clock: Callable[[], float], timeout_s: float, counts: Counter[str]) -> None:
        self.counts = counts
        self._clock, self.timeout_s = clock, timeout_s
        self._verdicts = dict[bytes, _Verdict]()
        self._keys = dict[str, set[bytes]]()
        self._questions = dict[tuple[str, bytes], list[bytes]]()
        self._answers = deque[Answer]()

    def held(self, key: bytes, request: str) -> bool | None:
        """Whether the chunk is held. None: it is being asked."""
        while self._answers:
            for one, held in self._answers.popleft():
                known = self._verdicts.get(one)
                if known is not None and known.held is None:
                    self._decide(known, held)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = _Verdict(self._clock() + self.timeout_s)
            self._questions.setdefault((request, key[-GROUP_BYTES:]), []).append(key)
        if request not in verdict.requests:
            verdict.requests.add(request)
            self._keys.setdefault(request, set()).add(key)
        if verdict.held is None and self._clock() >= verdict.until:
            self.counts["late"] += 1
            self._decide(verdict, False)
        return verdict.held

    def questions(self) -> list[list[bytes]]:
        """Runs that are to be asked for now: one for each request and cache group."""
        questions, self._questions = self._questions, {}
        return list(questions.values())

    def answered(self, answer: Answer) -> None:
        """Any thread."""
        self._answers.append(answer)

    def failed(self, keys: Iterable[bytes]) -> None:
        """Chunks that could not be loaded are misses."""
        for key in keys:
            if key in self._verdicts:
                self._verdicts[key].held = False

    def ended(self, request: str) -> None:
        for key in self._keys.pop(request, ()):
            requests = self._verdicts[key].requests
            requests.discard(request)
            if not requests:
                del self._verdicts[key]

    def _decide(self, verdict: _Verdict, held: bool) -> None:
        verdict.held = held
        self.counts["hit" if held else "miss"] += 1
