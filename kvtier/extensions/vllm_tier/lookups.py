"""Which chunks a server holds, asked in the background: vLLM asks chunk by chunk, step by step, on
its scheduler's thread. Pure: no I/O, lock, thread or log.

An answer that does not come in time is a miss, so no request is deferred for longer. A verdict
stands until its request has ended. So a chunk that was found and then could not be loaded does not
send the request round and round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

Question = tuple[str, list[bytes]]
"""Request id and a run of its chunks to ask the server for."""
_GROUP_BYTES = 4
"""Last bytes of a vLLM key, which name its cache group."""


class Lookups:
    """Verdicts on chunks, by request. For one thread, but for :meth:`answered`. An answer may take
    ``timeout_s`` of ``clock``'s seconds. ``counts`` is of verdicts."""

    def __init__(self, clock: Callable[[], float], timeout_s: float, counts: Counter[str]) -> None:
        self._clock, self.timeout_s, self._counts = clock, timeout_s, counts
        self._verdicts = dict[str, dict[bytes, bool | float]]()
        """Verdicts by request and chunk. A number is the time until which an answer may come."""
        self._questions = dict[tuple[str, bytes], list[bytes]]()
        self._answers = deque[tuple[Question, Sequence[bool]]]()

    def held(self, key: bytes, request: str) -> bool | None:
        """Whether the chunk is held; None while the server is asked."""
        while self._answers:
            (asked_by, keys), answer = self._answers.popleft()
            asked = self._verdicts.get(asked_by, {})
            for one, is_held in zip(keys, answer, strict=True):
                if isinstance(asked.get(one), float):
                    asked[one] = is_held
                    self._counts["hit" if is_held else "miss"] += 1
        verdicts = self._verdicts.setdefault(request, {})
        verdict = verdicts.get(key)
        if verdict is None:
            verdicts[key] = self._clock() + self.timeout_s
            self._questions.setdefault((request, key[-_GROUP_BYTES:]), []).append(key)
            return None
        if isinstance(verdict, bool):
            return verdict
        if self._clock() < verdict:
            return None
        self._counts.update(("late", "miss"))
        verdicts[key] = False
        return False

    def questions(self) -> list[Question]:
        """Take the runs to ask for now: one for each request and cache group."""
        questions, self._questions = self._questions, {}
        return [(request, keys) for (request, _), keys in questions.items()]

    def answered(self, question: Question, answer: Sequence[bool]) -> None:
        """Queue an answer. Any thread."""
        self._answers.append((question, answer))

    def failed(self, request: str, keys: Iterable[bytes]) -> None:
        """Turn the verdicts on chunks that could not be loaded into misses."""
        self._verdicts.get(request, {}).update(dict.fromkeys(keys, False))

    def ended(self, request: str) -> None:
        self._verdicts.pop(request, None)
