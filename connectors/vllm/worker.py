"""A worker's half: slots <-> blocks. Knows slot numbers and block ids; never keys, tokens or requests.

Copies on a GPU go on while the step and its followers run: they are ordered against the forward pass on the device
(:mod:`kvtier.gpu.staged`), and a job is confirmed by the first step that finds its copy through. vLLM keeps on taking
steps, without tokens if there are none to compute, until all jobs are confirmed (``has_pending_push_work``), so a chunk
is READY a step after its DMA also when nobody asks anything more; the host waits nowhere.

Poison rule: when a load fails, the forward pass of that step runs over garbage, and so may steps that were planned
before the scheduler heard of it. From the failure until the scheduler's metadata shows that it knows
(``failures_seen``), nothing is saved. The same holds when the model's weights turn out to be others than before, which
is looked for at the beginning of every step that has chunks to move. So no KV computed from garbage can get under a
valid key. Whatever the host can see
to be wrong with a load is known before the forward pass begins. A load that fails on the device after that is found
when its copy is confirmed, and confirming goes in the order of beginning: saves begun after it fail with it. (On CUDA
the forward pass itself then gives no result: the device's errors are sticky.)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch

from kvtier.client.attachment import SharedPool
from kvtier.connectors.vllm.layerwise import Ahead, Flowing, ahead_ends
from kvtier.connectors.vllm.metadata import Job, PoolAddress, RankLayout, StepMetadata, StepReport
from kvtier.core.errors import TierError
from kvtier.core.pool import Pool
from kvtier.gpu import Copy, PagedBlocks, Pinning, regions_of, slot_tensor
from kvtier.gpu import Job as SlotJob

logger = logging.getLogger("kvtier.connectors.vllm")


class _UnderWay(NamedTuple):
    """A job whose copy was begun and is not confirmed."""

    job: Job
    copy: Copy
    is_load: bool
    sound: bool = True
    """False for a save of what may have been computed from garbage."""


class Loaded(Protocol):
    """See :class:`kvtier.connectors.vllm.loaded.LoadedModel`."""

    def backends(self) -> list[str]: ...
    def resolved(self) -> dict[str, str] | None: ...
    def weights(self) -> str | None: ...
    def replaced(self, *, looks: bool) -> bool: ...


class WorkerHalf:
    """One rank. Called by vLLM's worker thread only."""

    def __init__(self, rank: int, num_blocks: int, blocks_per_chunk: int, model: Callable[[], Loaded]) -> None:
        """``model``: the loaded model, once the KV caches are registered."""
        self._rank = rank
        self._find_model = model
        self._model: Loaded | None = None
        self._num_blocks = num_blocks
        self._blocks_per_chunk = blocks_per_chunk
        self._paged: PagedBlocks | None = None
        self._pinning: Pinning | None = None
        self._pools: dict[PoolAddress, _MappedPool] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._flowing: list[Flowing] = []
        self._ahead: list[Ahead] = []
        """This step's."""
        self._ends: tuple[int, ...] = ()
        """Where loads that run ahead of the forward pass are cut; none do without."""
        self._region_ends: dict[str, int] = {}
        self._block_s: float | None = None
        """Seconds a block of the last load that ran on the device by itself."""
        self._failures = 0
        self._bad_blocks: set[int] = set()
        self._report = StepReport()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's ``register_kv_caches``. Raises LayoutError for tensors kvtier cannot describe."""
        regions = regions_of(kv_caches, self._num_blocks)
        if regions and regions[0].rows.is_cuda:
            self._pinning = Pinning(regions[0].rows.device)
            self._paged = PagedBlocks(regions, self._blocks_per_chunk, pinned=self._pinning.covers)
        else:
            self._paged = PagedBlocks(regions, self._blocks_per_chunk)
        self._region_ends, self._ends = self._paged.region_ends(), ahead_ends(self._paged)
        self._model = self._find_model()

    def layout(self) -> RankLayout | None:
        """vLLM's ``get_handshake_metadata``."""
        if self._paged is None or self._model is None:
            return None
        shape = self._paged.describe() | {"backends": self._model.backends()}
        return RankLayout(
            self._paged.block_bytes,
            shape,
            self._paged.loads_regions,
            model=self._model.resolved(),
            weights=self._model.weights(),
        )

    def load(self, metadata: StepMetadata, *, layered: bool = False) -> None:
        """vLLM's ``start_load_kv``: before the forward pass of the step that needs the blocks. ``layered``: that pass
        will call :meth:`layer`, so it may begin before all is there."""
        self._let_go({metadata.pool, *(job.pool for job in (*metadata.loads, *metadata.saves))})
        self._report.step = metadata.number
        if self._has_other_weights(metadata):
            for job in metadata.loads:
                self._load_failed(job)
            return
        for job in metadata.loads:
            try:
                copies, begun = self._copies(job), time.perf_counter()
                if job.flow is not None:
                    self._flowing.append(Flowing(job, job.flow, self._mapped(job.pool).pool, self._blocks(), copies))
                    continue
                copy = self._begin(job, copies, layered)
                self._count_load(len(job.blocks), time.perf_counter() - begun if copy.done() else None)
                self._under_way.append(_UnderWay(job, copy, is_load=True))
            except Exception:
                logger.exception("rank %d: load of %d blocks failed", self._rank, len(job.blocks))
                self._load_failed(job)

    def _has_other_weights(self, metadata: StepMetadata) -> bool:
        """Whether the weights were replaced since the last look. It comes before anything is loaded, and whatever the
        scheduler plans before it knows of it is refused, as after a failed load."""
        if self._model is None or not self._model.replaced(looks=bool(metadata.loads or metadata.saves)):
            return False
        self._report.replaced = True
        self._failed_once()
        return True

    def _begin(self, job: Job, copies: list[SlotJob], layered: bool) -> Copy:
        if not (layered and self._ends):
            return self._blocks().load(copies)
        copy = self._blocks().load_ahead(copies, self._ends)
        self._ahead.append(Ahead(job, copy))
        return copy

    def layer(self, name: str) -> None:
        """vLLM's ``wait_for_layer_load``: before this layer reads its KV."""
        regions = self._region_ends.get(name, max(self._region_ends.values()))
        for ahead in self._ahead:
            ahead.advance(regions)
        for flowing in list(self._flowing):
            self._go_on(flowing, partial(Flowing.advance, regions=regions))

    def forward_ended(self) -> None:
        """vLLM's ``finish_forward``, or the first call after it: what the forward pass computed with counts only if all
        of it was right, and whatever comes next finds all of it in the blocks."""
        self._confirm_flows()
        ahead, self._ahead = self._ahead, []
        for one in ahead:
            try:
                one.confirm(max(self._region_ends.values()))
            except TierError:
                logger.exception("rank %d: loads wait for all layers from now on", self._rank)
                self._ends = ()
                self._under_way = deque(other for other in self._under_way if other.copy is not one.copy)
                self._load_failed(one.job)

    def _go_on(self, flowing: Flowing, step: Callable[[Flowing], None]) -> bool:
        try:
            step(flowing)
        except TierError as error:
            logger.warning("rank %d: load of %d blocks was given up: %s", self._rank, len(flowing.job.blocks), error)
        except Exception:
            logger.exception("rank %d: load of %d blocks failed", self._rank, len(flowing.job.blocks))
        else:
            return True
        self._flowing.remove(flowing)
        self._count_flow(flowing)
        self._load_failed(flowing.job)
        return False

    def _confirm_flows(self) -> None:
        for flowing in list(self._flowing):
            if self._go_on(flowing, Flowing.confirm):
                self._flowing.remove(flowing)
                self._count_flow(flowing)
                self._report.loaded_blocks += len(flowing.job.blocks)
                self._report.done[flowing.job.number] += 1

    def _count_flow(self, flowing: Flowing) -> None:
        self._report.load_s += flowing.copied_s
        self._report.waited_s += flowing.waited_s

    def save(self, metadata: StepMetadata) -> None:
        """vLLM's ``wait_for_save``: after the forward pass; returns when the engine may go on and overwrite blocks."""
        self.forward_ended()
        self._confirm()
        poisoned = metadata.failures_seen.get(self._rank, 0) < self._failures
        begun = time.perf_counter()
        for job in metadata.saves:
            if poisoned:
                self._report.failed[job.number] += 1
                continue
            try:
                if self._mapped(job.pool).writes:
                    self._under_way.append(_UnderWay(job, self._blocks().save(self._copies(job)), is_load=False))
                else:
                    self._report.done[job.number] += 1
            except Exception:
                logger.exception("rank %d: save of %d blocks failed", self._rank, len(job.blocks))
                self._report.failed[job.number] += 1
        self._report.save_s += time.perf_counter() - begun

    def bad_blocks(self) -> set[int]:
        """vLLM's ``get_block_ids_with_load_errors``: blocks of this step whose load failed. With a draft model it is
        called before ``wait_for_save``, and all has to be known here."""
        self.forward_ended()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> StepReport:
        """vLLM's ``build_connector_worker_meta``: which jobs have ended since the last step, and that this one has."""
        self._confirm()
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """Wait for copies under way, then unmap."""
        while self._under_way:
            try:
                self._under_way.popleft().copy.wait()
            except Exception:
                logger.exception("rank %d: a copy failed", self._rank)
        self._let_go(set())
        if self._pinning is not None:
            self._pinning.close()

    def _confirm(self) -> None:
        """Count the copies that are through, in the order in which they were begun."""
        while self._under_way:
            job, copy, is_load, sound = self._under_way[0]
            try:
                if not copy.done():
                    return
            except Exception:
                logger.exception("rank %d: copy of %d blocks failed on the device", self._rank, len(job.blocks))
                self._under_way.popleft()
                self._ended_badly(job, is_load)
                continue
            self._under_way.popleft()
            if copy.seconds is not None:
                self._block_s = copy.seconds / len(job.blocks)
            (self._report.done if sound else self._report.failed)[job.number] += 1

    def _ended_badly(self, job: Job, is_load: bool) -> None:
        if is_load:
            self._load_failed(job)
            self._under_way = deque(one._replace(sound=one.is_load) for one in self._under_way)
        else:
            self._report.failed[job.number] += 1

    def _load_failed(self, job: Job) -> None:
        self._failed_once()
        self._bad_blocks.update(job.blocks)
        self._report.failed[job.number] += 1

    def _failed_once(self) -> None:
        """No saves until the scheduler knows."""
        self._failures += 1
        self._report.failures[self._rank] = self._failures

    def _count_load(self, blocks: int, seconds: float | None) -> None:
        """What a load costs this step. ``seconds`` is None for one that goes on by itself: it is told at what the last
        such took for each block, because how long it takes is known only when this step was reported."""
        if seconds is None and self._block_s is not None:
            seconds = self._block_s * blocks
        if seconds is not None:
            self._report.loaded_blocks += blocks
            self._report.load_s += seconds

    def _blocks(self) -> PagedBlocks:
        assert self._paged is not None
        return self._paged

    def _mapped(self, address: PoolAddress) -> _MappedPool:
        """Map a pool at its first job."""
        if address not in self._pools:
            self._pools[address] = _MappedPool(address, self._rank, self._blocks().block_bytes, self._pinning)
        return self._pools[address]

    def _let_go(self, needed: set[PoolAddress | None]) -> None:
        """Unmap what no job needs any more: a server waits for that."""
        needed |= {one.job.pool for one in self._under_way}
        for address in self._pools.keys() - needed:
            self._pools.pop(address).close()

    def _copies(self, job: Job) -> list[SlotJob]:
        """Cut a job's run of blocks into (slot part, first block in the chunk, block ids), one a chunk."""
        mapped = self._mapped(job.pool)
        copies, first, taken = list[SlotJob](), job.first, 0
        for slot in job.slots:
            count = min(self._blocks_per_chunk - first, len(job.blocks) - taken)
            copies.append((mapped.part(slot), first, job.blocks[taken : taken + count]))
            first, taken = 0, taken + count
        return copies


class _MappedPool:
    """One pool as one rank maps it. Raises TierError when it cannot be mapped (any more).

    Its pages are made present by the pool's owner, not here: a worker shares its cores with the model. Here they are
    mapped: by the driver that page-locks them, or a slot when it is first used.
    """

    def __init__(self, address: PoolAddress, rank: int, block_bytes: int, pinning: Pinning | None) -> None:
        if address.witness_path is None:
            self.pool: Pool = Pool.attach(address.path, address.slots, address.slot_bytes)
        else:
            self.pool = SharedPool.join(address.path, address.witness_path, address.slots, address.slot_bytes)
        start, self.writes = address.parts[rank]
        self._span = start, start + block_bytes * address.blocks_per_chunk
        views = (self.pool.view(slot) for slot in range(address.slots))
        self._parts = [slot_tensor(view[slice(*self._span)]) for view in views]
        self._untouched = set(range(address.slots) if pinning is None else ())
        self._pinning = pinning
        if pinning is not None:
            pinning.begin(self.pool.buffer, address.slot_bytes)

    def part(self, slot: int) -> torch.Tensor:
        """This rank's part of a slot."""
        if slot in self._untouched:
            self._untouched.remove(slot)
            self.pool.touch(slot, *self._span)
        return self._parts[slot]

    def close(self) -> None:
        """Unmap, when no copy from or to it is under way."""
        self._parts.clear()
        if self._pinning is not None:
            self._pinning.end(self.pool.buffer)
        self.pool.close()
