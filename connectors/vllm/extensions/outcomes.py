"""Outcomes of requests: chunks counted by reason (:class:`Misses`), one log line for each load,
so that the first hit of an engine can be seen (:class:`HitLog`), and OpenTelemetry spans of lookups
and loads, through vLLM's own tracing (:class:`Traces`). One thread makes all calls.

vLLM's own line counts hits of its own cache and of kvtier's separately, every ten seconds, and in
percent. An engine that was started with ``--otlp-traces-endpoint`` has :class:`Traces`. Its spans
have the parent that the client named in its request's headers, as vLLM's own span of the request
has. Their times are nanoseconds since 1970."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.connectors.vllm.extension import Extension, Tools
from kvtier.connectors.vllm.groups import Piece
from kvtier.connectors.vllm.scheduler_side.hit_table import longest_hit
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.connectors.vllm.stats import ZERO_HITS
from kvtier.core.chunk import ChunkKey
from kvtier.server.strangers import LogLimit
from kvtier.store.reports.miss_reasons import FirstChunks
from kvtier.store.reports.zero_hits import ZeroHits
from kvtier.tiers.registry import TIERS

if TYPE_CHECKING:
    from kvtier.connectors.vllm.metadata import StepMetadata

logger = logging.getLogger("kvtier.connectors.vllm")
hits_logger = logging.getLogger("kvtier.connectors.vllm.hits")
hits_logger.addFilter(LogLimit(5, 10.0, again_s=0.0))  # lines in so many seconds

_PLACES = {"ram": "RAM", "remote": "the server"}
_PLACES |= {name: tier.section.title for name, tier in TIERS.items()}
_WHY_A_PART = {
    "deadline": "came too late",
    "refused": "could not be read or found no room",
    "slower": "computed sooner",
    "unasked": "not asked for in a shared tier",
}


class Misses(Extension):
    """Counts each chunk that requests of one engine asked for once, under one reason."""

    def __init__(self, tools: Tools) -> None:
        self._layout, self._geometry = tools.layout, tools.geometry
        store, clock = tools.store, tools.load_policy.clock
        self._first = FirstChunks()
        own, pool = store.status(), store.pool
        holds = f"the server's RAM holds {pool.slots:,} chunks" if pool else "the server is full"
        self._zero = (
            ZeroHits(holds, clock=clock) if own is None else ZeroHits.of(own, own.slots, clock)
        )
        self._asked = self._hits = self._saved = 0
        self._why: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._warned = False
        """Whether chunks in another size were warned of."""
        self._told = False
        """Last value of :data:`ZERO_HITS` that :meth:`counts` returned."""

    def allocated(self, prompt: Prompt, blocks: Any, tokens: int) -> bool:
        if prompt.chain is None and not prompt.lasts and self not in prompt.notes:
            prompt.notes[self] = True
            count = self._pieces(longest_hit(self._geometry, prompt.request.num_tokens))
            self._count(0, (), {}, ("unnamed", count))
        return False

    def answered(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        """Count every piece of the anchors from ``prompt.claim.begin`` on."""
        request, claim, geometry = prompt.request, prompt.claim, self._geometry
        size = geometry.chunk_tokens
        if request.num_tokens < size:
            self._too_short()
            return
        last = longest_hit(geometry, request.num_tokens)
        had = geometry.first(claim.begin) * len(geometry.anchors)
        asked, known = (
            self._pieces(last) - had,
            max(0, self._pieces(claim.begin + tokens) - had) if tokens else 0,
        )
        declined_pieces = sum(claim.declined.values())
        missed, why = asked - known - declined_pieces, claim.why or "tier_down"
        if why == "cold" and not prompt.lasts:
            why = "unnamed"
        if why == "cold" and not claim.begin + len(places) + declined_pieces:
            why = self._first.differs(self._content(prompt), prompt.extras) or why
        if why == "other_chunk_size" and not self._warned:
            self._warned = True
            logger.warning(
                "other chunk size: this engine's chunks have %d tokens, and other engines have "
                "saved this model's in chunks of another size, which are misses here. Give all "
                "engines of a model the same chunk_tokens, or none",
                size,
            )
        if places and not claim.begin:
            self._first.saved(self._content(prompt), prompt.extras)
        self._count(geometry.first(claim.begin), places, claim.declined, (why, missed))

    def saving(
        self, prompt: Prompt, saved: int, computed: int, pieces: Mapping[ChunkKey, Piece]
    ) -> None:
        if not saved and computed:
            self._first.saved(self._content(prompt), prompt.extras)

    def _content(self, prompt: Prompt) -> bytes:
        """Return the key of the first chunk's tokens, whatever else names it."""
        if prompt.is_plain and prompt.chain is not None:
            return prompt.chain.keys[0]
        return self._layout.keys(prompt.request.all_token_ids[: self._layout.chunk_tokens])[0]

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        if job.save is not None and not job.failed and not job.dropped:
            self._saved += len(job.keys)

    def _pieces(self, tokens: int) -> int:
        return -(-tokens // self._geometry.piece_tokens) * len(self._geometry.anchors)

    def _count(
        self,
        start: int,
        places: Sequence[str],
        declined: Mapping[str, int],
        missed: tuple[str, int],
    ) -> None:
        """Count from chunk ``start`` on: loaded ones by ``places``, then declined, then missing."""
        counts, (why, short), hits = self._counts, missed, len(places)
        for place in set(places):
            counts[f"loaded_{place}"] += places.count(place)
        lacking = [("declined", *one) for one in declined.items()]
        if short > 0:
            lacking.append(("missed", why, short))
        for kind, reason, count in lacking:
            counts[f"{kind}_{reason}"] += count
            if not start:
                self._why[reason] += count
        self._hits += hits
        if not start:  # otherwise vLLM's own prefix cache has served its beginning: all is well
            self._asked += hits + sum(count for _, _, count in lacking)

    def _too_short(self) -> None:
        self._asked += 1
        self._why["short"] += 1

    def counts(self) -> dict[str, int]:
        """Return chunks since the last call as ``loaded_<place>``, ``declined_<reason>`` and
        ``missed_<reason>``, and :data:`ZERO_HITS` as 1 or 0 when it has changed."""
        counts: dict[str, int] = {}
        if self._counts:
            counts, self._counts = self._counts, Counter()
        if self._zero.counted(self._asked, self._hits, self._saved, self._why):
            logger.warning("%s", self._zero.verdict)
        if bool(self._zero.verdict) != self._told:
            self._told = not self._told
            counts[ZERO_HITS] = int(self._told)
        return counts


class _Load(NamedTuple):
    prompt: Prompt
    asked: float
    begun: float
    tokens: Mapping[str, int]
    declined: Mapping[str, int]
    size: int
    """Bytes of the load."""


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
        for number, prompt, size in loads:
            if (asked := prompt.notes.get(self)) is not None:
                tokens, declined = prompt.progress.sources, prompt.claim.declined
                self._loads[number] = _Load(prompt, asked, self._clock(), tokens, declined, size)

    def ended(self, job: Pending, *, last_of: Sequence[str]) -> None:
        load = self._loads.pop(job.number, None)
        if load is None:
            return
        load.prompt.notes.pop(self, None)
        self._told(load, failed=bool(job.failed))

    def _told(self, load: _Load, *, failed: bool) -> None:
        if load.tokens and not failed:
            hits_logger.info("%s", _Line(load, self._clock() - load.asked))


class _Line(NamedTuple):
    """Line of a load. It becomes text only if it is logged."""

    load: _Load
    seconds: float

    def __str__(self) -> str:
        """Return ``2,304 of 3,000 tokens from NVMe in 12 ms; 2 chunks came too late``."""
        load = self.load
        places = [(_PLACES.get(place, place), count) for place, count in load.tokens.items()]
        if len(places) == 1:
            named = places[0][0]
        else:
            named = " and ".join(f"{place} ({count:,})" for place, count in places)
        hit, prompt = sum(load.tokens.values()), load.prompt.request.num_tokens
        whys = [
            f"{count:,} chunk{'s' * (count != 1)} {_WHY_A_PART[reason]} ({reason})"
            for reason, count in load.declined.items()
            if count
        ]
        came = f"{hit:,} of {prompt:,} tokens from {named} in {self.seconds * 1e3:,.0f} ms"
        return "; ".join([came, *whys])


LOOKUP, LOAD = "kvtier.lookup", "kvtier.load"


class Traces(HitLog):
    """Sends a span of each lookup that vLLM takes, and of each load that all ranks reported."""

    def __init__(self) -> None:
        from opentelemetry.context import Context
        from vllm.tracing import extract_trace_context, instrument_manual

        super().__init__()
        self._parent = extract_trace_context
        self._nobody = Context()
        self._tell = instrument_manual

    def answered(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        asked = prompt.notes.get(self)
        super().answered(prompt, places, tokens)
        if asked is None:
            return
        attributes: dict[str, Any] = {"kvtier.prompt_tokens": prompt.request.num_prompt_tokens}
        if prompt.claim.why:
            attributes["kvtier.miss_reason"] = prompt.claim.why
        self._span(LOOKUP, prompt, asked, attributes | _hits(prompt.progress.sources))

    def _told(self, load: _Load, *, failed: bool) -> None:
        super()._told(load, failed=failed)
        attributes = _hits(load.tokens) | {"kvtier.bytes": load.size, "kvtier.failed": failed}
        attributes["kvtier.seconds"] = self._clock() - load.begun
        self._span(LOAD, load.prompt, load.begun, attributes)

    def _span(self, name: str, prompt: Prompt, begun: float, attributes: dict[str, Any]) -> None:
        """Send a span from ``begun``, of the monotonic clock, to now: a clock that is set meanwhile
        changes no span's length."""
        # Without a context of its own a span would become a child of the engine's start.
        context = self._parent(prompt.request.trace_headers) or self._nobody
        attributes["kvtier.request_id"] = prompt.request.request_id
        end = time.time_ns()
        begin = end - round((self._clock() - begun) * 1e9)
        self._tell(name, begin, end, attributes, context)


def _hits(tokens: Mapping[str, int]) -> dict[str, Any]:
    return {"kvtier.hit_tokens": sum(tokens.values()), "kvtier.tiers": sorted(tokens)}
