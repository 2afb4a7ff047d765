"""The scheduler's half of spans: requests that ask for documents from other prompts.

Such an answer is an approximation, so it is opt-in twice: the key ``spans``, and the request. Rules
that keep everything else exact:

- Before vLLM looks at a request that asks, it gets a cache salt of its own. So no other
  request ever finds its blocks in vLLM's own prefix cache.
- Keys of kvtier's are made before that, with the client's own salt. Homes are found under them.
- From the moment at which tokens of another place are loaded for it, nothing of it is saved.

A request for which nothing is moved is computed, loaded and saved as any other.

What is not there between documents that are is computed in place, up to as many tokens as a step of
the engine's own has. Such a load has two halves. Every rank copies, in steps of its own. When all
have confirmed that, one step orders the forward pass from all of them together: ranks that began it
in different steps would wait for each other.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.connectors.vllm.groups import SpanMove
from kvtier.connectors.vllm.metadata import SpanJob, SpanPass, StepMetadata, StepReport
from kvtier.connectors.vllm.scheduler_side.jobs import BegunLoad
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.extensions.spans.plan import (
    PROMPT,
    Section,
    TooManyError,
    bounded,
    chunks_of,
    first_of,
    in_blocks,
    is_moved,
    pieces_of,
    ranges_of,
    runs_of,
    sections_of,
)
from kvtier.load_policy.choose import HitEnd, LoadPlan
from kvtier.spans import Range, filled
from kvtier.store.lease import LoadLease

FIELD = "kvtier.spans"
"""Key of ``kv_transfer_params``: a request's ranges, and in its answer what was reused."""
FIRST = "kvtier.span_first"
"""Key of ``kv_transfer_params``: number of each moved span's first tokens to compute in place."""


@dataclass(slots=True)
class SpanRequest:
    ranges: list[Range]
    homes: list[list[ChunkKey]]
    """Keys of each range's home, in order, after the anchor's."""
    twins: list[tuple[int, int, int, int]]
    """Two places of the same token in a chunk of a home, as ``(source, chunk, one, other)``. Empty
    once the rotation was checked."""
    first: int = 0
    begin: int = -1
    """Tokens that vLLM had computed when the leases were made; -1 without leases."""
    sections: list[Section] = field(default_factory=list)
    leases: dict[int, LoadLease] = field(default_factory=dict)
    """Lease of each section, by the token at which the section begins."""
    until: float = 0.0
    missing: list[int] = field(default_factory=list)
    """Numbers of the ranges whose homes are not cached to the end of the document."""
    reused: int = 0
    """Tokens loaded, moved ones included, without those that were computed in place."""
    declined: str = ""

    def drop(self) -> None:
        for lease in self.leases.values():
            lease.close()
        self.leases, self.sections, self.begin = {}, [], -1

    def told(self, request: Any) -> dict[str, Any]:
        if not self.reused:
            return declined(self.declined or "failed", self.missing)
        computed = request.num_prompt_tokens - self.reused
        return {"reused": self.reused, "computed": computed, "missing": self.missing}


def declined(reason: str, missing: Sequence[int] = ()) -> dict[str, Any]:
    return {"reused": 0, "declined": reason, "missing": list(missing)}


logger = logging.getLogger("kvtier.connectors.vllm")

_MOST_FAILED_PASSES = 3
"""Failed passes after which no more tokens are computed in place."""


@dataclass(slots=True)
class _Pending:
    leases: list[LoadLease]
    prompt: Prompt
    asked: SpanRequest
    reused: int
    """Tokens that the request has after the load, without those that are computed in place."""
    order: SpanPass | None
    """Order of the pass, or None if the load ends with the copies."""
    stale: bool = False
    """Whether the model's weights were replaced meanwhile: then its failure is not counted."""
    copied: bool = False
    """Whether all ranks have copied, and the pass was ordered."""
    done: int = 0
    failed: int = 0


class _Known(NamedTuple):
    """Tokens of a run that are in RAM (``ready``), and in any tier (``known``). ``wait_s``:
    estimated seconds until all are in RAM, or None if unknown."""

    ready: int
    known: int
    wait_s: float | None


class Able(NamedTuple):
    why_not: str = "off"
    """Reason why workers cannot move tokens; empty if they can."""
    why_not_in_place: str = "off"
    most_in_place: int = 0
    """Most tokens that are computed in place in one step, and for one request."""


class Spans(Extension):
    """Scheduler's half of spans. Counts tokens ``spans_*`` and requests ``unblended_*``."""

    def __init__(self, tools: Tools, able: Able) -> None:
        self._store, self._jobs, self._load_policy = tools.store, tools.jobs, tools.load_policy
        self._block, self._size = tools.geometry.block_tokens, tools.geometry.chunk_tokens
        self.why_not, self.why_not_in_place, self._most_in_place = able
        self._pending: dict[int, _Pending] = {}
        self._begun: list[SpanJob] = []
        self._orders: list[SpanPass] = []
        self._is_checked = False
        """Whether every rank has found the rotation to be right."""
        self._failures = 0
        self._counts = Counter[str]()
        self._warned: set[str] = set()

    # ---- a request comes -------------------------------------------------------------------------

    def new(self, request: Any, named: Callable[[Any], Prompt]) -> None:
        """Make the keys of a request that asks for spans, then give it a cache salt of its own."""
        params = request.kv_transfer_params or {}
        if FIELD not in params:
            return
        prompt, given = named(request), params[FIELD]
        if given is None:
            return
        if why := self.why_not or _why_not(prompt):
            self._decline(prompt, "off" if why == "off" else "unsupported", why)
            return
        try:
            ranges = ranges_of(given, request.num_prompt_tokens)
            first = first_of(params.get(FIRST, 0))
        except ValueError as error:
            reason = "many" if isinstance(error, TooManyError) else "malformed"
            self._decline(prompt, reason, str(error))
            return
        if first and self.why_not_in_place:
            why = f"nothing is computed in place: {self.why_not_in_place}"
            self._decline(prompt, "unsupported", why)
            return
        asked = self._named(prompt, ranges)
        asked.first = first
        if not _resalt(request):
            self._decline(prompt, "salt", "vLLM's prefix cache does not heed a new cache salt")
            return
        prompt.is_hidden = True
        prompt.notes[self] = asked

    def _named(self, prompt: Prompt, ranges: list[Range]) -> SpanRequest:
        tokens, size = list(prompt.request.prompt_token_ids), self._size
        anchor, keys, twins = tokens[: ranges[0].end], [], list[tuple[int, int, int, int]]()
        chain = prompt.chain
        assert chain is not None, "what is not cached was declined"
        whole = len(chain.extend(anchor))
        rest = anchor[whole * size :]
        for source, span in enumerate(ranges[1:], 1):
            tail = filled([*rest, *tokens[span.begin : span.end]], size)
            keys.append(chain.continued(tail))
            for chunk in range(0 if self._is_checked else len(tail) // size):
                pair = _twins(tail[chunk * size : (chunk + 1) * size])
                if pair:
                    twins.append((source, whole + chunk, *pair))
        return SpanRequest(ranges, keys, twins)

    def _decline(self, prompt: Prompt, reason: str, why: str) -> None:
        self._counts[f"unblended_{reason}"] += 1
        self._warn(reason if reason in ("malformed", "many") else why, why)
        if reason != "off":
            prompt.notes[self] = SpanRequest([], [], [], declined=reason)

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("a request asks for %s and is computed exactly: %s", FIELD, why)

    # ---- lookup ----------------------------------------------------------------------------------

    def promise(
        self, prompt: Prompt, keys: Sequence[ChunkKey], computed: int, *, busy: bool
    ) -> int | None:
        asked = prompt.notes.get(self)
        if asked is None or asked.declined:
            return 0
        if asked.begin != computed:
            asked.drop()
            if not self._claim(asked, keys, computed, busy=busy):
                return 0
            asked.begin = computed
        coming = [lease.poll().coming for lease in asked.leases.values()]
        if any(coming) and self._load_policy.clock() < asked.until:
            return None
        there = self._there(asked)
        sections = self._bounded(asked, there, computed)
        sections = in_blocks(sections, prompt.request.num_tokens - 1, self._block)
        end = sections[-1].end if sections else 0
        if end <= computed or not is_moved(sections):
            self._end(asked, "missing" if asked.missing else "exact")
            return 0
        for begin in asked.leases.keys() - {section.begin for section in sections}:
            asked.leases.pop(begin).close()
        asked.sections = sections
        return end - computed

    def _there(self, asked: SpanRequest) -> list[Section]:
        size, found = self._size, list[Section]()
        for section in asked.sections:
            lease = asked.leases[section.begin]
            chunks = chunks_of(section, size).start + lease.ready
            end = min(section.end, chunks * size + section.distance)
            if end < section.end and section.source != PROMPT:
                asked.missing = sorted({*asked.missing, section.source})
            if end > section.begin:
                found.append(section._replace(end=end))
        return found

    def _bounded(
        self, asked: SpanRequest, sections: Sequence[Section], computed: int
    ) -> list[Section]:
        most = 0 if self.why_not_in_place else self._most_in_place
        return bounded(asked.ranges, sections, asked.first, computed, most)

    def _claim(
        self, asked: SpanRequest, keys: Sequence[ChunkKey], computed: int, *, busy: bool
    ) -> bool:
        """Claim the chunks of which the prompt can be put together, if that is worth it."""
        size, store = self._size, self._store
        exact = self._known(keys, ask=False)
        homes = self._of_homes(asked, exact.known)
        every = self._found(asked, exact.known, [home.known for home in homes], computed)
        ready = self._found(asked, exact.ready, [home.ready for home in homes], computed)
        plan = self._plan(asked, (ready, every), [exact, *homes], computed, busy=busy)
        found = [] if plan.row is None else every if plan.row else ready
        if not is_moved(found):
            reason = "missing" if asked.missing else "exact"
            self._end(asked, "slower" if is_moved(every) else reason)
            return False
        if 4 * sum(len(chunks_of(section, size)) for section in found) > store.most_held:
            self._warn("room", "it needs more than a quarter of the slots that the engine may hold")
            self._end(asked, "room")
            return False
        for section in found:
            chunks = chunks_of(section, size)
            source = keys if section.source == PROMPT else asked.homes[section.source - 1]
            lease = store.load(source[: chunks.stop], chunks.start, most=len(chunks))
            asked.leases[section.begin] = lease
        within_s = min(plan.within_s, self._load_policy.timeout_s)
        asked.sections, asked.until = found, self._load_policy.clock() + within_s
        if len({id(lease.pool) for lease in asked.leases.values()}) != 1:
            self._end(asked, "failed")
            return False
        return True

    def _plan(
        self,
        asked: SpanRequest,
        rows: Sequence[Sequence[Section]],
        known: Sequence[_Known],
        computed: int,
        *,
        busy: bool,
    ) -> LoadPlan:
        """Choose between the sections in RAM and waiting for all: the two ``rows``."""
        waits = [one.wait_s for one in known if one.known > one.ready]
        wait_s = sum(one for one in waits if one is not None) if None not in waits else None
        ends = []
        for sections, seconds in zip(rows, (0.0, wait_s), strict=True):
            runs = runs_of(asked.ranges, sections, asked.first, computed)
            end = sections[-1].end if sections else 0
            saved = end - computed - sum(run.end - run.begin for run in runs)
            ends.append(HitEnd(max(0, saved), seconds))
        return self._load_policy.choose(ends, computed, busy=busy)

    def _found(
        self, asked: SpanRequest, exact: int, homes: Sequence[int], computed: int
    ) -> list[Section]:
        return self._bounded(asked, sections_of(asked.ranges, exact, homes), computed)

    def _known(self, keys: Sequence[ChunkKey], *, ask: bool = True) -> _Known:
        """Look up how much of a run is cached. ``ask``: chunks that Redis is asked for count."""
        size, result = self._size, self._store.lookup(keys)
        if ask and result.asking is not None:
            return _Known(size * result.ready, size * len(keys), result.asking.arrive_s)
        return _Known(size * result.ready, size * result.known, result.steps[-1][1])

    def _of_homes(self, asked: SpanRequest, exact: int) -> list[_Known]:
        """Look up each span's home, unless the prompt's first ``exact`` tokens contain the span."""
        found = list[_Known]()
        asked.missing = []
        for source, (span, home) in enumerate(zip(asked.ranges[1:], asked.homes, strict=True), 1):
            there = self._known(home) if span.end > exact else _Known(0, 0, 0.0)
            found.append(there)
            if span.end > exact and there.known < len(home) * self._size:
                asked.missing.append(source)
        return found

    def _end(self, asked: SpanRequest, reason: str) -> None:
        asked.drop()
        asked.declined = reason
        self._counts[f"unblended_{reason}"] += 1

    # ---- a job -----------------------------------------------------------------------------------

    def allocated(self, prompt: Prompt, blocks: Any, tokens: int) -> bool:
        """Begin the request's load. Nothing of the request is saved from now on."""
        asked = prompt.notes.get(self)
        if asked is None or not asked.leases or tokens <= 0:
            return False
        self._begin(prompt, asked, blocks.get_block_ids()[0], tokens)
        return True

    def _begin(
        self, prompt: Prompt, asked: SpanRequest, blocks: Sequence[int], tokens: int
    ) -> None:
        number = self._jobs.number()
        begin, end, size = asked.begin, asked.begin + tokens, self._size
        pieces, slots_of = list[SpanMove](), dict[tuple[int, int], int]()
        for section in asked.sections:
            slots = asked.leases[section.begin].slots
            for chunk, slot in zip(chunks_of(section, size), slots, strict=False):
                slots_of[section.source, chunk] = slot
            pieces += pieces_of(section, slots, size, begin, end)
        twins = [
            (slots_of[source, chunk], one, other)
            for source, chunk, one, other in asked.twins
            if (source, chunk) in slots_of
        ]
        leases = list(asked.leases.values())
        where = self._jobs.address(leases[0].pool)
        order = self._order(prompt, asked, number, blocks)
        request_id = prompt.request.request_id
        self._begun.append(
            SpanJob(
                number, where, pieces, list(blocks), request_id, tokens, twins, goes_on=bool(order)
            )
        )
        computed = sum(len(run.tokens) for run in order.runs) if order else 0
        self._pending[number] = _Pending(leases, prompt, asked, end - computed, order)
        asked.leases, asked.sections, asked.begin = {}, [], -1
        prompt.progress.blended, prompt.progress.sources = True, {"spans": tokens}
        kept = sum(piece.tokens for piece in pieces if not piece.distance)
        self._counts["spans_moved"] += tokens - kept - computed
        self._counts["spans_kept"] += kept
        self._counts["spans_computed"] += computed

    def _order(
        self, prompt: Prompt, asked: SpanRequest, number: int, blocks: Sequence[int]
    ) -> SpanPass | None:
        tokens = prompt.request.prompt_token_ids
        runs = [
            run._replace(tokens=list(tokens[run.begin : run.end]))
            for run in runs_of(asked.ranges, asked.sections, asked.first, asked.begin)
        ]
        return SpanPass(number, prompt.request.request_id, list(blocks), runs) if runs else None

    def step(self, metadata: StepMetadata, loads: Sequence[BegunLoad]) -> None:
        if self._begun:
            metadata.spans, self._begun = self._begun, []
        if self._orders:
            metadata.passes = self._due()

    def _due(self) -> list[SpanPass]:
        """Take the passes due in this step, with no more tokens than one of the engine's steps."""
        now, tokens = list[SpanPass](), 0
        while self._orders:
            tokens += sum(len(run.tokens) for run in self._orders[0].runs)
            if now and tokens > self._most_in_place:
                break
            now.append(self._orders.pop(0))
        return now

    def report(self, report: StepReport) -> None:
        if not self._pending:
            return
        for pending in self._pending.values() if report.replacements else ():
            pending.stale = True
        for number in (report.done.keys() | report.failed.keys()) & self._pending.keys():
            pending = self._pending[number]
            pending.done += report.done[number]
            pending.failed += report.failed[number]
            if pending.done + pending.failed < self._jobs.ranks:
                continue
            for lease in pending.leases:
                lease.close()
            if pending.order is not None and not pending.copied:
                # All ranks have copied: now they compute in the same step.
                if pending.failed:
                    pending.order.runs = []
                pending.leases, pending.copied, pending.done, pending.failed = [], True, 0, 0
                self._orders.append(pending.order)
                continue
            del self._pending[number]
            if pending.failed:
                if pending.order is not None and pending.order.runs and not pending.stale:
                    self._pass_failed()
                pending.prompt.progress.load_failed = True
                self._end(pending.asked, "failed")
            else:
                self._is_checked = True
                asked = pending.asked
                asked.reused = max(asked.reused, pending.reused)

    def _pass_failed(self) -> None:
        self._failures += 1
        if self._failures == _MOST_FAILED_PASSES:
            self.why_not_in_place = (
                f"it failed {_MOST_FAILED_PASSES} times, and is off in this process"
            )
            logger.error("spans: nothing is computed in place: %s", self.why_not_in_place)

    # ---- ends ------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        return bool(self._pending) and self._jobs.reports_come

    def drop(self, prompt: Prompt) -> None:
        if (asked := prompt.notes.get(self)) is not None:
            asked.drop()

    def finished(self, prompt: Prompt, *, saving: bool) -> dict[str, Any] | None:
        asked = prompt.notes.get(self)
        return None if asked is None else {FIELD: asked.told(prompt.request)}

    def counts(self) -> dict[str, int]:
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return counts


def _why_not(prompt: Prompt) -> str:
    request = prompt.request
    if request.mm_features:
        return "it has images or other media"
    if getattr(request, "prompt_embeds", None) is not None or not request.prompt_token_ids:
        return "its prompt is no token ids"
    if getattr(request, "resumable", False):
        return "it is a streaming session"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "it reads no cache"
    if request.kv_transfer_params.get("do_remote_prefill"):
        return "it waits for another connector's prefill"
    if prompt.chain is None:
        return "nothing of it is cached"
    return ""


def _resalt(request: Any) -> bool:
    """Give a request a cache salt of its own. Returns False, and changes nothing, if vLLM's hashes
    of its blocks stay the same."""
    salt, before = request.cache_salt, list(request.block_hashes)
    request.cache_salt = f"{salt or ''}|{FIELD}|{secrets.token_hex(16)}"
    request.block_hashes.clear()
    request.update_block_hashes()
    after = list(request.block_hashes)
    if len(before) == len(after) and not set(before) & set(after):
        return True
    request.cache_salt = salt
    request.block_hashes.clear()
    request.block_hashes.extend(before)
    return False


def _twins(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Return the two places farthest apart with the same token, or None if no token comes twice."""
    seen: dict[int, int] = {}
    best: tuple[int, int] | None = None
    for place, token in enumerate(tokens):
        first = seen.setdefault(token, place)
        if first != place and (best is None or place - first > best[1] - best[0]):
            best = first, place
    return best


def extensions(tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    return (Spans(tools, _able(facts)),)


def _able(facts: EngineFacts) -> Able:
    why = next(filter(None, (rank.why_no_spans for rank in facts.ranks)), "")
    if facts.spans and not facts.vllm_config.kv_transfer_config.is_kv_consumer:
        why = "this engine loads nothing"
    if facts.spans and why:
        logger.warning("spans: every request is computed exactly: %s", why)
    in_place = next(filter(None, (rank.why_not_in_place for rank in facts.ranks)), "")
    most = facts.vllm_config.scheduler_config.max_num_batched_tokens
    return Able(why, in_place, most)
