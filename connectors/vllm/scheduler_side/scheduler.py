"""The scheduler's half: requests -> keys -> leases. It runs in vLLM's scheduling loop, on one
thread, in memory only, and waits for nothing while the engine computes: some milliseconds at most
where there is nothing to compute.

A request's life: :meth:`SchedulerHalf.matched` claims what pays and promises what is in RAM, or
comes in parts. :meth:`SchedulerHalf.allocated` turns the claim into a load job, and every
:meth:`SchedulerHalf.step` newly finished chunks into save jobs. :meth:`SchedulerHalf.report` ends
the jobs' leases as workers confirm them. A lease belongs to its job once there is one, so an
aborted request cannot free a slot that a worker is still copying.

A request whose load failed is promised nothing any more: the same chunks could fail without end.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvtier.api import Ended, LoadLease
from kvtier.connectors.vllm.extension import Duty, Extension, Live, Tools, overridden
from kvtier.connectors.vllm.groups import Piece
from kvtier.connectors.vllm.hints import of_request
from kvtier.connectors.vllm.layout import start_only
from kvtier.connectors.vllm.metadata import Job, Move, StepMetadata, StepReport
from kvtier.connectors.vllm.scheduler_side.claims import Claims, Granted
from kvtier.connectors.vllm.scheduler_side.due_steps import DueSteps, Running
from kvtier.connectors.vllm.scheduler_side.hit_table import longest_hit
from kvtier.connectors.vllm.scheduler_side.jobs import ARRIVAL_S, ARRIVALS, BegunLoad, Pending
from kvtier.connectors.vllm.scheduler_side.partial_tails import PartialTails
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt, by_place
from kvtier.connectors.vllm.scheduler_side.requests import RequestNames, stop_of
from kvtier.connectors.vllm.scheduler_side.saves import Offer, Saves
from kvtier.connectors.vllm.tables import (
    NULL_BLOCK,
    BlockTables,
    Tables,
    loading,
)
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Served
from kvtier.core.pool import Pool
from kvtier.load_policy.prefill import Work

logger = logging.getLogger("kvtier.connectors.vllm")


class SchedulerHalf:
    """Half of the connector in the scheduler. One thread makes all calls. ``extensions`` are told
    of everything, in their order."""

    def __init__(self, tools: Tools, duty: Duty, extensions: tuple[Extension, ...] = ()) -> None:
        self.store, self._layout, self._geometry, self._jobs, self._load_policy = tools
        self.extensions = extensions
        self._duty = duty
        self._running = Running()
        self._asked = False
        """Whether vLLM has asked for some request since the last step."""
        self._granted = Granted(self._geometry, duty.blocks, duty.in_flight)
        self._names = RequestNames()
        self._prompts: dict[str, Prompt] = {}
        self._tails = PartialTails(self.store, self._geometry, duty.hit_unit)
        self._claims = Claims(self.store, self._geometry, self._load_policy, self._tails)
        self._tables = BlockTables()
        self._pending, self._under_way = self._jobs.pending, self._jobs.under_way
        self._due = DueSteps(self._geometry, duty.answer_tokens)
        self._hooks = overridden(extensions)
        self._saves = Saves(tools, self._prompts, self._due, self._hooks["saving"])
        self._numbers = itertools.count(1)
        """Numbers of requests, 32 bits each."""
        self._named_pool: Pool | None = None
        """Pool that the last step named to the workers."""
        self._loads: list[Job] = []
        self._replacements_seen = Counter[int]()
        self._old_blocks = False
        """Whether vLLM's own cache may hold blocks that other weights have computed."""
        for join in self._hooks["join"]:
            join(Live(self._prompts, self._running, self._answer))

    # ---- lookup ----------------------------------------------------------------------------------

    def new(self, request: Any) -> None:
        """Note a request, at vLLM's ``on_new_request``."""
        for new in self._hooks["new"]:
            new(request, self._prompt)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return, for vLLM's ``get_num_new_matched_tokens``, the tokens that can be loaded beyond
        the first ``computed``, and whether the request waits for them. None lets vLLM ask again."""
        prompt = self._prompt(request)
        first, self._asked = not self._asked, True
        self._granted.gone(request.request_id)
        if self._old_blocks and computed:
            # It is unknown which weights have computed what vLLM found in its own cache.
            prompt.leave_alone()
        if prompt.waits_for_names:
            return None, False
        if (
            prompt.chain is None
            or prompt.progress.load_failed
            or not self._duty.loads
            or _is_served_elsewhere(request)
        ):
            return 0, False
        promised = self._promise(prompt, computed, first=first)
        if promised and not self._granted.fits(request):
            promised = None
        return promised, bool(promised)

    def _promise(self, prompt: Prompt, computed: int, *, first: bool) -> int | None:
        """Return the tokens beyond the first ``computed`` that are there for the request, or None
        to ask again. ``first``: vLLM has asked for no other since the last step."""
        keys = self._keys(prompt, prompt.request.num_tokens)
        for asked in self._hooks["asked"]:
            asked(prompt, keys)
        if not prompt.is_hidden and self._is_coming_for_others(keys, computed):
            return None
        is_idle = self._duty.steps_alone and not self._running and not self._pending
        arrivals = ARRIVALS if first and is_idle else 0
        while (promised := self._claimed(prompt, keys, computed, first)) is None and arrivals:
            self.store.wait(ARRIVAL_S)
            arrivals -= 1
        return promised

    def _claimed(
        self, prompt: Prompt, keys: Sequence[ChunkKey], computed: int, first: bool
    ) -> int | None:
        """Return :meth:`_promise` of the first extension that has something, or the store."""
        busy = bool(self._running)
        for promise in self._hooks["promise"]:
            own: int | None = promise(prompt, keys, computed, busy=busy)
            if own != 0:
                return own
        return self._claims.promise(prompt, keys, computed, busy=busy, first=first)

    def _is_coming_for_others(self, keys: Sequence[ChunkKey], computed: int) -> bool:
        """Return whether vLLM will soon have the next piece in blocks, by another's load."""
        is_there = len(keys) > computed // self._layout.chunk_tokens
        if not (self._duty.shares_blocks and self._under_way and is_there):
            return False
        piece = Piece(self._geometry.anchors[0], self._geometry.first(computed))
        return self._geometry.key(piece, keys) in self._under_way

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Begin to load ``tokens`` tokens into the blocks, at vLLM's
        ``update_state_after_alloc``."""
        prompt = self._prompts.get(request.request_id) or self._prompt(request)
        geometry = self._geometry
        self._due.forget(request.request_id)
        prompt.progress.sources = {}
        claim = prompt.claim
        (lease, looked), run = claim.take(), claim.run
        if tokens > 0:
            self._granted.add(request)
        taken = False
        for allocated in self._hooks["allocated"]:
            taken = taken or allocated(prompt, blocks, tokens)
        if taken or lease is None or tokens <= 0 or run is None:
            if looked and not taken:
                self._answer(prompt, [], 0)
            if lease is not None:
                lease.close()
            return
        begin, end = claim.begin, claim.begin + tokens
        pieces = geometry.pieces(run)
        if end < run.end:
            pieces = [one for one in pieces if geometry.begins_before(one, end)]
        places = claim.places(lease)[: len(pieces)]
        keys, claim.brought = lease.keys[: len(places)], {}
        slots = zip(pieces, lease.slots, strict=False)
        moves = loading(geometry, slots, blocks.get_block_ids(), begin, end)
        if not geometry.is_gradual and end != run.end:
            logger.error(
                "vLLM takes %d tokens of a hit that ends at %d: it is not loaded", tokens, run.end
            )
            moves = [Move(0, [], [NULL_BLOCK])]
        name, where = request.request_id, self._jobs.address(lease.pool)
        job = Job(self._jobs.number(), where, moves, name, tokens)
        self._jobs.begin(Pending(job.number, [name], keys, load=lease, tokens=tokens))
        self._load_policy.load_began(tokens)
        self._loads.append(job)
        self._jobs.begun.append(BegunLoad(job.number, prompt, len(keys) * where.slot_bytes))
        sources = zip(pieces, places, strict=False)
        prompt.progress.sources = by_place(geometry, sources, begin, end)
        if geometry.is_gradual and not run.start:
            prompt.progress.loaded = len(keys) // geometry.trunk_pieces
        self._answer(prompt, places, tokens)

    def _answer(self, prompt: Prompt, places: Sequence[str], tokens: int) -> None:
        for answered in self._hooks["answered"]:
            answered(prompt, places, tokens)
        size = self._layout.chunk_tokens
        last = longest_hit(self._geometry, prompt.request.num_tokens)
        if last <= prompt.claim.begin and not tokens:
            return
        end = prompt.claim.begin + tokens
        keys, claim = prompt.chain.keys if prompt.chain is not None else [], prompt.claim
        is_new = claim.why == "cold" and not claim.declined and self._geometry.is_gradual
        rest = keys[end // size : -(-last // size)] if end < last and not is_new else []
        asked = max(tokens, last - claim.begin)
        self.store.served(Served(asked, prompt.progress.sources, rest, size, end))

    def sources(self, request: Any) -> dict[str, int]:
        """Return the tokens of the request's last load by place: ``ram`` or a tier's name."""
        prompt = self._prompts.get(request.request_id)
        return prompt.progress.sources if prompt is not None else {}

    # ---- one engine step -------------------------------------------------------------------------

    def step(self, output: Any) -> StepMetadata:
        """Plan a step of the workers, for vLLM's ``build_connector_meta``."""
        pool = self._named_pool = self.store.pool
        address = self._jobs.address(pool) if pool is not None else None
        metadata = StepMetadata(
            address,
            loads=self._loads,
            number=self._load_policy.planned(_work(output)),
            computes=bool(output.total_num_scheduled_tokens),
            replacements_seen=self._replacements_seen,
        )
        begun = [
            load  # that is not over by now, nor its request
            for load in self._jobs.begun
            if load.number in self._pending
            and self._prompts.get(load.prompt.request.request_id) is load.prompt
        ]
        for step in self._hooks["step"]:
            step(metadata, begun)
        self._jobs.begun.clear()
        self._loads, self._asked = [], False
        self._running.begin(output.num_scheduled_tokens)
        self._granted.began(output.num_scheduled_tokens.keys())
        self._tables.begin(output)
        began, new = [*output.scheduled_cached_reqs.resumed_req_ids], output.scheduled_new_reqs
        if new:  # with Model Runner V2 resumed requests are among them
            began += [one.req_id for one in new]
        for request_id in self._prompts.keys() & began if began else ():
            self._prompts[request_id].progress.moved()
        scheduled, tokens = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        if looked_at := self._due.begin(scheduled, tokens, began):
            offers = [offer for one in looked_at for offer in self._advance(output, one)]
            metadata.saves = self._saves.begin(offers)
        self._tables.end()
        self._saves.step(metadata, output)
        if self._jobs.lends:
            metadata.renewed.update(self._jobs.renewed())
        return metadata

    def _advance(self, output: Any, request_id: str) -> list[Offer]:
        """Return one request's chunks that this step finishes. Note when to look again."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return []
        prompt.progress.began = True
        if not self._is_saved(prompt):
            return []
        end = prompt.request.num_computed_tokens + output.num_scheduled_tokens[request_id]
        offers = self._save(prompt, end, output)
        next_end = (prompt.progress.saved + 1) * self._layout.chunk_tokens
        more = self._duty.save_decode or next_end <= prompt.request.num_prompt_tokens
        self._due.wait(request_id, next_end - end if more else None)
        return offers

    def _is_saved(self, prompt: Prompt) -> bool:
        if prompt.name(self._layout, self._names):
            self._drop(prompt)
        return prompt.chain is not None and not prompt.progress.blended and self._duty.saves

    def _save(
        self, prompt: Prompt, end: int, output: Any = None, tables: Tables | None = None
    ) -> list[Offer]:
        """Return finished chunks of a request's first ``end`` tokens. Only tokens whose ids are
        known count: newest sampled ids (async scheduling) and unverified drafts wait for a later
        step. ``tables``: of a request that has ended."""
        request, size, progress = prompt.request, self._layout.chunk_tokens, prompt.progress
        request_id = request.request_id
        known = request.num_tokens if self._duty.save_decode else request.num_prompt_tokens
        finished = min(end, known) // size
        told = self._tables.states(request_id)
        # Beside drafts a state is in its block only when the step has chosen among them, which is
        # after workers have saved.
        drafts = output and output.scheduled_spec_decode_tokens.get(request_id)
        early = set(told) if drafts else set()
        progress.states += told
        if finished <= progress.saved and not progress.states:
            return []
        tables = tables or self._tables.of(request_id)
        if tables is None:
            return []
        keys, saved = self._keys(prompt, request.num_tokens), progress.saved
        pieces = self._saves.finished(prompt, keys, tables, finished, early)
        progress.saved = max(finished, progress.saved)
        offers = [Offer(prompt, pieces, tables, (saved, finished))]
        tail, own = self._tails.pieces(prompt, keys, told, tables) if told else ({}, tables)
        return [*offers, Offer(prompt, tail, own)] if tail else offers

    # ---- ends ------------------------------------------------------------------------------------

    def report(self, report: StepReport) -> None:
        """Note what all ranks said of a step's jobs, at vLLM's ``update_connector_output``."""
        self._load_policy.ended(report.step, report.loaded_tokens, report.load_s, report.save_s)
        if report.replacements:
            self._replacements_seen = self._replacements_seen | Counter(report.replacements)
            self._renew()
        if report.unmapped and (self._duty.loads or self._duty.saves):
            self._turn_off(report.unmapped)
        for reported in self._hooks["report"]:
            reported(report)
        for number in (report.done.keys() | report.failed.keys()) & self._pending.keys():
            pending = self._pending[number]
            pending.done += report.done[number]
            pending.failed += report.failed[number]
            if pending.done + pending.failed == self._jobs.ranks:
                last_of = self._jobs.end(pending)
                if pending.save is not None:
                    self._saves.end(pending, pending.save)
                elif pending.load is not None:
                    self._end_load(pending, pending.load, refused=bool(report.replacements))
                for ended in self._hooks["ended"]:
                    ended(pending, last_of=last_of)

    def _end_load(self, pending: Pending, lease: LoadLease, *, refused: bool) -> None:
        """End a load. ``refused``: other weights came, so the chunks that failed are sound."""
        self._load_policy.load_ended(pending.tokens)
        lease.close()
        if not pending.failed:
            return
        if not refused:
            self.store.invalidate(pending.keys)
            logger.warning(
                "load of %d chunks failed; they are dropped and recomputed", len(pending.keys)
            )
        for request_id in pending.request_ids:
            if (prompt := self._prompts.get(request_id)) is not None:
                prompt.progress.load_failed = True
                prompt.progress.loaded = 0

    def _turn_off(self, why: str) -> None:
        """Load and save nothing from now on, because workers cannot reach the pool."""
        logger.error(
            "%s: kvtier keeps and serves nothing in this engine; all its workers have to be on "
            "one host",
            why,
        )
        self._duty = self._duty._replace(loads=False, saves=False)
        for prompt in self._prompts.values():
            self._drop(prompt)

    def _renew(self) -> None:
        """Give up what other weights have computed: nothing saved before may be loaded, nothing in
        live requests' blocks may be saved, and keys are those of this start only."""
        self._layout = start_only(
            self._layout, "the model's weights were replaced under the running engine"
        )
        self._old_blocks = True
        for job in self._saves.of_ended:
            self._pending[job.number].dropped = True
        for prompt in self._prompts.values():
            self._drop(prompt)
            prompt.leave_alone()
        for name in [name for name, prompt in self._prompts.items() if not prompt.progress.began]:
            del self._prompts[name]

    def expects_reports(self) -> bool:
        """Return, for vLLM's ``has_pending_push_work``, whether to take steps even with nothing to
        compute. Workers can say only in a step that a copy is through, for some time after the last
        job: a report may never come. Events leave in a step too, and the name of a new pool, so
        that workers map and page-lock it before the first request."""
        pool = self.store.pool
        if pool is not None and pool is not self._named_pool:
            return True
        reports = bool(self._pending) and self._jobs.reports_come
        return reports or any(extension.waits for extension in self.extensions)

    def events(self) -> list[Any]:
        """Return events, for vLLM's ``take_events``."""
        return [event for events in self._hooks["events"] for event in events()]

    def finished(self, request: Any, tables: Tables = ()) -> dict[str, Any] | None:
        """End a request, aborted ones too, at vLLM's ``request_finished``. Returns the answer's
        ``kv_transfer_params``. Chunks that wait for their turn are saved from its blocks
        (``tables``) before the next step writes into any."""
        prompt = self._prompts.pop(request.request_id, None)
        waits = tables and self._geometry.is_gradual and request.request_id in self._due
        if prompt is not None and waits and self._is_saved(prompt):
            offers = self._save(prompt, request.num_computed_tokens, tables=tables)
            self._saves.of_ended += self._saves.begin(offers)
        self._running.finished(request.request_id)
        self._granted.gone(request.request_id)
        self._tables.forget(request.request_id)
        self._due.forget(request.request_id)
        if prompt is None:
            return None
        self._drop(prompt)
        if prompt.claim.store_was_asked:
            answer, stop = request.num_output_tokens, stop_of(request)
            self.store.ended(Ended(prompt.number, answer, stop))
        copying, told = request.request_id in self._under_way, dict[str, Any]()
        for finished in self._hooks["finished"]:
            told |= finished(prompt, saving=copying) or {}
        return told or None

    def counts(self) -> dict[str, float]:
        return {k: v for counts in self._hooks["counts"] for k, v in counts().items()}

    def clear(self) -> None:
        """Drop every chunk in every tier, and those that are being saved."""
        for pending in self._pending.values():
            pending.dropped = True
        self.store.invalidate_all()

    def close(self) -> bool:
        """Close the store. Unconfirmed jobs' leases end with it, or with the workers' processes."""
        for prompt in self._prompts.values():
            self._drop(prompt)
        return self.store.close()

    # ---- steps -----------------------------------------------------------------------------------

    def _prompt(self, request: Any) -> Prompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.request is not request:
            if prompt is not None:
                self._drop(prompt)
            number = next(self._numbers) % (1 << 32)
            prompt = Prompt(request, None, number, of_request(request))
            self._prompts[request.request_id] = prompt
            prompt.name(self._layout, self._names)
        elif prompt.name(self._layout, self._names):
            self._drop(prompt)
        return prompt

    def _drop(self, prompt: Prompt) -> None:
        prompt.claim.drop()
        for drop in self._hooks["drop"]:
            drop(prompt)

    def _keys(self, prompt: Prompt, tokens: int) -> list[ChunkKey]:
        """Return the keys of the request's whole chunks so far. Only new tokens are hashed."""
        chain = prompt.chain
        assert chain is not None
        begin = len(chain.keys) * self._layout.chunk_tokens
        if tokens - begin >= self._layout.chunk_tokens:
            chain.go_on(prompt.request.all_token_ids[begin:tokens])
        return chain.keys


def _work(output: Any) -> Work:
    """Return the tokens that a step computes. How far single tokens look back is left out: only
    prompts teach that."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    if output.total_num_scheduled_tokens == len(scheduled):
        return Work(len(scheduled), len(scheduled))
    there = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    there.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return Work.of((tokens, there.get(name, 0)) for name, tokens in scheduled.items())


def _is_served_elsewhere(request: Any) -> bool:
    return bool(
        request.skip_reading_prefix_cache
        or (request.kv_transfer_params or {}).get("do_remote_prefill")
    )
