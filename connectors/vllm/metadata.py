"""What travels between the scheduler's and the workers' half of the connector: slot numbers, block ids and, of loads,
the names of requests, because vLLM is told of a load by that name. Never keys, tokens or KV bytes. Plain data, pickled
by vLLM between its own processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class RankLayout(KVConnectorHandshakeMetadata):
    """One worker rank's KV cache, told to the scheduler once at start."""

    block_bytes: int
    description: dict[str, Any]
    """JSON-able shape of the regions; part of the fingerprint."""
    model: dict[str, Any] | None = None
    """What the loaded model's layers resolved to (:mod:`kvtier.connectors.vllm.loaded`); part of the fingerprint. None:
    it cannot be looked at."""
    weights: str | None = None
    """Digest of the loaded parameters; None where they cannot be read."""


@dataclass(frozen=True)
class PoolAddress:
    """Where workers map a pool, and which bytes of each slot are whose. A server that comes back has another pool."""

    path: str
    witness_path: str | None
    """What a worker holds open as long as it maps a server's pool; None for a pool of the engine's own."""
    slots: int
    slot_bytes: int
    blocks_per_chunk: int
    parts: tuple[tuple[int, bool], ...]
    """For each rank: first byte of its part of a slot, and whether it is the one who writes that part."""


@dataclass
class Job:
    """Copy chunks between slots and blocks. A load may start inside its first chunk and end inside its last."""

    number: int
    pool: PoolAddress
    slots: list[int]
    blocks: list[int]
    first: int = 0
    """Block of the first chunk at which ``blocks`` begins."""
    request_id: str = ""
    """Of a load: the request that waits for it."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler -> workers, one a step."""

    pool: PoolAddress | None
    """The pool of jobs to come; workers let go of all others but those of this step's jobs."""
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    number: int = 0
    """Of the step; see :class:`kvtier.load_policy.prefill.StepClock`."""
    computes: bool = False
    """Whether the step runs a forward pass, so that requests wait for it."""
    replacements_seen: dict[int, int] = field(default_factory=dict)
    """For each rank, how many replacements of its weights the scheduler knew of when it planned this step."""
    asks_layout: bool = False
    """Whether the scheduler's half has yet to hear how the ranks' KV caches lie."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers -> scheduler, one a step, merged over ranks: who has done or failed which job, and what copies took."""

    step: int = 0
    """Number of the step, as in its metadata."""
    loaded_blocks: int = 0
    """Blocks copied from slots by one rank, and the seconds of the slowest rank for them."""
    load_s: float = 0.0
    save_s: float = 0.0
    unmapped: str = ""
    """Why some rank cannot map the engine's own pool."""
    layouts: dict[tuple[int, int], RankLayout] = field(default_factory=dict)
    """Where the scheduler's half asked for it: each rank's, by ``(pipeline stage, tensor rank)``."""
    done: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    replacements: dict[int, int] = field(default_factory=dict)
    """For each rank whose weights are not those that it had at the last step's report: how often they were replaced
    since its start."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        replacements = {
            rank: max(self.replacements.get(rank, 0), other.replacements.get(rank, 0))
            for rank in self.replacements.keys() | other.replacements.keys()
        }
        return StepReport(
            step=max(self.step, other.step),
            loaded_blocks=max(self.loaded_blocks, other.loaded_blocks),
            load_s=max(self.load_s, other.load_s),
            save_s=max(self.save_s, other.save_s),
            unmapped=self.unmapped or other.unmapped,
            layouts=self.layouts | other.layouts,
            done=self.done + other.done,
            failed=self.failed + other.failed,
            replacements=replacements,
        )
