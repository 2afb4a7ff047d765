"""A worker's half of the connector: copies between slots and blocks. It knows slot numbers, block
ids and, for a load, the request that waits for it. It never knows keys or tokens.

A load goes into blocks of a request that waits. vLLM plans no step over them before every rank has
reported that the load ended. So a load that fails costs its request the time to compute, and
nothing else. Each rank reports it exactly once (:mod:`.ends`), also for a request that was aborted
in the meantime: until then vLLM keeps its blocks.

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
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvtier.connectors.vllm.metadata import Job, PoolAddress, RankLayout, StepMetadata
from kvtier.connectors.vllm.tables import NULL_BLOCK
from kvtier.connectors.vllm.worker_side.ends import JobEnds
from kvtier.connectors.vllm.worker_side.extension import WorkerExtension
from kvtier.connectors.vllm.worker_side.loaded import LoadedModel, hardware
from kvtier.connectors.vllm.worker_side.pools import Pools, UnmappedError
from kvtier.core.errors import StateError
from kvtier.core.pool import Pool
from kvtier.gpu import Copy, PagedBlocks, Pinning, nothing, regions_of
from kvtier.gpu import Job as SlotJob
from kvtier.load_policy.decide import BUSY_COPY_PART, BUSY_COPY_S

logger = logging.getLogger("kvtier.connectors.vllm")

_IDLE_COPY_S = 0.05
"""Longest time of loads' copies in a step that computes nothing: a request that arrives meanwhile
waits for it. :data:`BUSY_COPY_S` is that of a step that computes."""


Placed = tuple[int, SlotJob]
"""Copy, with the index of its group."""


class GroupLayers(NamedTuple):
    """Layers of a cache group, as workers know it."""

    layers: frozenset[str]
    blocks_per_piece: int
    num_blocks: int
    """Blocks of the whole KV cache."""


class _Running(NamedTuple):
    """Job whose copies run on a device and are not confirmed yet."""

    job: Job
    copies: list[Copy]


class _Copying(NamedTuple):
    """Load that the worker's own thread copies."""

    job: Job
    left: deque[Placed]
    block_tokens: float
    """Tokens of the job that one of its blocks stands for."""


class WorkerHalf:
    """One rank's half, once vLLM has registered its KV caches. Only vLLM's worker thread calls it.

    Args:
        groups: those that are kept.
        join: see :class:`~kvtier.connectors.vllm.worker_side.pools.Pools`.

    Raises:
        LayoutError: for tensors that kvtier cannot describe.
    """

    def __init__(
        self,
        rank: int,
        groups: Sequence[GroupLayers],
        kv_caches: Mapping[str, torch.Tensor],
        model: LoadedModel,
        extensions: Sequence[WorkerExtension] = (),
        join: Callable[[PoolAddress], Pool] | None = None,
    ) -> None:
        regions = [regions_of(_of_group(kv_caches, group), group.num_blocks) for group in groups]
        first = next((each[0].rows for each in regions if each), None)
        pinning = Pinning(first.device) if first is not None and first.is_cuda else None
        locked = pinning.cuts if pinning is not None else nothing
        self._paged = [
            PagedBlocks(each, group.blocks_per_piece, locked=locked, sharers=len(regions))
            for each, group in zip(regions, groups, strict=True)
        ]
        """Copier of each group. Blocks of all groups share the same memory, and a block belongs to
        one group."""
        part_bytes = [paged.block_bytes * paged.blocks_per_chunk for paged in self._paged]
        self._pools = Pools(rank, part_bytes, pinning, join)
        self._rank = rank
        self._model, self._extensions = model, extensions
        self.ends = JobEnds()
        """Ended jobs, of which blocks and the report are taken after :meth:`transfers`."""
        self._clock = time.perf_counter
        self._copying: deque[_Copying] = deque()
        self._running: deque[_Running] = deque()
        self._step_began = 0.0
        self._forward_s = 0.0
        """Time of the last forward pass."""
        self._token_s: float | None = None
        """Seconds a token of the last load that a device copied by itself."""
        self._replacements = 0
        self._refuses_loads = self._is_open = False
        self._last: tuple[bool, PoolAddress | None] = False, None
        """Whether the last step had no job that needs a pool, and the pool that it named."""

    def layout(self) -> RankLayout:
        """Return this rank's layout, for vLLM's ``get_handshake_metadata``."""
        told = [paged.describe() for paged in self._paged]
        shape = told[0] if len(told) == 1 else {"groups": told, "device": told[0]["device"]}
        layout = RankLayout(
            tuple(paged.block_bytes for paged in self._paged),
            shape | {"backends": self._model.backends(), "hardware": hardware(shape["device"])},
            model=self._model.resolved(),
            weights=self._model.weights(),
            others=self._model.others(),
        )
        for extension in self._extensions:
            layout = replace(layout, **extension.described())
        return layout

    # ---- one engine step -------------------------------------------------------------------------

    def open(self, metadata: StepMetadata) -> None:
        """Begin a step, at vLLM's ``handle_preemptions``: nothing that writes blocks is queued."""
        self._is_open = True
        self._pools.look()
        self._refuses_loads = self._has_other_weights(metadata)
        if metadata.ended_saves:
            self._begin_saves(metadata.ended_saves, metadata)
        if metadata.may_reuse or metadata.ended_saves:
            self._settle()

    def begin(self, metadata: StepMetadata) -> None:
        """Begin a step before 0.32, at vLLM's ``bind_connector_metadata``, its first hook there."""
        if not self._is_open:
            self.open(metadata)
        self._is_open, self._step_began = False, self._clock()

    def load(self, metadata: StepMetadata) -> None:
        """vLLM's ``start_load_kv``: begin this step's loads, and continue those of earlier steps.
        vLLM calls it after the forward pass (before 0.32: before it)."""
        begun = self._running or self._copying or self._extensions
        is_idle = not (begun or metadata.loads or metadata.saves or metadata.ended_saves)
        if not is_idle or self._last != (True, metadata.pool):
            self._keep_pools(metadata)
            self._last = is_idle, metadata.pool
        self._pools.renew(metadata.renewed)
        self.ends.report.step = metadata.number
        for load in metadata.loads:
            self.ends.expect(load)
        refused = self._refuses_loads
        if refused:
            copying = [one.job for one in self._copying]
            self._copying.clear()
            for job in (*copying, *metadata.loads):
                self.ends.refuse(job)
        else:
            for load in metadata.loads:
                self._begin_load(load)
            if self._copying:
                self._copy_on(metadata.computes)
        for extension in self._extensions:
            self._go_on(extension, metadata, refused=refused)
        for end in metadata.ends:
            self.ends.ended_in_parts(end)

    def _keep_pools(self, metadata: StepMetadata) -> None:
        """Unmap what no job needs, and map what the step names."""
        jobs = (*metadata.loads, *metadata.saves, *(one.job for one in self._running))
        pools = {
            metadata.pool,
            *(job.pool for job in jobs),
            *(one.job.pool for one in self._copying),
        }
        self._pools.keep(pools.union(*(each.pools(metadata) for each in self._extensions)))
        self.ends.report.unmapped = self._pools.map_early(metadata.pool)

    def _begin_load(self, job: Job) -> None:
        try:
            copies = self._copies(job)
            if all(paged.copies_at_once for paged in self._paged):
                self._copying.append(_Copying(job, deque(copies), job.tokens / len(job.blocks)))
                return
            running = self._moved(copies, load=True)
        except UnmappedError:
            self.ends.ended(job, failed=True)
            return
        except Exception:
            logger.exception("rank %d: load of %d blocks failed", self._rank, len(job.blocks))
            self.ends.ended(job, failed=True)
            return
        self._running.append(_Running(job, running))
        # how long this copy takes is known only after its step was reported
        if self._token_s is not None:
            self.ends.report.loaded_tokens += job.tokens
            self.ends.report.load_s += self._token_s * job.tokens

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
                    self.ends.report.loaded_tokens += block_tokens * len(piece[2])
                    now = self._clock()
            except Exception:
                logger.exception("rank %d: load of %d blocks failed", self._rank, len(job.blocks))
                failed = True
            if failed or not left:
                self._copying.popleft()
                self.ends.ended(job, failed=failed)
        self.ends.report.load_s += now - begun

    def _go_on(self, extension: WorkerExtension, metadata: StepMetadata, *, refused: bool) -> None:
        """Let an extension move KV for as long as :meth:`_copy_on` may copy."""
        begun = self._clock()
        until = begun + self._copy_s(metadata.computes)

        def part(pool: PoolAddress, slot: int) -> torch.Tensor:
            return self._pools.of(pool).part(slot, 0)

        ends = extension.step(metadata, part, lambda: self._clock() < until, refused=refused)
        for end in ends:
            self.ends.told(end)
        # Counted with saves, because the time of loads makes estimates of plain loads.
        self.ends.report.save_s += self._clock() - begun

    def _copy_s(self, computes: bool) -> float:
        return max(BUSY_COPY_S, BUSY_COPY_PART * self._forward_s) if computes else _IDLE_COPY_S

    def _has_other_weights(self, metadata: StepMetadata) -> bool:
        works = any(extension.has_work(metadata) for extension in self._extensions)
        moves = metadata.loads or metadata.saves or metadata.ended_saves
        looks = bool(moves or self._copying or works)
        if not self._model.replaced(looks=looks):
            return False
        self._replacements += 1
        self.ends.report.replacements[self._rank] = self._replacements
        return True

    def save(self, metadata: StepMetadata) -> None:
        """Begin this step's saves, at vLLM's ``wait_for_save``, after the forward pass. Later work
        may overwrite blocks, but those of requests that keep them, as the metadata says."""
        self._confirm()
        begun = self._clock()
        if metadata.computes:
            copied_s = self.ends.report.load_s + self.ends.report.save_s
            self._forward_s = max(0.0, begun - self._step_began - copied_s)
        self._begin_saves(metadata.saves, metadata)
        if not metadata.reads_on:
            self._settle()
        self.ends.report.save_s += self._clock() - begun

    def _begin_saves(self, jobs: Sequence[Job], metadata: StepMetadata) -> None:
        refused = metadata.replacements_seen[self._rank] < self._replacements
        for job in jobs:
            if refused:
                self.ends.ended(job, failed=True)
                continue
            try:
                mapped = self._pools.of(job.pool)
                own = [copy for copy in self._copies(job) if mapped.writes[copy[0]]]
                for place, slots, _, _ in job.moves if own else ():
                    mapped.clear_behind(slots, place)
                if own:
                    self._running.append(_Running(job, self._moved(own, load=False)))
                else:
                    self.ends.ended(job, failed=False)
            except UnmappedError:
                self.ends.ended(job, failed=True)
            except Exception:
                logger.exception("rank %d: save of %d blocks failed", self._rank, len(job.blocks))
                self.ends.ended(job, failed=True)

    def transfers(self) -> tuple[set[str], set[str]]:
        """Return, for vLLM's ``get_transfer_results``, requests whose load has ended since the last
        call, and those of them whose load failed."""
        self._confirm()
        return self.ends.take_transfers()

    def close(self) -> None:
        """Wait for the copies that run, then unmap."""
        while self._running:
            try:
                for copy in self._running.popleft().copies:
                    copy.wait()
            except Exception:
                logger.exception("rank %d: a copy failed", self._rank)
        self._copying.clear()
        for extension in self._extensions:
            extension.close()
        self._pools.close()

    # ---- steps -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        for paged in self._paged:
            paged.settle()

    def _confirm(self) -> None:
        """Confirm copies that are done, in the order in which they were begun."""
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
            self.ends.ended(job, failed=failed)

    def _moved(self, copies: Sequence[Placed], *, load: bool) -> list[Copy]:
        parts = []
        for place, paged in enumerate(self._paged):
            own = [copy for where, copy in copies if where == place]
            if own:
                parts.append(paged.load(own) if load else paged.save(own))
        return parts

    def _copies(self, job: Job) -> list[Placed]:
        """Return a job as (slot part, first block in the piece, block ids), one for each piece.
        Raises StateError for the null block, which stands for tokens that a group does not have."""
        mapped = self._pools.of(job.pool)
        copies = list[Placed]()
        for place, slots, blocks, at in job.moves:
            if NULL_BLOCK in blocks:
                raise StateError(f"group {place}: a copy of the null block, which holds no KV")
            most = self._paged[place].blocks_per_chunk
            for slot, begin in zip(slots, range(-at, len(blocks), most), strict=True):
                ids = blocks[max(0, begin) : begin + most]
                copies.append((place, (mapped.part(slot, place), max(0, -begin), ids)))
        return copies


def _of_group(kv_caches: Mapping[str, Any], group: GroupLayers) -> dict[str, torch.Tensor]:
    """Return the tensors of a group. Those of groups that are not kept lie over them and are left
    out. A recurrent layer has several, each with one row a block."""
    found = dict[str, torch.Tensor]()
    for layer, cache in kv_caches.items():
        if layer not in group.layers:
            continue
        if isinstance(cache, list | tuple):
            found |= {f"{layer}.{index}": tensor for index, tensor in enumerate(cache)}
        else:
            found[layer] = cache
    return found
