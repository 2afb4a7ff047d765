"""One engine: vLLM's own scheduler, cache manager and output aggregation, both halves of the
connector, a fake model.

Everything of vLLM that decides is real. Metadata is pickled on its way to every rank and back, as
between processes. Before a step computes, all positions that each request claims as computed are
read back on every rank and compared. A step that reads anything wrong computes something wrong: its
KV is garbage and its token is another. It is a violation when such a token is given to the user, or
when a sound request cannot end.

With async scheduling the next step is planned before the last one's tokens are known. With pipeline
parallelism the ranks of the second stage run one step behind those of the first.

For Model Runner V2 vLLM's scheduler plans otherwise: a request that resumes is told as a new one,
with all its tokens, and with async scheduling one step more than pipeline stages is in flight.
Workers then know nothing of what the request was before, and a token that was sampled for its older
life is not part of what they have.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.client.client import Client
from kvtier.connectors.vllm import LOAD_EVERY_HIT, KVTierConnector
from kvtier.connectors.vllm.metadata import StepMetadata
from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads
from kvtier.core.errors import TierError
from kvtier.load_policy.decide import BUSY_COPY_S
from tests.forked import READ_S
from tests.trust.engine import beside
from tests.trust.engine.cells import BLOCK, CHUNK, LONGEST, VOCABULARY
from tests.trust.engine.late_saves import LateSaves
from tests.trust.engine.memory import Array, Need, RankMemory, Share, chain, next_token

LAYERS = 2
_SESSION = 300
"""About the most tokens of a session."""
_FORWARD = SimpleNamespace(attn_metadata=None)
"""What vLLM tells of a forward pass, as far as a connector asks."""


def _sent(what):
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(what))  # noqa: S301 our own bytes


def _transferred(connector, finished):
    """Which transfers have ended, as this vLLM asks for it."""
    if not hasattr(KVConnectorBase_V1, "get_transfer_results"):
        sending, receiving = connector.get_finished(finished)
        return {"finished_sending": sending, "finished_recving": receiving}
    told = connector.get_transfer_results(finished)
    return {
        "finished_sending": told.finished_sending,
        "finished_recving": told.finished_recving,
        "failed_recving": told.failed_recving,
    }


@dataclass
class Told:
    """A request as the workers know it."""

    salt: str
    tokens: list[int]
    blocks: list[list[int]] = field(default_factory=list)
    """By group."""
    states: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    life: int = 0
    """How often it was told as a new request."""
    replay: int = 0
    """From which position on its replayed windows are there, where less of them than of the rest
    was there at its beginning."""
    column: int | None = None
    """Where in its table the running state lies, beside drafts. None: at the end of what is
    computed."""


@dataclass
class Rank:
    """One worker: its memory, and the worker's half of the connector."""

    stage: int
    memory: RankMemory
    connector: Any
    late: Sequence[LateSaves] = ()


@dataclass
class Work:
    """What one step computes for one request: positions ``[begin, end)`` over ``tokens``, of which
    the last ``drafts`` are drafts."""

    request_id: str
    blocks: list[list[int]]
    begin: int
    tokens: list[int]
    states: list[int]
    """Of each position, see :func:`chain`."""
    drafts: int
    samples: bool
    life: int
    replay: int
    source: int | None = None
    """The column of the running state before the step. None: as :attr:`Told.column`."""
    target: int | None = None
    """And the first one after it."""
    bad: str = ""
    kv: Array = field(default_factory=lambda: np.empty(0, np.uint64))
    """``states`` as the memories take them."""


@dataclass
class Step:
    """A step that was planned and whose output has not come back."""

    output: SchedulerOutput
    work: list[Work]
    results: dict[int, KVConnectorOutput]
    sampled: dict[str, list[int]] = field(default_factory=dict)


_V2_CONFIG = type("V2Config", (VllmConfig,), {"use_v2_model_runner": True})
"""vLLM decides about its runner by Triton, which only the runner itself needs."""


def engine_config(cell, model, folder):
    """vLLM's configuration of a cell. What a CPU platform would turn off is set afterwards."""
    extra: dict[str, Any] = {
        "ram_bytes": 256 * 1024,
        "chunk_tokens": CHUNK,
        LOAD_EVERY_HIT: True,
        "log_level": "ERROR",
    }
    if cell.lower == "nvme":
        extra |= {"nvme_path": str(folder / "nvme"), "nvme_bytes": 4 << 20, "ram_bytes": 96 * 1024}
    if cell.lower == "server":
        extra |= {"server": f"unix://{folder / 'run' / 'kvtier.sock'}", "server_timeout_ms": 5_000}
    extra |= cell.config
    arguments: dict[str, Any] = {}
    if cell.drafts:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": cell.drafts,
            "prompt_lookup_max": 4,
        }
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        block_size=BLOCK,
        enable_prefix_caching=cell.prefix_caching,
        scheduling_policy=cell.policy,
        enforce_eager=True,
        kv_transfer_config=transfer_config(cell, extra),
        **arguments,
    ).create_engine_config()
    if cell.v2:
        config.__class__ = _V2_CONFIG
    config.scheduler_config.async_scheduling = cell.async_scheduling
    config.parallel_config.pipeline_parallel_size = cell.pipeline
    config.parallel_config.tensor_parallel_size = cell.tensor
    config.parallel_config.decode_context_parallel_size = cell.divide
    config.parallel_config.cp_kv_cache_interleave_size = cell.turn
    config.parallel_config.prefill_context_parallel_size = cell.prefill
    config.parallel_config.world_size = cell.ranks
    config.cache_config.num_gpu_blocks = cell.blocks
    if cell.has_state:
        config.cache_config.mamba_cache_mode = "align"
    config.cache_config.prefix_match_unit = cell.match_unit
    return config


def transfer_config(cell, extra):
    """kvtier alone, or one of two."""
    ours = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": cell.role,
        "kv_connector_extra_config": extra,
    }
    if not cell.beside:
        return ours
    other = {
        "kv_connector": "PrefilledElsewhere",
        "kv_connector_module_path": beside.MODULE,
        "kv_role": "kv_both",
    }
    both = [ours, other] if cell.beside == "first" else [other, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both},
    }


def layers_of(cell, stage):
    """Of each group what it needs and its layers in this pipeline stage."""
    numbers = range(stage * LAYERS, (stage + 1) * LAYERS)
    return [
        (Need.parse(text), [f"model.layers.{number}.{place}.attn" for number in numbers])
        for place, text in enumerate(cell.groups)
    ]


def spec(need, drafts=0):
    """As vLLM makes it of a layer: 256 bytes a block."""
    attention: dict[str, Any] = {
        "block_size": need.block_tokens,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.int64,
    }
    if need.kind in ("latent", "replayed"):
        return SlidingWindowMLASpec(
            sliding_window=need.reach,
            bounded_replay=need.kind == "replayed",
            page_size_padded=256,
            **attention | {"head_size": 2},
        )
    if need.kind == "ring":
        return CircularBufferSpec(page_size_padded=256, **attention)
    if need.kind == "window":
        return SlidingWindowSpec(sliding_window=need.reach, dcp_sharded=False, **attention)
    if need.kind == "local":
        return ChunkedLocalAttentionSpec(attention_chunk_size=need.reach, **attention)
    if need.kind == "state":
        return MambaSpec(
            block_size=BLOCK,
            shapes=((1,), (2,)),
            dtypes=(torch.int64, torch.int64),
            page_size_padded=256,
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
        )
    return FullAttentionSpec(dcp_sharded=need.kind == "full", page_size_padded=256, **attention)


def cache_config(groups, blocks, drafts):
    """The groups lie over one another."""
    specs = [KVCacheGroupSpec(names, spec(need, drafts)) for need, names in groups]
    page = specs[0].kv_cache_spec.page_size_bytes
    assert {one.kv_cache_spec.page_size_bytes for one in specs} == {page}
    shared = [list(names) for names in zip(*(names for _, names in groups), strict=True)]
    if len(groups) == 1:
        tensors = [KVCacheTensor(len(shared) * page * blocks, groups[0][1], page * blocks, page)]
    else:
        tensors = [KVCacheTensor(page * blocks, names, page * blocks, page) for names in shared]
    return KVCacheConfig(blocks, tensors, specs)


def _named_ranks(cell):
    """How many ranks of a stage vLLM tells apart in its handshake. Of PCP's it keeps one, unless
    they divide blocks."""
    return cell.tensor * (cell.prefill if cell.divide > 1 else 1)


def step_metadata(metadata):
    """kvtier's own part of a step's metadata."""
    told = getattr(metadata, "metadata", [metadata])
    return next(one for one in told if isinstance(one, StepMetadata))


def ours(connector):
    """kvtier's own, which may be one of several."""
    return next(
        one
        for one in getattr(connector, "_connectors", [connector])
        if isinstance(one, KVTierConnector)
    )


class Engine:
    """See the module's text. ``draw`` decides everything that is left to chance."""

    block_tokens = BLOCK
    """Tokens of a block of states, and the longest block there is."""
    longest = LONGEST
    """Most tokens of a request."""

    def __init__(self, cell, model, folder, draw):
        self.cell, self.draw = cell, draw
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.config = self._configured(model, folder)
        init_none_hash(sha256)
        with set_current_vllm_config(self.config):
            self.ranks = list(self._made_ranks())
            self.scheduler = self._made_scheduler()
        self._aggregator = KVOutputAggregator.from_connector(
            self.scheduler.connector, len(self.ranks)
        )
        self._hasher = get_request_block_hasher(self.scheduler.hash_block_size, sha256)
        self._sequences: dict[str, Told] = {}
        self._in_flight: deque[Step] = deque()
        self._late = dict[str, int]()
        """By request, the step since which a chunk of it has waited."""
        self._said: dict[str, tuple[list[int], list[int]]] = {}
        """By request, all its tokens when they were last compared, and their hashes."""
        self.depth = self.config.max_concurrent_batches
        assert self.depth == cell.depth, "the mode under test is in force"
        assert self.scheduler.use_v2_model_runner == cell.v2
        assert self.scheduler.scheduler_config.async_scheduling == cell.async_scheduling
        assert self.scheduler.policy.value == cell.policy
        assert self.scheduler.num_spec_tokens == cell.drafts
        assert self.scheduler.cache_config.enable_prefix_caching == cell.prefix_caching
        if not cell.beside:  # otherwise the half is made later
            assert ours(self.scheduler.connector)._scheduler._duty.steps_alone, "it may wait"
        assert len(self.scheduler.kv_cache_config.kv_cache_groups) == len(cell.groups)
        if cell.early:
            self._large_chunks()
        self._next = 0
        self.conversations: deque[list[int]] = deque(maxlen=6)
        """The last requests that ended well: prompt and answer."""

    def _made_ranks(self):
        for rank in range(self.cell.ranks):
            stage, place = divmod(rank, self.cell.prefill * self.cell.tensor)
            groups = layers_of(self.cell, stage)
            config = self._config_of(rank)
            late = list[LateSaves]()
            same = place % self.cell.tensor if self.cell.divide == 1 else place
            share = Share(place % self.cell.divide, self.cell.divide, self.cell.turn)
            memory, cache = self._memory(16 * stage + same, groups, share), self._cache(groups)
            connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            connector.register_kv_caches(memory.tensors)
            for one in getattr(connector, "_connectors", ()):
                one.memory = memory
            if self.cell.slow_copies:
                self._slow_down(ours(connector)._worker)
            if self.cell.late_saves:
                for paged in ours(connector)._worker._paged:
                    late.append(LateSaves(paged, self.draw, self.counts))
            yield Rank(stage, memory, connector, late)

    def _config_of(self, rank):
        """The configuration as one rank has it."""
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(self.config.parallel_config)
        config.parallel_config.rank = rank
        return config

    def _configured(self, model, folder):
        return engine_config(self.cell, model, folder)

    def _cache(self, groups):
        """What vLLM plans for the layers of a rank."""
        return cache_config(groups, self.cell.blocks, self.cell.drafts)

    def _scheduler_cache(self):
        return self._cache(layers_of(self.cell, 0))

    def _memory(self, rank, groups, share):
        return RankMemory.of_words(groups, rank, self.cell.blocks, share)

    def _slow_down(self, worker):
        """Time passes only while the worker copies."""
        now = [0.0]

        def slow(load, jobs):
            now[0] += self._copy_s()
            return load(jobs)

        worker._clock = lambda: now[0]
        for one in worker._paged:
            one.load = partial(slow, one.load)

    def _large_chunks(self):
        """A chunk's copy takes some milliseconds, and its read does too."""
        half = ours(self.scheduler.connector)._scheduler
        half._load_policy.parts = lambda tokens: tokens // CHUNK

        def slow(read, *arguments):
            time.sleep(READ_S)
            return read(*arguments)

        for lower in getattr(half.store, "lower", ()):
            lower.tier.read = partial(slow, lower.tier.read)

    def _copy_s(self):
        """How long a slow copy takes: half of what a step may copy for, or all, or more."""
        return self.draw.choice((BUSY_COPY_S / 2, BUSY_COPY_S, 5 * BUSY_COPY_S))

    def _made_scheduler(self):
        kind = AsyncScheduler if self.cell.async_scheduling else Scheduler
        cache = self._scheduler_cache()
        sizes = resolve_kv_cache_block_sizes(cache, self.config)
        cache.hash_block_size = sizes[1]
        cache.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            cache, self.config, *sizes
        )
        scheduler = kind(
            self.config,
            cache,
            StructuredOutputManager(self.config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        told = {}
        for number, rank in enumerate(self.ranks):
            kv_transfer_state._KV_CONNECTOR_AGENT = rank.connector
            told[rank.stage, number % _named_ranks(self.cell)] = _sent(
                rank.connector.get_handshake_metadata()
            )
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)
        assert (
            ours(scheduler.connector)._scheduler is ours(scheduler.connector)._starting
        ) is bool(self.cell.beside)
        return scheduler

    # ---- requests --------------------------------------------------------------------------------

    def ask(
        self, tokens, answer, salt="", priority=0, *, elsewhere=False, session=None, **sampling
    ):
        """A new request; its name. ``elsewhere``: its prompt was computed elsewhere, and the other
        connector brings it. ``session``: a streaming session. With the name of one it goes on, or
        without tokens it ends."""
        self._next += 1
        name = session or f"r{self._next}"
        parameters = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, **sampling)
        if elsewhere:
            parameters.extra_args = {"kv_transfer_params": {"do_remote_prefill": True}}
            self.counts["elsewhere"] += 1
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=parameters,
            pooling_params=None,
            cache_salt=salt or None,
            priority=priority,
            block_hasher=self._hasher,
            resumable=session is not None and bool(tokens),
        )
        self._sequences.setdefault(name, Told(salt, list(tokens)))
        self.counts["sessions that went on"] += bool(session and tokens)
        self.scheduler.add_request(request)
        return name

    def abort(self, name):
        self.counts["aborted"] += 1
        status = self.scheduler.requests[name].status
        self.counts["aborted loads"] += status == RequestStatus.WAITING_FOR_REMOTE_KVS
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def reset(self, *, connector, running=False):
        """vLLM's ``reset_prefix_cache``, as somebody asks for it over HTTP. ``running``: running
        requests lose their blocks too, which vLLM refuses while one of them loads."""
        self.counts["resets"] += 1
        self.counts["resets under requests"] += running and bool(self.scheduler.running)
        try:
            self.scheduler.reset_prefix_cache(
                reset_running_requests=running, reset_connector=connector
            )
        except RuntimeError:
            assert running, "vLLM refuses nothing else"
            self.counts["refused resets"] += 1

    def crowd_out(self):
        """Other prompts take every free block for a moment: nothing of vLLM's own cache is left in
        them, and what is asked again can be had of kvtier alone."""
        self.counts["crowded out"] += 1
        blocks = self.scheduler.kv_cache_manager.block_pool
        blocks.free_blocks(blocks.get_new_blocks(blocks.get_num_free_blocks()))

    @property
    def in_parts(self):
        """The loads in parts that go on."""
        (early,) = (
            each
            for each in ours(self.scheduler.connector)._scheduler.extensions
            if isinstance(each, EarlyLoads)
        )
        return list(early._loads.values())

    def lose(self):
        """A chunk of a load in parts is forgotten everywhere, whether it was read yet or not."""
        half, loads = ours(self.scheduler.connector)._scheduler, self.in_parts
        if loads and self.draw.random() < self.cell.loses:
            wanted = self.draw.choice(loads).run.wanted
            half.store.invalidate([self.draw.choice(wanted)])

    @property
    def live(self):
        return list(self.scheduler.requests)

    @property
    def in_session(self):
        return any(one.streaming_queue is not None for one in self.scheduler.requests.values())

    def go_on(self, *, end=False):
        """Streaming sessions get more to read, before or after they have answered, or end."""
        for name, request in list(self.scheduler.requests.items()):
            queue = request.streaming_queue
            waits = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            goes_on = queue is not None and self.draw.random() < (0.3 if waits else 0.03)
            if queue is None or None in queue or not (end or (goes_on and not queue)):
                continue
            room = _SESSION - request.num_tokens - request.max_tokens - 20
            more = 0 if end else min(self.draw.choice([0, 1, 7, 40]), room)
            tokens = [self.draw.randrange(VOCABULARY) for _ in range(more)]
            self.ask(tokens, self.draw.choice([1, 2, 5, 20]), session=name)

    # ---- steps -----------------------------------------------------------------------------------

    def step(self):
        """One turn of vLLM's core loop: plan and begin a step; when enough are in flight, take in
        the oldest."""
        self.counts["steps"] += 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            step = Step(output, self._planned(output), {})
            self._check_offered(step.work)
            self._in_flight.append(step)
            self.counts[f"{len(self._in_flight)} in flight"] += 1
            self._count_loads(output)
            self._run_stage(step, 0)
            if self.cell.pipeline == 1 or len(self._in_flight) > 1:
                self._finish_stages()
            if len(self._in_flight) < self.depth and (step.work or self.scheduler.has_requests()):
                return
        if self._in_flight:
            self._take_in(self._in_flight.popleft())

    def _check_offered(self, planned):
        """Whatever chunk a step finishes is offered in that step; of an answer of full attention
        alone in the first from the next turn on that computes its request."""
        half = ours(self.scheduler.connector)._scheduler
        for work in planned:
            prompt = getattr(half, "_prompts", {}).get(work.request_id)
            if prompt is None or prompt.chain is None or prompt.progress.blended:
                continue
            request, duty = prompt.request, half._duty
            known = request.num_tokens if duty.save_decode else request.num_prompt_tokens
            finished = min(work.begin + work.tokens[0], known) // half._layout.chunk_tokens
            if not duty.saves or prompt.progress.saved >= finished:
                self._late.pop(work.request_id, None)
                continue
            now, together = half._due._step, half._due._together
            since = self._late.setdefault(work.request_id, now)
            if now // together > (since - 1) // together or work.tokens[0] > duty.answer_tokens:
                self.violations.append(
                    f"{work.request_id}: {finished - prompt.progress.saved} chunks are late"
                )

    def _check_last(self, prompt):
        """Nothing waits when a request ends."""
        half, request = ours(self.scheduler.connector)._scheduler, prompt.request
        is_kept = prompt.chain is not None and not prompt.progress.blended and half._duty.saves
        if not is_kept or not half._duty.save_decode or not half._geometry.is_gradual:
            return
        known = min(request.num_computed_tokens, request.num_tokens - self.depth)
        if prompt.progress.saved < known // half._layout.chunk_tokens:
            self.violations.append(f"{request.request_id} ended with a chunk that was not offered")

    def _count_loads(self, output):
        """Where the tokens of the loads that begin come from, and how those in parts end."""
        half, metadata = (
            ours(self.scheduler.connector)._scheduler,
            step_metadata(output.kv_connector_metadata),
        )
        if self.cell.early:  # in a MultiConnector the half is made later
            self.counts["chunks on their way into blocks"] += sum(
                not load.is_large and load.parts.reading is not None for load in self.in_parts
            )
        early = [job.end for job in metadata.loads if job.end is not None]
        self.counts["loads whose last part told of the end"] += len(early)
        for end in (*metadata.ends, *early):
            self.counts["loads in parts"] += 1
            self.counts["loads in parts that were cut"] += end.kept < len(end.blocks)
        for job in metadata.loads:
            if job.request_id is None:
                self.counts["parts"] += 1
                continue
            self.counts["hits within a block"] += bool(job.tokens % self.block_tokens)
            for place, tokens in half.sources(self.scheduler.requests[job.request_id]).items():
                self.counts[f"tokens from {place}"] += tokens

    def _finish_stages(self):
        """Ranks of later stages run all steps but the newest, whose first stage has only just been
        run."""
        newest = self._in_flight[-1] if self.cell.pipeline > 1 else None
        for step in self._in_flight:
            if step is not newest:
                self._run_rest(step)

    def _run_rest(self, step):
        for stage in range(1, self.cell.pipeline):
            if any(
                number not in step.results
                for number, rank in enumerate(self.ranks)
                if rank.stage == stage
            ):
                self._run_stage(step, stage)
        if not step.sampled:
            self._sample(step)

    def _planned(self, output):
        """What the step computes, by what workers know of each request."""
        begins: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            sequence, request = self._sequences[new.req_id], self.scheduler.requests[new.req_id]
            goes_on = bool(sequence.life and request.resumable)
            if self.cell.v2:
                self.counts["resumed as new"] += bool(sequence.life and not goes_on)
                self.counts["preempted"] += bool(sequence.life and not goes_on)
            if self.cell.v2 or goes_on:
                tokens = new.prefill_token_ids if self.cell.v2 else new.prompt_token_ids
                sequence.tokens, sequence.drafts = list(tokens), []
            sequence.life += 1
            sequence.replay, sequence.column = new.replay_start, None
            self.counts["replays"] += bool(new.replay_start)
            assert sequence.life == 1 or self.cell.v2 or goes_on
            sequence.blocks = [list(ids) for ids in new.block_ids]
            begins[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            sequence, ids = self._sequences[name], cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                assert not self.cell.v2
                self.counts["preempted"] += 1
                sequence.blocks, sequence.drafts = [[] for _ in self.cell.groups], []
                sequence.column = None
            for table, more in zip(sequence.blocks, ids or (), strict=False):
                table.extend(more)
            begins[name] = cached.num_computed_tokens[index]
            if not self.cell.v2:
                prompt = self.scheduler.requests[name].num_prompt_tokens
                del sequence.tokens[prompt + cached.num_output_tokens[index] :]
        work = []
        for name, count in output.num_scheduled_tokens.items():
            sequence, drafted = (
                self._sequences[name],
                len(output.scheduled_spec_decode_tokens.get(name, ())),
            )
            tables = [list(table) for table in sequence.blocks]
            told = sequence.life, sequence.replay
            work.append(Work(name, tables, begins[name], [count], [], drafted, False, *told))
        return work

    def _resolved(self, work):
        """On the device: the tokens of the step, which under async scheduling only it knows, and
        where it begins: the scheduler counts on all drafts of the step before, of which some were
        refused."""
        sequence, (count,) = self._sequences[work.request_id], work.tokens
        if self.cell.async_scheduling and self.cell.drafts:
            work.begin = min(work.begin, len(sequence.tokens) - 1)
        end = work.begin + count
        tokens = sequence.tokens[: end - work.drafts]
        tokens += sequence.drafts[: end - len(tokens)]
        tokens += [0] * (end - len(tokens))
        known = end - work.drafts
        sequence.states = chain(
            sequence.salt, sequence.tokens[:known], sequence.states[: min(work.begin, known)]
        )
        work.tokens, work.states = tokens, chain(sequence.salt, tokens, sequence.states)
        work.kv = np.array(work.states, np.uint64)
        work.samples = known == len(sequence.tokens)
        if self.cell.drafts and self.cell.has_state:
            work.source = sequence.column
            work.target = sequence.column = -(-end // self.block_tokens) - 1

    def _run_stage(self, step, stage):
        """All ranks of a stage run a step: the hooks in the order in which vLLM's model runner
        calls them."""
        if stage == 0:
            for work in step.work:
                self._resolved(work)
        metadata = pickle.dumps(step.output.kv_connector_metadata)
        for number, rank in enumerate(self.ranks):
            if rank.stage != stage:
                continue
            connector = rank.connector
            told = pickle.loads(metadata)  # noqa: S301 our own bytes
            connector.handle_preemptions(told)
            connector.bind_connector_metadata(told)
            self.counts["saves of ended requests"] += len(step_metadata(told).ended_saves)
            self.counts["loads"] += len(ours(connector)._get_connector_metadata().loads)
            with self._failing(rank):
                if step.output.has_sync_kv_loads:
                    connector.start_load_kv(_FORWARD)
                self._compute(step, rank)
                if hasattr(connector, "finish_forward"):
                    connector.finish_forward()
                if not step.output.has_sync_kv_loads:
                    connector.start_load_kv(_FORWARD)
            connector.wait_for_save()
            self.counts["steps of loads that go on"] += bool(ours(connector)._worker._copying)
            transferred = _transferred(connector, step.output.finished_req_ids)
            if transferred.get("failed_recving") and not self.counts["faults"]:
                self.violations.append(
                    f"loads of {transferred['failed_recving']} failed, and nothing made them fail"
                )
            step.results[number] = KVConnectorOutput(
                **transferred,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_connector_worker_meta=_sent(connector.build_connector_worker_meta()),
            )
            connector.clear_connector_metadata()
        if self.cell.pipeline == 1:
            self._sample(step)

    def _compute(self, step, rank):
        for one in rank.late:
            one.computed += 1
        for source, target in step.output.kv_cache_block_copies or ():
            rank.memory.copy(source, target)
            self.counts["copied blocks"] += 1
        for work in step.work:
            place = rank.memory.wrong(work.blocks, work.kv, work.begin, work.replay, work.source)
            if place and not work.bad:
                work.bad = (
                    f"{place} of {work.begin} computed ones of {work.request_id} is not its own"
                )
            sound = not work.bad
            columns = work.target, work.drafts
            rank.memory.write(work.blocks, work.kv, work.begin, work.replay, *columns, sound=sound)
            self._checkpoint(rank, work)

    def _checkpoint(self, rank, work):
        """States that a forward pass leaves besides its last one. The layers of
        :func:`layers_of` leave none."""

    def _sample(self, step):
        """The last stage samples, and accepts drafts that the model would have said itself."""
        for work in step.work:
            if not work.samples:
                step.sampled[work.request_id] = []
                continue
            sequence, known = self._sequences[work.request_id], len(work.tokens) - work.drafts
            given = []
            for place in range(known - 1, len(work.tokens)):
                said = next_token(work.states[place])
                given.append((said + 1) % VOCABULARY if work.bad else said)
                if place + 1 < len(work.tokens) and work.tokens[place + 1] != given[-1]:
                    self.counts["refused drafts"] += 1
                    break
                self.counts["accepted drafts"] += place + 1 < len(work.tokens)
            step.sampled[work.request_id] = given
            if work.life != sequence.life:
                self.counts["tokens of an older life"] += len(given)
                continue
            sequence.tokens += given
            sequence.drafts = self._drafts(sequence)
            self._settle_state(work, sequence, len(given) - 1)

    def _settle_state(self, work, sequence, accepted):
        """As vLLM's workers do when drafts are accepted: the state at the end of a block that they
        have filled is copied to that block. The running one stays where the last of them left
        it."""
        if work.target is None:
            return
        known = len(work.tokens) - work.drafts
        end = (known + accepted) // self.block_tokens * self.block_tokens
        sequence.column = work.target + accepted
        if end >= known and work.drafts:
            source, target = work.target + end - known, end // self.block_tokens - 1
            for rank in self.ranks:
                rank.memory.move_state(work.blocks, source, target)
            self.counts["states of drafts"] += 1
            if target == work.target and end == known + accepted:
                sequence.column = target

    def _drafts(self, sequence):
        """What a draft model proposes: right at random."""
        if not self.cell.drafts:
            return []
        tokens, drafts = list(sequence.tokens), list[int]()
        states = chain(sequence.salt, tokens)
        for _ in range(self.cell.drafts):
            said = next_token(states[-1])
            drafts.append(said if self.draw.random() < 0.6 else self.draw.randrange(VOCABULARY))
            states = chain(sequence.salt, [*tokens, *drafts], states)
        return drafts

    @contextmanager
    def _failing(self, rank):
        """Some loads of this rank fail after they have overwritten their blocks."""
        paged = ours(rank.connector)._worker._paged
        sound: list[Callable[..., Any]] = [one.load for one in paged]

        def load(place, jobs):
            blocks = [block for *_, own in jobs for block in own]
            if self._fails(rank, blocks):
                self.counts["faults"] += 1
                rank.memory.scribble(blocks)
                raise TierError("an injected fault")
            return sound[place](jobs)

        for place, one in enumerate(paged):
            one.load = partial(load, place)
        try:
            yield
        finally:
            for one, its in zip(paged, sound, strict=True):
                one.load = its

    def _fails(self, rank, blocks):
        """Whether a rank cannot load these blocks."""
        return self.draw.random() < self.cell.fails

    def _take_in(self, step):
        """The oldest step's output comes back to the scheduler."""
        self._run_rest(step)
        names = list(step.output.num_scheduled_tokens)
        outputs = [
            ModelRunnerOutput(
                names,
                {name: index for index, name in enumerate(names)},
                [step.sampled[name] for name in names],
                kv_connector_output=result,
            )
            for _, result in sorted(step.results.items())
        ]
        merged = self._aggregator.aggregate(outputs)
        before = {name: self.scheduler.requests.get(name) for name in names}
        lengths = {
            name: request.num_output_tokens
            for name, request in before.items()
            if request is not None
        }
        prompts = dict(getattr(ours(self.scheduler.connector)._scheduler, "_prompts", {}))
        self.scheduler.update_from_output(step.output, merged)
        bad = {work.request_id: work.bad for work in step.work if work.bad}
        for name, length in lengths.items():
            request = before[name]
            if request.num_output_tokens > length:
                self._check(request, bad.get(name, ""))
            if request.status == RequestStatus.FINISHED_ERROR:
                self.counts["refused"] += 1
            elif request.is_finished():
                self.counts["finished"] += 1
                if name in prompts:
                    self._check_last(prompts[name])
                self.conversations.append(list(request.all_token_ids))
        if self.cell.drafts and not self.cell.async_scheduling and names:
            drafted = [name for name in names if name in self._sequences]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(drafted, [list(self._sequences[name].drafts) for name in drafted])
            )

    def _check(self, request, bad):
        """What the user has been given so far is what the model says. What was so before is not
        computed again, as long as it is still there."""
        tokens = list(request.all_token_ids)
        before, states = self._said.get(request.request_id, ([], []))
        if tokens[: len(before)] != before:
            before, states = [], []
        states = chain(request.cache_salt or "", tokens, states)
        self._said[request.request_id] = tokens, states
        for place in range(max(request.num_prompt_tokens, len(before)), len(tokens)):
            if tokens[place] != next_token(states[place - 1]):
                self.violations.append(
                    f"{request.request_id}: answer token {place} is wrong; {bad or 'no bad read'}"
                )
                return

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self, most=4_000):
        """Steps until nothing is asked any more; then nothing may be left anywhere."""
        for _ in range(most):
            if not self.scheduler.has_requests() and not self._in_flight:
                break
            self.step()
        else:
            self.violations.append(f"not idle after {most} steps: {self.live}")
            return
        self.counts["brought by the other"] += sum(
            getattr(one, "brought", 0)
            for rank in self.ranks
            for one in getattr(rank.connector, "_connectors", ())
        )
        self.counts["positions of other ranks"] += sum(
            rank.memory.left_to_others for rank in self.ranks
        )
        half = ours(self.scheduler.connector)._scheduler
        assert isinstance(half.store, Client) == (self.cell.lower == "server")
        if half._pending or half._prompts:
            self.violations.append(
                f"left behind: {len(half._pending)} jobs, {len(half._prompts)} prompts"
            )
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self.cell.blocks - 1:
            self.violations.append(f"{self.cell.blocks - 1 - free} blocks are not free")

    def close(self):
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()
