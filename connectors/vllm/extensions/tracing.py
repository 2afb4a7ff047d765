"""Lookups and loads as OpenTelemetry spans, through vLLM's own tracing.

An engine that was started with ``--otlp-traces-endpoint`` has a :class:`Traces`. Any other has
none. The spans have the parent that the client named in its request's headers, as vLLM's own span
of the request has. Units: nanoseconds since 1970 for times, as vLLM's tracing wants them. One
thread makes all calls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

LOOKUP, LOAD = "kvtier.lookup", "kvtier.load"


class _Begun(NamedTuple):
    """A load that workers have not confirmed."""

    request: Any
    at: int
    attributes: dict[str, Any]


class LoadObserver:
    """What the scheduler's half tells of lookups and loads. Here nothing is done with it."""

    def asked(self, request: Any) -> None:
        """vLLM asks what can be loaded. It may ask again while chunks are on their way up."""

    def answered(self, request: Any, tokens: Mapping[str, int], why: str) -> None:
        """vLLM takes the answer: so many ``tokens`` are loaded from each place. ``why``: the reason
        that there are no more. It may be empty."""

    def began(self, number: int, request: Any, tokens: Mapping[str, int], size: int) -> None:
        """A load job is given to the workers. ``size``: bytes of its slots."""

    def ended(self, number: int, *, failed: bool) -> None:
        """All ranks have reported a job. Saves are jobs too, of which no beginning is told."""

    def forget(self, request_id: str) -> None:
        """The request is over. A load of it that is under way still ends."""


class Traces(LoadObserver):
    """Tells a lookup when vLLM takes its answer, and a load when all ranks have reported it."""

    def __init__(self) -> None:
        from opentelemetry.context import Context
        from vllm.tracing import extract_trace_context, instrument_manual

        self._parent = extract_trace_context
        self._nobody = Context()
        self._tell = instrument_manual
        self._asked: dict[str, int] = {}
        self._begun: dict[int, _Begun] = {}

    def asked(self, request: Any) -> None:
        if request.request_id not in self._asked:
            self._asked[request.request_id] = time.time_ns()

    def answered(self, request: Any, tokens: Mapping[str, int], why: str) -> None:
        begun = self._asked.pop(request.request_id, None)
        if begun is None:
            return
        attributes: dict[str, Any] = {"kvtier.prompt_tokens": request.num_prompt_tokens}
        if why:
            attributes["kvtier.miss_reason"] = why
        self._span(LOOKUP, request, begun, attributes | _hits(tokens))

    def began(self, number: int, request: Any, tokens: Mapping[str, int], size: int) -> None:
        attributes = _hits(tokens) | {"kvtier.bytes": size}
        self._begun[number] = _Begun(request, time.time_ns(), attributes)

    def ended(self, number: int, *, failed: bool) -> None:
        begun = self._begun.pop(number, None)
        if begun is None:
            return
        seconds = (time.time_ns() - begun.at) / 1e9
        more = {"kvtier.seconds": seconds, "kvtier.failed": failed}
        self._span(LOAD, begun.request, begun.at, begun.attributes | more)

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def _span(self, name: str, request: Any, begun: int, attributes: dict[str, Any]) -> None:
        # Without a context of its own a span would become a child of the engine's start.
        context = self._parent(request.trace_headers) or self._nobody
        attributes["kvtier.request_id"] = request.request_id
        self._tell(name, begun, time.time_ns(), attributes, context)


def _hits(tokens: Mapping[str, int]) -> dict[str, Any]:
    return {"kvtier.hit_tokens": sum(tokens.values()), "kvtier.tiers": sorted(tokens)}
