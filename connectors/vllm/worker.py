"""A worker's half: slots <-> blocks. Knows slot numbers and block ids; never keys, tokens or requests.

Poison rule: when a load fails, the forward pass of that step runs over garbage, and so may steps that were planned
before the scheduler heard of it. From the failure until the scheduler's metadata shows that it knows
(``failures_seen``), nothing is saved: no KV computed from garbage can get under a valid key.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kvtier.connectors.vllm.metadata import Job, PoolAddress, RankLayout, StepMetadata, StepReport
from kvtier.gpu import PagedBlocks, regions_of, slot_tensor
from kvtier.lanes import Lane
from kvtier.pool import Pool

logger = logging.getLogger("kvtier.connectors.vllm")

_CLOSE_S = 1.0


class WorkerHalf:
    """One rank. Called by vLLM's worker thread only."""

    def __init__(self, rank: int, num_blocks: int, blocks_per_chunk: int) -> None:
        self._rank = rank
        self._num_blocks = num_blocks
        self._blocks_per_chunk = blocks_per_chunk
        self._paged: PagedBlocks | None = None
        self._pool: Pool | None = None
        self._spare = Lane("pool", 1, urgent_bound=1, bound=1)
        """Maps the pool's pages while nobody waits."""
        self._parts: list[torch.Tensor] = []
        self._writes = True
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
        return RankLayout(self._paged.block_bytes, self._paged.describe())

    def load(self, metadata: StepMetadata) -> None:
        """vLLM's ``start_load_kv``: before the forward pass of the step that needs the blocks."""
        for job in metadata.loads:
            try:
                self._blocks(metadata.pool).load(self._copies(job)).wait()
                self._report.done[job.number] += 1
            except Exception:
                logger.exception("rank %d: load of %d blocks failed", self._rank, len(job.blocks))
                self._failures += 1
                self._bad_blocks.update(job.blocks)
                self._report.failed[job.number] += 1
                self._report.failures[self._rank] = self._failures

    def save(self, metadata: StepMetadata) -> None:
        """vLLM's ``wait_for_save``: after the forward pass; returns when the blocks may be overwritten."""
        poisoned = metadata.failures_seen.get(self._rank, 0) < self._failures
        for job in metadata.saves:
            if poisoned:
                self._report.failed[job.number] += 1
                continue
            try:
                paged = self._blocks(metadata.pool)
                if self._writes:
                    paged.save(self._copies(job)).wait()
                self._report.done[job.number] += 1
            except Exception:
                logger.exception("rank %d: save of %d blocks failed", self._rank, len(job.blocks))
                self._report.failed[job.number] += 1

    def bad_blocks(self) -> set[int]:
        """vLLM's ``get_block_ids_with_load_errors``: blocks of this step whose load failed."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> StepReport | None:
        """vLLM's ``build_connector_worker_meta``: what became of this step's jobs."""
        report, self._report = self._report, StepReport()
        return report if report.done or report.failed else None

    def close(self) -> None:
        self._parts.clear()
        if self._pool is not None and self._spare.close(_CLOSE_S):
            self._pool.close()
            self._pool = None

    def _blocks(self, address: PoolAddress | None) -> PagedBlocks:
        """Map the pool at the first job."""
        assert self._paged is not None and address is not None
        if self._pool is None:
            self._pool = Pool.attach(address.path, address.slots, address.slot_bytes)
            self._spare.submit(partial(self._pool.populate, 0, address.slots))
            start, self._writes = address.parts[self._rank]
            size = self._paged.block_bytes * address.blocks_per_chunk
            self._parts = [slot_tensor(self._pool.view(slot)[start : start + size]) for slot in range(address.slots)]
        return self._paged

    def _copies(self, job: Job) -> list[tuple[Any, int, list[int]]]:
        """Cut a job's run of blocks into (slot part, first block in the chunk, block ids), one a chunk."""
        copies, first, taken = [], job.first, 0
        for slot in job.slots:
            count = min(self._blocks_per_chunk - first, len(job.blocks) - taken)
            copies.append((self._parts[slot], first, job.blocks[taken : taken + count]))
            first, taken = 0, taken + count
        return copies
