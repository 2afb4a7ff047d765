"""In which step each running request is looked at. vLLM's scheduling loop, on one thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvtier.connectors.vllm.groups import Geometry, Kind


class DueSteps:
    """A request is looked at no later than it can finish a chunk. Of hundreds that decode few are
    due in a step, and the others cost nothing.

    A step adds at most ``answer_tokens`` to what a request has of its answer. A request for which
    it computes more is looked at in any case, and so is each request of a model with states.
    """

    def __init__(self, geometry: Geometry, answer_tokens: int) -> None:
        self._always = any(group.kind is Kind.STATE for group in geometry.groups)
        self._most, self._step = answer_tokens, 0
        self._due: dict[str, int] = {}
        """Request -> its step."""
        self._by_step: dict[int, list[str]] = {}
        """The same by step, and some requests that have another step by now."""

    def begin(self, scheduled: Mapping[str, int], tokens: int) -> set[str]:
        """Begin a step that computes ``scheduled`` tokens of each request, ``tokens`` in all.
        Returns who is due."""
        self._step += 1
        due = {one for one in self._by_step.pop(self._step, ()) if self._due.get(one) == self._step}
        for request_id in [one for one in due if one not in scheduled]:
            self.wait(request_id, 0)
            due.discard(request_id)
        if tokens > len(scheduled) and max(scheduled.values()) > self._most:
            due |= {one for one, count in scheduled.items() if count > self._most}
        return due

    def wait(self, request_id: str, tokens: int | None) -> None:
        """``tokens`` are missing until the request is due, which is in the next step at the
        earliest. None: it finishes nothing more, unless it begins anew."""
        if self._always:
            tokens = 0
        if tokens is None:
            self.forget(request_id)
            return
        steps = max(1, -(-tokens // self._most))
        self._due[request_id] = self._step + steps
        self._by_step.setdefault(self._step + steps, []).append(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._due.pop(request_id, None)


class Running:
    """Requests that the last step computed for, if they have not finished."""

    def __init__(self) -> None:
        self._scheduled: Collection[str] = ()
        self._finished: set[str] = set()

    def __bool__(self) -> bool:
        return len(self._finished) < len(self._scheduled)

    def begin(self, scheduled: Collection[str]) -> None:
        """A step computes for these."""
        self._scheduled = scheduled
        self._finished.clear()

    def finished(self, request_id: str) -> None:
        if request_id in self._scheduled:
            self._finished.add(request_id)
