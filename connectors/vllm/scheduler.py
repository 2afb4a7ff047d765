"""The scheduler's half: requests -> keys -> leases. Runs in vLLM's scheduling loop, one thread; memory only, no waits.

Life of a request here: :meth:`matched` claims as much of what the store has as pays, and asks vLLM to come back while
chunks are on their way up, until a deadline. What it then promises is in RAM, verified and pinned. :meth:`allocated`
turns the claim into a load job, and vLLM lets the request wait until every rank has reported the load. Every
:meth:`step` turns newly finished chunks into save jobs. :meth:`report` ends the jobs' leases as workers confirm them.
:meth:`finished` forgets the request. Leases belong to jobs once one exists, so an aborted request cannot free a slot
that a worker is still copying.

A promise cannot be made smaller. When a load fails, vLLM gives the request's blocks back and asks again; such a request
is promised nothing any more, because the same chunks could fail again without end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kvtier.client.attachment import SharedPool
from kvtier.client.client import Client
from kvtier.client.leases import SharedLoad, SharedSave
from kvtier.connectors.vllm.layout import start_only
from kvtier.connectors.vllm.metadata import Job, PoolAddress, StepMetadata, StepReport
from kvtier.connectors.vllm.misses import Misses
from kvtier.connectors.vllm.prompts import Pending, Prompt, by_place
from kvtier.connectors.vllm.requests import Adapters
from kvtier.core.chunk import ChunkKey, ChunkLayout
from kvtier.core.pool import Pool
from kvtier.load_policy.decide import Judge
from kvtier.load_policy.outlook import Outlook
from kvtier.protocol.wire import Reason
from kvtier.store.lease import LoadLease, SaveLease
from kvtier.store.store import Store

logger = logging.getLogger("kvtier.connectors.vllm")

_REPORTS_S = 10.0
"""How long after the last job an engine without work is kept stepping for the workers' reports."""


class Duty(NamedTuple):
    """What kvtier does for an engine."""

    loads: bool = True
    saves: bool = True
    save_decode: bool = True
    """Save what the model has answered too."""
    shares_blocks: bool = True
    """vLLM's own prefix cache is on: what one request has loaded is there for others."""


class SchedulerHalf:
    """``store`` is the engine's own, or a server's client. ``parts``: for each worker rank, first byte of its part of a
    slot, and whether it writes that part. ``judge`` says what of a hit is taken."""

    def __init__(
        self,
        store: Store | Client,
        layout: ChunkLayout,
        parts: tuple[tuple[int, bool], ...],
        judge: Judge,
        duty: Duty,
    ) -> None:
        self.store = store
        self._duty = duty
        self._running: set[str] = set()
        """Requests that the last step computed for and that have not finished."""
        self._loading: Counter[ChunkKey] = Counter()
        """Chunks that are being copied into blocks, by how many requests."""
        self._asked = False
        """vLLM has asked for some request since the last step."""
        self._layout = layout
        self._parts = parts
        self._addresses: WeakKeyDictionary[Pool, PoolAddress] = WeakKeyDictionary()
        self._judge = judge
        self._adapters = Adapters()
        self._prompts: dict[str, Prompt] = {}
        self._pending: dict[int, Pending] = {}
        self._next_job = 0
        self._reports_until = 0.0
        self._loads: list[Job] = []
        self._replacements_seen: dict[int, int] = {}
        self._old_blocks = False
        """vLLM's own cache may hold blocks that other weights have computed."""
        self.misses = Misses(store, judge.clock)

    # ---- lookup --------------------------------------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens``: tokens loadable beyond the first ``computed``, and whether the request
        waits for them; None = ask again."""
        prompt = self._prompt(request)
        prompt.first, self._asked = not self._asked, True
        if self._old_blocks and computed:
            prompt.leave_alone()  # Nobody can tell which weights have computed what vLLM found in its own cache.
        if prompt.chain is None or prompt.load_failed or not self._duty.loads or _is_served_elsewhere(request):
            return 0, False
        keys = self._keys(prompt, request.num_tokens)
        start, prompt.begin = computed // self._layout.chunk_tokens, computed
        lease = None if self._is_coming_for_others(keys, start) else self._claim(prompt, keys, start)
        if lease is None:
            return None, False
        ready, coming = lease.poll()
        if coming and self._judge.clock() < prompt.until:
            return None, False
        if coming or ready < prompt.taken:
            ready = self._cut(prompt, keys, ready, coming)
        promised = max(0, self._end_of(prompt, start + ready) - computed)
        return promised, promised > 0

    def _is_coming_for_others(self, keys: Sequence[ChunkKey], start: int) -> bool:
        """Whether vLLM will have a part of this in its own blocks soon: the next chunk is being loaded for another."""
        return self._duty.shares_blocks and len(keys) > start and keys[start] in self._loading

    def _end_of(self, prompt: Prompt, chunks: int) -> int:
        """Tokens there are with so many leading chunks of the prompt. At least one token must be left to compute;
        whole blocks, like vLLM's own prefix cache."""
        block, total = self._layout.block_tokens, prompt.request.num_tokens
        return int(min(chunks * self._layout.chunk_tokens, (total - 1) // block * block))

    def _claim(self, prompt: Prompt, keys: Sequence[ChunkKey], start: int) -> LoadLease | SharedLoad | None:
        """The request's lease; a new one when the old one starts elsewhere or the store has learnt of more since. None:
        there is no room for it now."""
        lease, outlook = prompt.lease, None
        if lease is not None and prompt.start == start:
            ready, coming = lease.poll()
            if coming:
                return lease
            outlook = self.store.forecast(keys[start:])
            learned = outlook.ready > ready or outlook.known > prompt.known
            prompt.why, prompt.known = outlook.why, outlook.known
            if not learned:
                return lease
        self._drop(prompt)
        return self._decide(prompt, keys, start, outlook or self.store.forecast(keys[start:]))

    def _decide(
        self, prompt: Prompt, keys: Sequence[ChunkKey], start: int, outlook: Outlook
    ) -> LoadLease | SharedLoad | None:
        """Claim the part of a run that is worth it, and no more: what is claimed starts to move."""
        rest = keys[start:]
        choice = self._judge.choose(
            outlook,
            len(rest),
            prompt.begin,
            lambda count: self._end_of(prompt, start + count),
            busy=bool(self._running),
        )
        most = len(rest) if choice.ask else choice.chunks
        if not self._has_room(prompt, most):
            return None
        prompt.lease = self.store.load(keys, start, most=most)
        prompt.start, prompt.known, prompt.taken = start, outlook.known, choice.chunks
        prompt.why, prompt.declined = outlook.why, {}
        prompt.until = self._judge.clock() + choice.within_s
        if choice.chunks < outlook.known:
            self._decline(prompt, rest[choice.chunks : outlook.known], "slower")
        elif outlook.asking and not choice.ask:
            self._decline(prompt, rest[outlook.known :], "unasked")
        return prompt.lease

    def _has_room(self, prompt: Prompt, chunks: int) -> bool:
        """vLLM asks for its whole queue at each step. Requests that wait may claim half of RAM together, so that there
        are slots for what running ones save. Whoever vLLM asks for first may always claim."""
        pool = self.store.pool
        if pool is None or prompt.first or not chunks:
            return True
        claimed = sum(len(other.lease.keys) for other in self._prompts.values() if other.lease is not None)
        return claimed + chunks <= pool.slots // 2

    def _cut(self, prompt: Prompt, keys: Sequence[ChunkKey], ready: int, coming: int) -> int:
        """Do with what is ready: the rest is not coming in time (``coming``), or not at all: refused, or lost after it
        was seen. Returns how many chunks the request has now; none when a server does not answer."""
        held = 0 if prompt.why == "tier_down" else min(prompt.taken, prompt.known)
        wanted = max(prompt.taken, ready + coming) if coming else held
        if coming:
            lease = self.store.load(keys, prompt.start, most=ready)
            ready = lease.poll().ready
            self._drop(prompt)
            prompt.lease = lease
        prompt.taken = ready
        self._decline(prompt, keys[prompt.start + ready : prompt.start + wanted], "deadline" if coming else "refused")
        return ready

    def _decline(self, prompt: Prompt, keys: Sequence[ChunkKey], reason: Reason) -> None:
        if keys:
            prompt.declined[reason] = prompt.declined.get(reason, 0) + len(keys)
            self.store.decline(keys, reason)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """vLLM's ``update_state_after_alloc``: the request gets blocks; ``tokens`` of them are ours to load."""
        prompt = self._prompt(request)
        lease, prompt.lease, prompt.sources = prompt.lease, None, {}
        if lease is None:
            return
        if tokens <= 0:
            self._account(prompt, [])
            lease.close()
            return
        block, per_chunk = self._layout.block_tokens, self._layout.blocks_per_chunk
        ids = blocks.get_block_ids()[0]
        first, last = prompt.begin // block, (prompt.begin + tokens) // block
        chunks = -(-last // per_chunk) - prompt.start
        place = self._address(lease.pool)
        job = Job(
            self._number(),
            place,
            lease.slots[:chunks],
            ids[first:last],
            first - prompt.start * per_chunk,
            request.request_id,
        )
        self._pending[job.number] = Pending(lease, request.request_id, lease.keys[:chunks], tokens)
        self._loading.update(lease.keys[:chunks])
        self._judge.load_began(tokens)
        self._loads.append(job)
        self._account(prompt, lease.sources[:chunks])
        prompt.sources = by_place(lease.sources[:chunks], self._layout, job.first, last - first)

    def _account(self, prompt: Prompt, places: Sequence[str]) -> None:
        """Every chunk from ``prompt.start`` on was loaded, declined, or is missing."""
        request, size = prompt.request, self._layout.chunk_tokens
        whole = request.num_tokens // size
        if not whole:
            self.misses.too_short()
            return
        asked = min(whole, -(-self._end_of(prompt, whole) // size)) - prompt.start
        known = len(places) + sum(prompt.declined.values())
        why = prompt.why or "tier_down"
        if why == "cold" and not prompt.start + known:
            why = self.misses.first.differs(request.all_token_ids[:size], prompt.extras) or why
        self.misses.prompt(prompt.start, places, prompt.declined, (why, asked - known))

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens of the request's last load by place (``ram`` or a tier's name)."""
        prompt = self._prompts.get(request.request_id)
        return prompt.sources if prompt is not None else {}

    # ---- one engine step -----------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepMetadata:
        """vLLM's ``build_connector_meta``."""
        pool = self.store.pool
        address = self._address(pool) if pool is not None else None
        metadata = StepMetadata(
            address,
            loads=self._loads,
            number=self._judge.planned(_work(output)),
            computes=bool(output.total_num_scheduled_tokens),
            replacements_seen=dict(self._replacements_seen),
        )
        self._loads, self._running, self._asked = [], set(output.num_scheduled_tokens), False
        for new in output.scheduled_new_reqs:
            self._advance(metadata, output, new.req_id, list(new.block_ids[0]), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            ids = cached.new_block_ids[index]
            blocks = list(ids[0]) if ids else []
            if request_id in cached.resumed_req_ids:
                prompt.saved = 0
            else:
                blocks = prompt.blocks + blocks
            self._advance(metadata, output, request_id, blocks, cached.num_computed_tokens[index])
        return metadata

    def _advance(self, metadata: StepMetadata, output: Any, request_id: str, blocks: list[int], computed: int) -> None:
        """Save the chunks of one request that this step finishes.

        Only tokens whose ids are known now count: newest sampled ids (async scheduling) and unverified draft tokens
        are not, and are saved by a later step.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        prompt.blocks = blocks
        self._name(prompt)
        if prompt.chain is None or not self._duty.saves:
            return
        request = prompt.request
        known = request.num_tokens if self._duty.save_decode else request.num_prompt_tokens
        finished = min(computed + output.num_scheduled_tokens[request_id], known) // self._layout.chunk_tokens
        if finished <= prompt.saved:
            return
        keys = self._keys(prompt, request.num_tokens)[:finished]
        if not prompt.saved:
            self.misses.first.saved(request.all_token_ids[: self._layout.chunk_tokens], prompt.extras)
        prompt.saved = finished
        lease = self.store.save(keys)
        if not lease.keys:
            lease.close()
            return
        self._save(metadata, prompt, lease, request_id)

    def _save(self, metadata: StepMetadata, prompt: Prompt, lease: SaveLease | SharedSave, request_id: str) -> None:
        per_chunk = self._layout.blocks_per_chunk
        place = {key: index for index, key in enumerate(lease.run)}
        blocks: list[int] = []
        for key in lease.keys:
            blocks += prompt.blocks[place[key] * per_chunk : (place[key] + 1) * per_chunk]
        job = Job(self._number(), self._address(lease.pool), lease.slots, blocks)
        self._pending[job.number] = Pending(lease, request_id, lease.keys)
        metadata.saves.append(job)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def report(self, report: StepReport) -> None:
        """vLLM's ``update_connector_output``: what all ranks said of this step's jobs."""
        self._judge.ended(report.step, report.loaded_blocks * self._layout.block_tokens, report.load_s, report.save_s)
        for rank, count in report.replacements.items():
            self._replacements_seen[rank] = max(count, self._replacements_seen.get(rank, 0))
        if report.replacements:
            self._renew()
        if report.unmapped and (self._duty.loads or self._duty.saves):
            self._turn_off(report.unmapped)
        for number in report.done.keys() | report.failed.keys():
            pending = self._pending.get(number)
            if pending is None:
                continue
            pending.done += report.done[number]
            pending.failed += report.failed[number]
            if pending.done + pending.failed == len(self._parts):
                del self._pending[number]
                self._end(pending, refused=bool(report.replacements))

    def _end(self, pending: Pending, *, refused: bool) -> None:
        """A key enters the store only when every rank wrote its part; a chunk that one rank could not load goes, unless
        it was ``refused`` to a model with other weights."""
        pending_load = isinstance(pending.lease, LoadLease | SharedLoad)
        if pending_load:
            self._loading -= Counter(pending.keys)
            self._judge.load_ended(pending.tokens)
        if not pending.failed:
            if isinstance(pending.lease, SaveLease | SharedSave):
                self.misses.saved(len(pending.keys))
                pending.lease.commit()
            else:
                pending.lease.close()
            return
        pending.lease.close()
        prompt = self._prompts.get(pending.request_id)
        if pending_load and not refused:
            self.store.forget(pending.keys)
            logger.warning("load of %d chunks failed; they are dropped and recomputed", len(pending.keys))
        if prompt is None:
            return
        if pending_load:
            prompt.load_failed = True
        elif not prompt.retried:  # the worker refuses saves for a while after weights were replaced
            prompt.saved, prompt.retried = 0, True

    def _turn_off(self, why: str) -> None:
        """The workers cannot reach the pool: nothing is served and nothing is kept from now on."""
        logger.error("%s: kvtier keeps and serves nothing in this engine; all its workers have to be on one host", why)
        self._duty = self._duty._replace(loads=False, saves=False)
        for prompt in self._prompts.values():
            self._drop(prompt)

    def _renew(self) -> None:
        """The model has other weights: nothing that was saved before may be served, and nothing that a live request has
        in its blocks may be saved. Keys are this start's own from now on."""
        self._layout = start_only(self._layout, "the model's weights were replaced under the running engine")
        self._old_blocks = True
        for prompt in self._prompts.values():
            self._drop(prompt)
            prompt.leave_alone()
        self._prompts = {name: prompt for name, prompt in self._prompts.items() if prompt.blocks}

    def expects_reports(self) -> bool:
        """vLLM's ``has_pending_push_work``: whether to take steps even with nothing to compute, so that workers can say
        that a copy is through. Not for ever after the last job: a report may never come."""
        return bool(self._pending) and self._judge.clock() < self._reports_until

    def finished(self, request: Any) -> None:
        """vLLM's ``request_finished``: also for aborted requests, waiting or running."""
        prompt = self._prompts.pop(request.request_id, None)
        self._running.discard(request.request_id)
        if prompt is not None:
            self._drop(prompt)

    def counts(self) -> dict[str, int]:
        """See :meth:`kvtier.connectors.vllm.misses.Misses.new`."""
        return self.misses.new()

    def clear(self) -> None:
        """Forget every cached chunk, in every tier."""
        self.store.clear()

    def close(self) -> bool:
        """Jobs that workers have not confirmed keep their leases: a server ends them when no process of this engine
        has its pool mapped any more."""
        for prompt in self._prompts.values():
            self._drop(prompt)
        return self.store.close()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _prompt(self, request: Any) -> Prompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.request is not request:
            if prompt is not None:
                self._drop(prompt)
            prompt = self._prompts[request.request_id] = Prompt(request, None)
        self._name(prompt)
        return prompt

    def _name(self, prompt: Prompt) -> None:
        """Keys for a request that is new, or whose streaming session goes on."""
        if prompt.name(self._layout, self._adapters):
            self._drop(prompt)

    def _keys(self, prompt: Prompt, tokens: int) -> list[ChunkKey]:
        """Keys of the request's whole chunks so far; hashes only what is new."""
        chain = prompt.chain
        assert chain is not None
        if tokens // self._layout.chunk_tokens > len(chain.keys):
            chain.extend(prompt.request.all_token_ids[:tokens])
        return chain.keys

    def _address(self, pool: Pool | None) -> PoolAddress:
        """Where workers map the pool of a lease."""
        assert pool is not None, "a lease with slots has a pool"
        address = self._addresses.get(pool)
        if address is None:
            witness = pool.witness_path if isinstance(pool, SharedPool) else None
            blocks = self._layout.blocks_per_chunk
            address = PoolAddress(pool.path, witness, pool.slots, pool.slot_bytes, blocks, self._parts)
            self._addresses[pool] = address
        return address

    def _number(self) -> int:
        self._reports_until = self._judge.clock() + _REPORTS_S
        self._next_job += 1
        return self._next_job

    @staticmethod
    def _drop(prompt: Prompt) -> None:
        if prompt.lease is not None:
            prompt.lease.close()
            prompt.lease = None


def _work(output: Any) -> list[tuple[int, int]]:
    """What a step computes: for each request its tokens, and how many were there before."""
    there = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    there.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(tokens, there.get(request_id, 0)) for request_id, tokens in output.num_scheduled_tokens.items()]


def _is_served_elsewhere(request: Any) -> bool:
    """Whether the request reads no cache, or waits for another connector's prefill."""
    return bool(request.skip_reading_prefix_cache or (request.kv_transfer_params or {}).get("do_remote_prefill"))
