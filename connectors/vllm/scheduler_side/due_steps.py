"""In which step each running request is looked at. vLLM's scheduling loop, on one thread."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from kvtier.connectors.vllm.groups import Geometry, Kind

_TOGETHER_STEPS = 16
"""Steps of which one looks at answers of full attention alone, whose blocks stay as they are:
caches that a step has emptied are filled once for all of them."""
_MOST_ANSWERS = 32
"""Most answers that are looked at in one step."""


class DueSteps:
    """Requests that can have finished a chunk are due. Of hundreds that decode few are due in a
    step, and the others cost nothing. A due request waits for the next step in which answers are
    looked at (:data:`_TOGETHER_STEPS`), or for one with prompts.

    A step adds at most ``answer_tokens`` to what a request has of its answer. A request for which
    it computes more is looked at in any case, and so is each request of a model with states."""

    def __init__(self, geometry: Geometry, answer_tokens: int) -> None:
        self._always = any(group.kind is Kind.STATE for group in geometry.groups)
        self._together = _TOGETHER_STEPS if geometry.is_gradual else 1
        self._most, self._step, self._looked = answer_tokens, 0, 0
        self._due: dict[str, int] = {}
        """Request -> step in which it is due."""
        self._by_step: dict[int, list[str]] = {}
        """Step -> requests that were due in it, some of which have another step by now."""
        self._turn: dict[str, None] = {}
        """Due requests, looked at in the next step that computes them."""

    def begin(
        self, scheduled: Mapping[str, int], tokens: int, began: Sequence[str]
    ) -> Collection[str]:
        """Begin a step that computes ``scheduled`` tokens of each request, ``tokens`` in all.
        ``began``: those that begin, or begin anew. Returns the requests to look at, these first."""
        self._step += 1
        prompts = [*began]
        if tokens > len(scheduled) and max(scheduled.values()) > self._most:
            prompts += [one for one, count in scheduled.items() if count > self._most]
        if prompts or not self._step % self._together:
            steps = range(self._looked + 1, self._step + 1)
            self._turn.update((one, None) for at in steps for one in self._by_step.pop(at, ()))
            self._looked = self._step
        if not self._turn:
            return dict.fromkeys(prompts)
        self._turn = {one: None for one in self._turn if self._due.get(one, math.inf) <= self._step}
        found = [one for one in self._turn if one in scheduled][:_MOST_ANSWERS]
        for request_id in found:
            del self._turn[request_id]
        return dict.fromkeys((*prompts, *found))

    def __contains__(self, request_id: str) -> bool:
        """Return whether it can have finished more since it was looked at."""
        return self._due.get(request_id, math.inf) <= self._step + 1

    def wait(self, request_id: str, tokens: int | None) -> None:
        """Wait until ``tokens`` more can be there, the next step at the earliest. None if the
        request finishes nothing more, unless it begins anew."""
        if self._always:
            tokens = 0
        if tokens is None:
            self.forget(request_id)
            return
        steps = max(1, -(-tokens // self._most))
        self._due[request_id] = self._step + steps
        self._by_step.setdefault(self._step + steps, []).append(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended, or has other blocks: it is due when it has begun again."""
        self._due.pop(request_id, None)


class Running:
    """Requests that the last step computed for, if they have not finished."""

    def __init__(self) -> None:
        self._scheduled: Collection[str] = ()
        self._finished: set[str] = set()

    def __bool__(self) -> bool:
        return len(self._finished) < len(self._scheduled)

    def begin(self, scheduled: Collection[str]) -> None:
        """Begin a step that computes for these requests."""
        self._scheduled = scheduled
        self._finished.clear()

    def finished(self, request_id: str) -> None:
        if request_id in self._scheduled:
            self._finished.add(request_id)
