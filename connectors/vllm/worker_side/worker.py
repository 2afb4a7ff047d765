"""A worker's half of the connector: copies between slots and blocks. It knows slot numbers, block
ids and, for a load, the request that waits for it. It never knows keys or tokens.

A load goes into blocks of a request that waits. vLLM plans no step over them before every rank has
reported that the load ended. So a load that fails costs its request the time to compute, and
nothing else. Each rank reports it exactly once (:meth:`WorkerHalf.transfers`), also for a request
that was aborted in the meantime: until then vLLM keeps its blocks. Of a load in parts
(:mod:`kvtier.connectors.vllm.scheduler_side.early`) vLLM is told its end, and of no part.

*On a CPU* the worker's own thread copies, after the forward pass, chunk by chunk. Copies make a
step that computes longer by at most 5 ms or a twentieth of its forward pass. The rest of a load
waits for the next step. A step that computes nothing copies for up to 50 ms. Only a
request that arrives meanwhile waits for it.

*On a GPU* copies run while the step and the following steps run. They are ordered against the
forward pass on the device (:mod:`kvtier.gpu.staged`). The first step that finds a job's copy done
confirms the job. vLLM goes on with steps until all jobs are confirmed (``has_pending_push_work``),
without tokens if there are none to compute. So a chunk is READY one step after its DMA, even when
no further request comes. The host waits nowhere.

*Replaced weights.* What a step computes belongs to the weights that it found. The worker checks
them at the beginning of every step that has chunks to move. When they have changed, the loads fail,
and nothing is saved until the scheduler's metadata shows that it knows (``replacements_seen``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvtier.client.attachment import SharedPool
from kvtier.connectors.vllm.metadata import (
    Job,
    LoadEnd,
    Parts,
    PoolAddress,
    RankLayout,
    SpanJob,
    SpanPass,
    StepMetadata,
    StepReport,
)
from kvtier.connectors.vllm.tables import NULL_BLOCK
from kvtier.connectors.vllm.worker_side.loaded import LoadedModel, hardware
from kvtier.connectors.vllm.worker_side.span_mover import SpanMover
from kvtier.core.errors import KVTierError, LayoutError, StateError, TierError
from kvtier.core.pool import Pool
from kvtier.gpu import Copy, PagedBlocks, Pinning, nothing, regions_of, slot_tensor
from kvtier.gpu import Job as SlotJob
from kvtier.load_policy.decide import BUSY_COPY_PART, BUSY_COPY_S

logger = logging.getLogger("kvtier.connectors.vllm")

_IDLE_COPY_S = 0.05
"""The longest time by which copies of loads make a step longer that computes nothing: a request
that arrives meanwhile waits for it. Of one that computes: :data:`BUSY_COPY_S`."""


Placed = tuple[int, SlotJob]
"""A copy, with the index of its group."""


class GroupLayers(NamedTuple):
    """A cache group as workers know it."""

    layers: frozenset[str]
    blocks_per_piece: int


class _Running(NamedTuple):
    """A job whose copies run on a device and are not confirmed yet. It ends with the last of
    them."""

    job: Job
    copies: list[Copy]


class _Copying(NamedTuple):
    """A load that the worker's own thread copies."""

    job: Job
    left: deque[Placed]
    block_tokens: float
    """How many of the job's tokens one of its blocks stands for."""


@dataclass(slots=True)
class _LoadInParts:
    """A load in parts."""

    under_way: int = 0
    """Parts that have begun and not ended."""
    lacking: set[int] = field(default_factory=set)
    """Blocks that may not be kept."""
    end: LoadEnd | None = None


class WorkerHalf:
    """One rank. Only vLLM's worker thread calls it."""

    def __init__(
        self,
        rank: int,
        num_blocks: int,
        groups: Sequence[GroupLayers],
        model: Callable[[], LoadedModel],
        make_mover: Callable[[Mapping[str, torch.Tensor]], SpanMover] | None = None,
        join: Callable[[PoolAddress], Pool] | None = None,
    ) -> None:
        """``groups``: the groups that are kept. ``model``: returns the loaded model, once the KV
        caches are registered. ``join``: maps a pool that the server on this host lends to an engine
        whose scheduler is on another one."""
        self._rank = rank
        self._find_model = model
        self._model: LoadedModel | None = None
        self._make_mover = make_mover
        self._join = join
        self._mover: SpanMover | None = None
        self._why_no_spans = "off"
        self._num_blocks = num_blocks
        self._groups = groups
        self._clock = time.perf_counter
        self._paged: list[PagedBlocks] = []
        """One for each group. Blocks of all groups share the same memory, and a block belongs to
        one group."""
        self._pinning: Pinning | None = None
        self._pools: dict[PoolAddress, _MappedPool] = {}
        self._unmapped: dict[PoolAddress, _UnmappedError] = {}
        """Pools that cannot be mapped. To try one again could wait again."""
        self._told: PoolAddress | None = None
        """The last pool that was mapped early, or that could not be."""
        self._copying: deque[_Copying] = deque()
        self._running: deque[_Running] = deque()
        self._step_began = 0.0
        self._forward_s = 0.0
        """The time of the last step that computed."""
        self._token_s: float | None = None
        """Seconds a token of the last load that a device copied by itself."""
        self._replacements = 0
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._left: set[int] = set()
        self._in_parts = dict[int, _LoadInParts]()
        """By the number of the load."""
        self._report = StepReport()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's ``register_kv_caches``. Raises LayoutError for tensors that kvtier cannot
        describe."""
        regions = [
            regions_of(_of_group(kv_caches, group), self._num_blocks) for group in self._groups
        ]
        first = next((each[0].rows for each in regions if each), None)
        if first is not None and first.is_cuda:
            self._pinning = Pinning(first.device)
        locked = self._pinning.cuts if self._pinning is not None else nothing
        self._paged = [
            PagedBlocks(each, group.blocks_per_piece, locked=locked, sharers=len(regions))
            for each, group in zip(regions, self._groups, strict=True)
        ]
        self._model = self._find_model()
        if self._make_mover is not None:
            try:
                self._mover, self._why_no_spans = self._make_mover(kv_caches), ""
            except LayoutError as error:
                self._why_no_spans = str(error)

    def layout(self) -> RankLayout | None:
        """vLLM's ``get_handshake_metadata``."""
        if not self._paged or self._model is None:
            return None
        told = [paged.describe() for paged in self._paged]
        shape = told[0] if len(told) == 1 else {"groups": told, "device": told[0]["device"]}
        return RankLayout(
            tuple(paged.block_bytes for paged in self._paged),
            shape | {"backends": self._model.backends(), "hardware": hardware(shape["device"])},
            model=self._model.resolved(),
            weights=self._model.weights(),
            others=self._model.others(),
            why_no_spans=self._why_no_spans,
            why_not_in_place=self._mover.why_not_in_place if self._mover is not None else "off",
        )

    # ---- one engine step -------------------------------------------------------------------------

    def begin(self, metadata: StepMetadata) -> None:
        """vLLM's ``bind_connector_metadata``: a step begins, and has queued nothing that writes
        into blocks."""
        self._step_began = self._clock()
        if metadata.may_reuse:
            self._settle()
        if self._pinning is not None:
            self._pinning.look()

    def load(self, metadata: StepMetadata) -> None:
        """vLLM's ``start_load_kv``: begin this step's loads, and continue those of earlier steps.
        vLLM calls it after the forward pass (before 0.32: before it)."""
        pools = {job.pool for job in (*metadata.loads, *metadata.saves)}
        self._let_go({metadata.pool} | pools | {job.pool for job in metadata.spans})
        self._report.step = metadata.number
        for address, slots in metadata.renewed.items():
            if address in self._pools:
                self._pools[address].renew(slots)
        self._map_early(metadata.pool)
        for load in metadata.loads:
            self._expect(load)
        if self._has_other_weights(metadata):
            self._refuse(metadata)
        else:
            for load in metadata.loads:
                self._begin_load(load)
            for span in metadata.spans:
                assert self._mover is not None, "spans are asked of who said that it has none"
                self._mover.begin(span)
            self._copy_on(metadata.computes)
            self._move_on(metadata.computes)
        for order in metadata.passes:
            self._compute(order)  # also with other weights, so that no rank waits for this one
        for end in metadata.ends:
            self._ended_in_parts(end)

    def _expect(self, job: Job) -> None:
        """A part of a load is under way until it has ended."""
        if job.part_of is not None:
            load = self._in_parts.setdefault(job.part_of, _LoadInParts())
            load.under_way, load.end = load.under_way + 1, job.end

    def _refuse(self, metadata: StepMetadata) -> None:
        """Nothing is loaded that other weights have computed."""
        copying = [one.job for one in self._copying]
        moving = self._mover.give_up() if self._mover is not None else ()
        self._copying.clear()
        for job in (*copying, *metadata.loads):
            if job.end is not None:
                self._in_parts[job.end.number].lacking.update(job.end.blocks)
            self._ended(job, failed=True)
        for span in (*metadata.spans, *moving):
            self._ended(span, failed=True)

    def _begin_load(self, job: Job) -> None:
        try:
            copies = self._copies(job)
            if all(paged.copies_at_once for paged in self._paged):
                self._copying.append(_Copying(job, deque(copies), job.tokens / len(job.blocks)))
                return
            running = self._moved(copies, load=True)
        except _UnmappedError:
            self._ended(job, failed=True)
            return
        except Exception:
            logger.exception("rank %d: load of %d blocks failed", self._rank, len(job.blocks))
            self._ended(job, failed=True)
            return
        self._running.append(_Running(job, running))
        # how long this copy takes is known only after its step was reported
        if self._token_s is not None:
            self._report.loaded_tokens += job.tokens
            self._report.load_s += self._token_s * job.tokens

    def _copy_on(self, computes: bool) -> None:
        """Copy chunks until all loads are done, or the time of this step is up."""
        begun = now = self._clock()
        until = begun + self._copy_s(computes)
        while self._copying and now < until:
            job, left, block_tokens = self._copying[0]
            failed = False
            try:
                while left and now < until:
                    place, piece = left.popleft()
                    self._paged[place].load([piece])
                    self._report.loaded_tokens += block_tokens * len(piece[2])
                    now = self._clock()
            except Exception:
                logger.exception("rank %d: load of %d blocks failed", self._rank, len(job.blocks))
                failed = True
            if failed or not left:
                self._copying.popleft()
                self._ended(job, failed=failed)
        self._report.load_s += now - begun

    def _move_on(self, computes: bool) -> None:
        """Move tokens of spans, in pieces of a slot, for as long as :meth:`_copy_on` may copy."""
        if self._mover is None or not self._mover.jobs:
            return
        begun = self._clock()
        until = begun + self._copy_s(computes)

        def part(job: SpanJob, slot: int) -> torch.Tensor:
            return self._mapped(job.pool).part(slot, 0)

        for job, failed in self._mover.go_on(part, lambda: self._clock() < until):
            self._ended(job, failed=failed)
        # Not as a load's time, because estimates of plain loads are made of those.
        self._report.save_s += self._clock() - begun

    def _compute(self, order: SpanPass) -> None:
        """Compute tokens in place, after which a load has ended."""
        assert self._mover is not None, "tokens were copied for this"
        begun, failed = self._clock(), False
        try:
            self._mover.compute(order)
        except Exception:
            logger.exception("rank %d: tokens could not be computed in place", self._rank)
            failed = True
        self._ended(order, failed=failed)
        self._report.save_s += self._clock() - begun

    def _copy_s(self, computes: bool) -> float:
        """How long loads may be copied in this step."""
        return max(BUSY_COPY_S, BUSY_COPY_PART * self._forward_s) if computes else _IDLE_COPY_S

    def _has_other_weights(self, metadata: StepMetadata) -> bool:
        """Whether the weights were replaced since the last check. It is asked before anything is
        loaded."""
        moves = bool(metadata.spans or metadata.passes or (self._mover and self._mover.jobs))
        looks = bool(metadata.loads or metadata.saves or self._copying or moves)
        if self._model is None or not self._model.replaced(looks=looks):
            return False
        self._replacements += 1
        self._report.replacements[self._rank] = self._replacements
        return True

    def save(self, metadata: StepMetadata) -> None:
        """vLLM's ``wait_for_save``, after the forward pass. What the engine queues after it may
        overwrite blocks, but those of requests that keep them, as the metadata says."""
        self._confirm()
        begun = self._clock()
        if metadata.computes:
            copied_s = self._report.load_s + self._report.save_s
            self._forward_s = max(0.0, begun - self._step_began - copied_s)
        refused = metadata.replacements_seen[self._rank] < self._replacements
        for job in metadata.saves:
            if refused:
                self._ended(job, failed=True)
                continue
            try:
                own = [copy for copy in self._copies(job) if self._mapped(job.pool).writes[copy[0]]]
                for place, slots, _, _ in job.moves if own else ():
                    self._mapped(job.pool).clear_behind(slots, place)
                if own:
                    self._running.append(_Running(job, self._moved(own, load=False)))
                else:
                    self._ended(job, failed=False)
            except _UnmappedError:
                self._ended(job, failed=True)
            except Exception:
                logger.exception("rank %d: save of %d blocks failed", self._rank, len(job.blocks))
                self._ended(job, failed=True)
        if not metadata.reads_on:
            self._settle()
        self._report.save_s += self._clock() - begun

    def transfers(self) -> tuple[set[str], set[str]]:
        """vLLM's ``get_transfer_results``: requests whose load has ended since the last call, and
        those of them whose load failed."""
        self._confirm()
        ended = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return ended

    def bad_blocks(self) -> set[int]:
        """vLLM's ``get_block_ids_with_load_errors``, where :meth:`transfers` cannot say which loads
        failed. It returns the blocks of the loads that failed since the last call. Called after
        :meth:`transfers`."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def left_blocks(self) -> set[int]:
        """vLLM's ``get_block_ids_with_load_errors``: blocks that loads in parts have left to be
        computed since the last call."""
        left, self._left = self._left, set()
        return left

    def report(self) -> StepReport:
        """vLLM's ``build_connector_worker_meta``: that this step has ended, and which jobs have
        ended since the last one."""
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """Wait for the copies that run, then unmap."""
        while self._running:
            try:
                for copy in self._running.popleft().copies:
                    copy.wait()
            except Exception:
                logger.exception("rank %d: a copy failed", self._rank)
        self._copying.clear()
        if self._mover is not None:
            self._mover.give_up()
        self._let_go(set())
        if self._pinning is not None:
            self._pinning.close()

    # ---- steps -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        for paged in self._paged:
            paged.settle()

    def _confirm(self) -> None:
        """Count the copies that are done, in the order in which they were begun."""
        while self._running:
            job, copies = self._running[0]
            failed = False
            try:
                through = [copy.done() for copy in copies]
                if not all(through):
                    return
            except Exception:
                logger.exception(
                    "rank %d: copy of %d blocks failed on the device", self._rank, len(job.blocks)
                )
                failed = True
            seconds = [copy.seconds for copy in copies if copy.seconds is not None]
            if seconds and not failed:  # the copies share the device
                self._token_s = sum(seconds) / max(1, job.tokens)
            self._running.popleft()
            self._ended(job, failed=failed)

    def _ended(self, job: Job | SpanJob | SpanPass, *, failed: bool) -> None:
        """A job has ended: the store gets its slots back, and vLLM is told once of a load. A span
        job that goes on has ended after its pass."""
        (self._report.failed if failed else self._report.done)[job.number] += 1
        if isinstance(job, Job) and job.part_of is not None:
            load = self._in_parts[job.part_of]
            load.under_way -= 1
            if failed:
                load.lacking.update(job.blocks)
            if load.end is not None and not load.under_way:
                self._ended_in_parts(load.end)
            return
        if job.request_id is None or (isinstance(job, SpanJob) and job.goes_on):
            return
        self._finished.add(job.request_id)
        if failed:
            self._failed.add(job.request_id)
            self._bad_blocks.update(job.blocks)

    def _ended_in_parts(self, end: LoadEnd) -> None:
        self._report.done[end.number] += 1
        self._finished.add(end.request_id)
        self._left.update(end.blocks[end.kept :])
        self._left |= self._in_parts.pop(end.number, _LoadInParts()).lacking

    def _moved(self, copies: Sequence[Placed], *, load: bool) -> list[Copy]:
        """Begin the copies of a job."""
        parts = []
        for place, paged in enumerate(self._paged):
            own = [copy for where, copy in copies if where == place]
            if own:
                parts.append(paged.load(own) if load else paged.save(own))
        return parts

    def _mapped(self, address: PoolAddress) -> _MappedPool:
        """Map a pool at its first job, unless it is mapped."""
        if address not in self._pools:
            pool = self._joined(address) if address.ticket else _attached(address)
            part_bytes = [paged.block_bytes * paged.blocks_per_chunk for paged in self._paged]
            self._pools[address] = _MappedPool(pool, address, self._rank, part_bytes, self._pinning)
        return self._pools[address]

    def _joined(self, address: PoolAddress) -> Pool:
        """Map a pool of another host's scheduler. Raises _UnmappedError, and logs why the first
        time."""
        assert self._join is not None, "such a pool is named where there are several hosts"
        if address in self._unmapped:
            raise self._unmapped[address]
        try:
            return self._join(address)
        except KVTierError as error:
            logger.warning("rank %d: %s; misses until there is another pool", self._rank, error)
            self._unmapped[address] = _UnmappedError(str(error))
            raise self._unmapped[address] from error

    def _map_early(self, address: PoolAddress | None) -> None:
        """Map the engine's own pool in the first step. What prevents that (another host, or other
        process ids) prevents it for ever, so the scheduler's half is told at once. A server's pool
        may only be away for a time.

        On a GPU a server's pool is also mapped when a step first names it, because it takes a while
        to lock its pages. Workers hear of a pool no earlier than that: vLLM's handshake tells them
        nothing. The scheduler's half asks for that step when the handshake has ended. By then vLLM
        has captured its graphs.
        """
        if address is None or address in self._pools or address == self._told:
            return
        own = not address.is_lent
        if not own and self._pinning is None:
            return
        self._told = address
        try:
            self._mapped(address)
        except KVTierError as error:
            if own:
                self._report.unmapped = f"rank {self._rank}: {error}"

    def _let_go(self, needed: set[PoolAddress | None]) -> None:
        """Unmap the pools that no job needs any more, because a server waits for that."""
        needed |= {one.job.pool for one in self._running} | {one.job.pool for one in self._copying}
        needed |= {job.pool for job in self._mover.jobs} if self._mover is not None else set()
        for address in self._pools.keys() - needed:
            self._pools.pop(address).close()
        if self._unmapped:
            self._unmapped = {one: why for one, why in self._unmapped.items() if one in needed}

    def _copies(self, job: Job) -> list[Placed]:
        """Cut a job into (slot part, first block in the piece, block ids), one for each piece.
        Raises StateError for the null block, which stands for tokens that a group does not have."""
        mapped = self._mapped(job.pool)
        copies = list[Placed]()
        for place, slots, blocks, at in job.moves:
            if NULL_BLOCK in blocks:
                raise StateError(f"group {place}: a copy of the null block, which holds no KV")
            taken, most = -at, self._paged[place].blocks_per_chunk
            for slot in slots:
                first, ids = max(0, -taken), blocks[max(0, taken) : taken + most]
                copies.append((place, (mapped.part(slot, place), first, ids)))
                taken += most
        return copies


def _of_group(kv_caches: Mapping[str, Any], group: GroupLayers) -> dict[str, torch.Tensor]:
    """A group's tensors. Those of groups that are not kept lie over them and are left out here. A
    recurrent layer has several, each with one row a block."""
    found = dict[str, torch.Tensor]()
    for layer, cache in kv_caches.items():
        if layer not in group.layers:
            continue
        if isinstance(cache, list | tuple):
            found |= {f"{layer}.{index}": tensor for index, tensor in enumerate(cache)}
        else:
            found[layer] = cache
    return found


class _UnmappedError(TierError):
    """A pool cannot be mapped. It was logged."""


def _attached(address: PoolAddress) -> Pool:
    """The pool of an engine on this host. Raises TierError when it cannot be mapped (any more)."""
    if address.witness_path is None:
        return Pool.attach(address.path, address.slots, address.slot_bytes)
    pool = SharedPool.join(address.path, address.witness_path, address.slots, address.slot_bytes)
    if pool.inode != address.inode:
        pool.close()
        raise TierError(f"the pool at {address.path} is another one: its server was lost meanwhile")
    return pool


def is_followed(parts: Parts, rank: int, place: int) -> bool:
    """Whether another rank writes behind this one's part of a slot, or this one writes none. Each
    host's first rank begins at 0."""
    start, writes = parts[rank][place]
    after = next((begin for begin, also in (row[place] for row in parts[rank + 1 :]) if also), 0)
    return not writes or after > start


class _MappedPool:
    """One pool as one rank maps it.

    The pool's owner makes its pages present, not the worker, because a worker shares its cores with
    the model. Here the pages are mapped: by the driver that page-locks them, or for each slot at
    its first use.
    """

    def __init__(
        self,
        pool: Pool,
        address: PoolAddress,
        rank: int,
        part_bytes: Sequence[int],
        pinning: Pinning | None,
    ) -> None:
        """``part_bytes``: bytes of this rank's part of a piece, by group."""
        self.pool = pool
        self.writes = [writes for _, writes in address.parts[rank]]
        self._spans = [
            (start, start + size)
            for (start, _), size in zip(address.parts[rank], part_bytes, strict=True)
        ]
        self._span = min(start for start, _ in self._spans), max(end for _, end in self._spans)
        self._behind = [
            None if is_followed(address.parts, rank, place) else slice(end, address.slot_bytes)
            for place, (_, end) in enumerate(self._spans)
        ]
        """Of each group: what no rank writes of a slot. The last rank that writes clears it."""
        self._parts = [slot_tensor(self.pool.view(slot)) for slot in range(address.slots)]
        self._untouched = set(range(address.slots) if pinning is None else ())
        self._pinning = pinning
        if pinning is not None:
            is_lent = address.is_lent
            pinning.begin(self.pool.buffer, address.slot_bytes, self._span, is_lent=is_lent)

    def part(self, slot: int, place: int) -> torch.Tensor:
        """This rank's part of a slot that holds a piece of this group."""
        if slot in self._untouched:
            self._untouched.remove(slot)
            self.pool.touch(slot, *self._span)
        return self._parts[slot][slice(*self._spans[place])]

    def clear_behind(self, slots: Sequence[int], place: int) -> None:
        """Pieces of this group are saved in these slots. Other tenants' bytes that lay there before
        must not become part of them."""
        behind = self._behind[place]
        if behind is not None and behind.start < behind.stop:
            for slot in slots:
                self._parts[slot].numpy()[behind] = 0

    def renew(self, slots: Sequence[int]) -> None:
        """The server gave back the memory of these slots and has other memory for them now."""
        if self._pinning is not None:
            for slot in slots:
                self._pinning.renew(self._parts[slot][slice(*self._span)])

    def close(self) -> None:
        """Unmap the pool. No copy from it or to it may be running."""
        self._parts.clear()
        if self._pinning is not None:
            self._pinning.end(self.pool.buffer)
        self.pool.close()
