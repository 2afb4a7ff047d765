"""In which step each running request is looked at. vLLM's scheduling loop, on one thread."""

from __future__ import annotations

from collections.abc import Mapping

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

    def begin(self, scheduled: Mapping[str, int]) -> set[str]:
        """Begin a step that computes ``scheduled`` tokens of each request. Returns who is due."""
        self._step += 1
        due = {one for one in self._by_step.pop(self._step, ()) if self._due.get(one) == self._step}
        for request_id in due - scheduled.keys():
            self.wait(request_id, 0)
        if max(scheduled.values(), default=0) > self._most:
            due |= {one for one, tokens in scheduled.items() if tokens > self._most}
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
