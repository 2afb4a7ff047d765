"""A worker's half: slots <-> blocks. Knows slot numbers and block ids; never keys, tokens or requests.

Poison rule: when a load fails, the forward pass of that step runs over garbage, and so may steps that were planned
before the scheduler heard of it. From the failure until the scheduler's metadata shows that it knows
(``failures_seen``), nothing is saved: no KV computed from garbage can get under a valid key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvtier.connectors.vllm.metadata import Job, PoolAddress, RankLayout, StepMetadata, StepReport
from kvtier.gpu import PagedBlocks, regions_of, slot_tensor
from kvtier.link import SharedPool
from kvtier.pool import Pool

logger = logging.getLogger("kvtier.connectors.vllm")


class WorkerHalf:
    """One rank. Called by vLLM's worker thread only."""

    def __init__(self, rank: int, num_blocks: int, blocks_per_chunk: int, backends: Callable[[], list[str]]) -> None:
        """``backends`` names the attention backends, once the KV caches are registered: they decide how a block is
        packed where no stride shows it."""
        self._rank = rank
        self._backends = backends
        self._num_blocks = num_blocks
        self._blocks_per_chunk = blocks_per_chunk
        self._paged: PagedBlocks | None = None
        self._pools: dict[PoolAddress, _MappedPool] = {}
        self._failures = 0
        self._bad_blocks: set[int] = set()
        self._report = StepReport()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's ``register_kv_caches``. Raises LayoutError for tensors kvtier cannot describe."""
        self._paged = PagedBlocks(regions_of(kv_caches, self._num_blocks), self._blocks_per_chunk)

    def layout(self) -> RankLayout | None:
        """vLLM's ``get_handshake_metadata``."""
        if self._paged is None:
            return None
        return RankLayout(self._paged.block_bytes, self._paged.describe() | {"backends": self._backends()})

    def load(self, metadata: StepMetadata) -> None:
        """vLLM's ``start_load_kv``: before the forward pass of the step that needs the blocks."""
        self._let_go({metadata.pool, *(job.pool for job in (*metadata.loads, *metadata.saves))})
        self._report.step = metadata.number
        for job in metadata.loads:
            try:
                copies, begun = self._copies(job), time.perf_counter()
                self._blocks().load(copies).wait()
                self._report.done[job.number] += 1
                self._report.loaded_blocks += len(job.blocks)
                self._report.load_s += time.perf_counter() - begun
            except Exception:
                logger.exception("rank %d: load of %d blocks failed", self._rank, len(job.blocks))
                self._failures += 1
                self._bad_blocks.update(job.blocks)
                self._report.failed[job.number] += 1
                self._report.failures[self._rank] = self._failures

    def save(self, metadata: StepMetadata) -> None:
        """vLLM's ``wait_for_save``: after the forward pass; returns when the blocks may be overwritten."""
        poisoned = metadata.failures_seen.get(self._rank, 0) < self._failures
        begun = time.perf_counter()
        for job in metadata.saves:
            if poisoned:
                self._report.failed[job.number] += 1
                continue
            try:
                if self._mapped(job.pool).writes:
                    self._blocks().save(self._copies(job)).wait()
                self._report.done[job.number] += 1
            except Exception:
                logger.exception("rank %d: save of %d blocks failed", self._rank, len(job.blocks))
                self._report.failed[job.number] += 1
        self._report.save_s += time.perf_counter() - begun

    def bad_blocks(self) -> set[int]:
        """vLLM's ``get_block_ids_with_load_errors``: blocks of this step whose load failed."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> StepReport:
        """vLLM's ``build_connector_worker_meta``: what became of this step's jobs, and that the step is over."""
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        self._let_go(set())

    def _blocks(self) -> PagedBlocks:
        assert self._paged is not None
        return self._paged

    def _mapped(self, address: PoolAddress) -> _MappedPool:
        """Map a pool at its first job."""
        if address not in self._pools:
            self._pools[address] = _MappedPool(address, self._rank, self._blocks().block_bytes)
        return self._pools[address]

    def _let_go(self, needed: set[PoolAddress | None]) -> None:
        """Unmap what no job needs any more: a server waits for that."""
        for address in self._pools.keys() - needed:
            self._pools.pop(address).close()

    def _copies(self, job: Job) -> list[tuple[Any, int, list[int]]]:
        """Cut a job's run of blocks into (slot part, first block in the chunk, block ids), one a chunk."""
        parts = self._mapped(job.pool).parts
        copies, first, taken = [], job.first, 0
        for slot in job.slots:
            count = min(self._blocks_per_chunk - first, len(job.blocks) - taken)
            copies.append((parts[slot], first, job.blocks[taken : taken + count]))
            first, taken = 0, taken + count
        return copies


class _MappedPool:
    """One pool as one rank maps it. Raises TierError when it cannot be mapped (any more).

    Its pages are made present by the pool's owner, not here: a worker shares its cores with the model.
    """

    def __init__(self, address: PoolAddress, rank: int, block_bytes: int) -> None:
        if address.witness_path is None:
            self._pool = Pool.attach(address.path, address.slots, address.slot_bytes)
        else:
            self._pool = SharedPool.join(address.path, address.witness_path, address.slots, address.slot_bytes)
        start, self.writes = address.parts[rank]
        size = block_bytes * address.blocks_per_chunk
        self.parts = [slot_tensor(self._pool.view(slot)[start : start + size]) for slot in range(address.slots)]
        """This rank's part of each slot."""

    def close(self) -> None:
        """Unmap."""
        self.parts.clear()
        self._pool.close()
