"""Lookups and loads as OpenTelemetry spans, through vLLM's own tracing.

An engine that was started with ``--otlp-traces-endpoint`` has a :class:`Traces`. Any other has
none. The spans have the parent that the client named in its request's headers, as vLLM's own span
of the request has. Units: nanoseconds since 1970 for times, as vLLM's tracing wants them. One
thread makes all calls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.connectors.vllm.extension import Extension
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import StepMetadata

LOOKUP, LOAD = "kvtier.lookup", "kvtier.load"


class _Moment(NamedTuple):
    """A clock that is set meanwhile changes no span's length."""

    since_1970: int
    monotonic: int

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.time_ns(), time.monotonic_ns())

    @property
    def passed(self) -> int:
        return time.monotonic_ns() - self.monotonic


class _Begun(NamedTuple):
    request: Any
    at: _Moment
    attributes: dict[str, Any]


class Traces(Extension):
    """Tells a lookup when vLLM takes its answer, and a load when all ranks have reported it."""

    def __init__(self) -> None:
        from opentelemetry.context import Context
        from vllm.tracing import extract_trace_context, instrument_manual

        self._parent = extract_trace_context
        self._nobody = Context()
        self._tell = instrument_manual
        self._begun: dict[int, _Begun] = {}

    def asked(self, prompt: Prompt, keys: Sequence[ChunkKey]) -> None:
        prompt.notes.setdefault(self, _Moment.now())

    def answered(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        begun = prompt.notes.pop(self, None)
        if begun is None:
            return
        attributes: dict[str, Any] = {"kvtier.prompt_tokens": prompt.request.num_prompt_tokens}
        if prompt.claim.why:
            attributes["kvtier.miss_reason"] = prompt.claim.why
        self._span(LOOKUP, prompt.request, begun, attributes | _hits(prompt.progress.sources))

    def step(self, metadata: StepMetadata, loads: Sequence[BegunLoad]) -> None:
        for number, prompt, size in loads:
            attributes = _hits(prompt.progress.sources) | {"kvtier.bytes": size}
            self._begun[number] = _Begun(prompt.request, _Moment.now(), attributes)

    def ended(self, job: Pending, *, is_last: bool) -> None:
        begun = self._begun.pop(job.number, None)
        if begun is None:
            return
        more = {"kvtier.seconds": begun.at.passed / 1e9, "kvtier.failed": bool(job.failed)}
        self._span(LOAD, begun.request, begun.at, begun.attributes | more)

    def _span(self, name: str, request: Any, begun: _Moment, attributes: dict[str, Any]) -> None:
        # Without a context of its own a span would become a child of the engine's start.
        context = self._parent(request.trace_headers) or self._nobody
        attributes["kvtier.request_id"] = request.request_id
        begin, end = begun.since_1970, begun.since_1970 + begun.passed
        self._tell(name, begin, end, attributes, context)


def _hits(tokens: Mapping[str, int]) -> dict[str, Any]:
    return {"kvtier.hit_tokens": sum(tokens.values()), "kvtier.tiers": sorted(tokens)}
