"""Hit log: one log line for each load, so that the first hit of an engine can be seen, and
OpenTelemetry spans of lookups and loads, through vLLM's own tracing. One thread makes all calls.

vLLM's own line counts hits of its own cache and of kvtier's separately, every ten seconds, and in
percent. An engine that was started with ``--otlp-traces-endpoint`` has a :class:`Traces`. Its spans
have the parent that the client named in its request's headers, as vLLM's own span of the request
has. Their times are nanoseconds since 1970."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.connectors.vllm.extension import Extension
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.server.listening.strangers import LogLimit
from kvtier.tiers.registry import TIERS

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import StepMetadata

logger = logging.getLogger("kvtier.connectors.vllm.hits")

logger.addFilter(LogLimit(5, 10.0, again_s=0.0))  # lines in so many seconds
_PLACES = {"ram": "RAM", "remote": "the server"}
_PLACES |= {name: tier.section.title for name, tier in TIERS.items()}


_WHY_A_PART = {
    "deadline": "came too late",
    "refused": "could not be read or found no room",
    "slower": "computed sooner",
    "unasked": "not asked for in a shared tier",
}


class _Load(NamedTuple):
    asked: float
    prompt: int
    tokens: Mapping[str, int]
    declined: Mapping[str, int]


class HitLog(Extension):
    """Logs a load when all ranks have confirmed it. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[int, _Load] = {}

    def asked(self, prompt: Prompt, keys: Sequence[ChunkKey]) -> None:
        prompt.notes.setdefault(self, self._clock())

    def answered(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        if not prompt.progress.sources:
            prompt.notes.pop(self, None)

    def step(self, metadata: StepMetadata, loads: Sequence[BegunLoad]) -> None:
        for number, prompt, _ in loads:
            asked = prompt.notes.pop(self, None)
            if asked is not None:
                tokens, declined = prompt.progress.sources, prompt.claim.declined
                self._loads[number] = _Load(asked, prompt.request.num_tokens, tokens, declined)

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        load = self._loads.pop(job.number, None)
        if load is not None and load.tokens and not job.failed:
            logger.info("%s", _text(load, self._clock() - load.asked))


def _text(load: _Load, seconds: float) -> str:
    """Return ``2,304 of 3,000 tokens from NVMe in 12 ms; 2 chunks came too late (deadline)``."""
    places = [(_PLACES.get(place, place), count) for place, count in load.tokens.items()]
    if len(places) == 1:
        named = places[0][0]
    else:
        named = " and ".join(f"{place} ({count:,})" for place, count in places)
    hit = sum(load.tokens.values())
    whys = [
        f"{count:,} chunk{'s' * (count != 1)} {_WHY_A_PART[reason]} ({reason})"
        for reason, count in load.declined.items()
        if count
    ]
    came = f"{hit:,} of {load.prompt:,} tokens from {named} in {seconds * 1e3:,.0f} ms"
    return "; ".join([came, *whys])


LOOKUP, LOAD = "kvtier.lookup", "kvtier.load"


class _Moment(NamedTuple):
    """Moment on both clocks, so that a clock that is set meanwhile changes no span's length."""

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
    """Sends a span of each lookup that vLLM takes, and of each load that all ranks reported."""

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

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
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
