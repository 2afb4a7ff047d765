"""What the scheduler's and the workers' halves of the connector tell each other: slot numbers,
block ids and, for loads, the names of requests, because vLLM is told of a load by that name. Never
keys or KV bytes. Never tokens either, except those that a worker shall compute in place
(:class:`InPlaceRun`). It is plain data, which vLLM pickles between its own processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.connectors.vllm.span_move import SpanMove

Parts = tuple[tuple[tuple[int, bool], ...], ...]


@dataclass
class RankLayout(KVConnectorHandshakeMetadata):
    """One worker rank's KV cache. The scheduler is told once, at the start."""

    block_bytes: tuple[int, ...]
    """Bytes of one block, for each cache group that is kept."""
    description: dict[str, Any]
    """The shape of the regions, which can be written as JSON. It is part of the fingerprint. For
    several groups it is ``{"groups": [...]}``."""
    model: dict[str, Any] | None = None
    """What the loaded model's layers resolved to, as
    :mod:`kvtier.connectors.vllm.worker_side.loaded` tells. It is part of the fingerprint. None: the
    model cannot be inspected."""
    weights: str | None = None
    """A digest of the loaded parameters, where they do not come from local files. None where they
    cannot be read."""
    others: tuple[tuple[str, str, str], ...] = ()
    """Other checkpoints of which the model takes weights: name, revision and folder inside."""
    why_no_spans: str = "off"
    """Why tokens cannot be moved here. Empty: they can."""
    why_not_in_place: str = "off"
    """Why tokens cannot be computed in place here. Empty: they can."""
    server: bytes = b""
    """What the server on this rank's host is called, where the engine has several hosts. Empty: it
    is not there."""
    why_no_prefixes: str = ""
    """Why nothing may be kept or served, as this rank sees it. Empty: it may."""


@dataclass(frozen=True)
class PoolAddress:
    """Where workers map a pool, and which bytes of each slot belong to which rank. A server that
    restarts has another pool."""

    path: str
    witness_path: str | None
    """A file that a worker keeps open as long as it maps a server's pool. None for the engine's own
    pool."""
    slots: int
    slot_bytes: int
    parts: Parts
    """For each rank and each of its kept groups: the first byte of its part of a slot, and whether
    this rank writes that part."""
    ticket: bytes = b""
    """With it the server on a worker's host lets the worker map the pool, where the scheduler is on
    another host."""
    inode: int = 0
    """Of a server's pool on the scheduler's host. After a restart another pool may lie at the same
    path."""

    @property
    def is_lent(self) -> bool:
        """Whether it is a server's."""
        return self.witness_path is not None or bool(self.ticket)


@dataclass(frozen=True)
class HostPools(PoolAddress):
    """The pools of an engine's hosts. A number of a slot stands for one on each of them: see
    :class:`kvtier.client.hosts.HostsPool`."""

    hosts: tuple[PoolAddress, ...] = ()


class Move(NamedTuple):
    """Copies pieces of one group between slots and blocks. A load may start inside its first piece
    and end inside its last."""

    group: int
    """The index of the group among those that are kept."""
    slots: list[int]
    blocks: list[int]
    first: int = 0
    """The block of the first piece at which ``blocks`` begins."""


class LoadEnd(NamedTuple):
    """A load that came in several jobs has ended on a rank."""

    number: int
    """Of the whole load."""
    request_id: str
    blocks: list[int]
    """Of the whole load."""
    kept: int
    """How many of them vLLM keeps if all parts were copied. It computes those behind them."""


@dataclass
class Job:
    """Copies that belong together, for one request."""

    number: int
    pool: PoolAddress
    moves: list[Move]
    request_id: str | None = None
    """For a load: the request that waits for it, and for nothing else. None for a part of a
    load."""
    tokens: int = 0
    """For a load: how many tokens it loads."""
    part_of: int | None = None
    """The number of the load of which this is a part."""
    end: LoadEnd | None = None
    """The load ends with this part, whether or not it and the parts before it were copied. None: a
    :class:`LoadEnd` follows."""

    @property
    def blocks(self) -> list[int]:
        """The blocks of all groups."""
        return [block for move in self.moves for block in move.blocks]


@dataclass
class SpanJob:
    """Tokens of slots that a request waits for, some of them to be moved to other positions."""

    number: int
    pool: PoolAddress
    pieces: list[SpanMove]
    blocks: list[int]
    """Of the whole request, in its one group."""
    request_id: str
    tokens: int
    twins: list[tuple[int, int, int]]
    """``(slot, one, other)``: places in a slot that have the same token."""
    goes_on: bool = False
    """A :class:`SpanPass` follows in a later step, and the load ends with that."""


class InPlaceRun(NamedTuple):
    """Tokens that are computed in place, and the position of the first of them. From position
    ``moved`` on they were moved there before, which is at least one of them."""

    begin: int
    moved: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


@dataclass
class SpanPass:
    """The second half of a span job, when every rank has copied: all ranks compute these tokens in
    the same step."""

    number: int
    """The job's."""
    request_id: str
    blocks: list[int]
    """Of the whole request, in its one group."""
    runs: list[InPlaceRun]
    """In ascending order. Empty: some rank could not copy, so the load has failed."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler -> workers, one for each step."""

    pool: PoolAddress | None
    """The pool of jobs to come. Workers unmap all other pools except those of this step's jobs."""
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    number: int = 0
    """The step's number. See :class:`kvtier.load_policy.prefill.StepClock`."""
    computes: bool = False
    """Whether the step runs a forward pass, so that requests wait for it."""
    replacements_seen: Counter[int] = field(default_factory=Counter)
    """For each rank, how many replacements of its weights the scheduler knew of when it planned
    this step."""
    ends: list[LoadEnd] = field(default_factory=list)
    """Of loads whose last part did not say so: all ranks have confirmed what they copied."""
    spans: list[SpanJob] = field(default_factory=list)
    """Loads too."""
    passes: list[SpanPass] = field(default_factory=list)
    renewed: dict[PoolAddress, list[int]] = field(default_factory=dict)
    """Slots of a server's pool that have other memory than when they were last told of."""
    reads_on: bool = False
    """Every request that this step saves of keeps its blocks as they are until some later step says
    ``may_reuse``. So the engine may compute while they are read."""
    may_reuse: bool = True
    """From this step on, blocks that saves of earlier steps read may be another request's."""
    asks_layout: bool = False
    """Whether the scheduler's half has yet to be told how the ranks' KV caches lie."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers -> scheduler, one for each step, merged over ranks: how many ranks have done or
    failed each job, and how long copies took."""

    step: int = 0
    """Number of the step, as in its metadata."""
    loaded_tokens: float = 0.0
    """Tokens whose KV one rank copied from slots. ``load_s``: the seconds that the slowest rank
    took for them."""
    load_s: float = 0.0
    save_s: float = 0.0
    unmapped: str = ""
    """Why some rank cannot map the engine's own pool."""
    layouts: dict[tuple[int, int], RankLayout] = field(default_factory=dict)
    """Each rank's layout by ``(pipeline stage, tensor rank)``, where the scheduler's half asked for
    it."""
    done: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    replacements: Counter[int] = field(default_factory=Counter)
    """Ranks whose weights were replaced since the last step's report, with how often they were
    replaced since the rank's start."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(
            step=max(self.step, other.step),
            loaded_tokens=max(self.loaded_tokens, other.loaded_tokens),
            load_s=max(self.load_s, other.load_s),
            save_s=max(self.save_s, other.save_s),
            unmapped=self.unmapped or other.unmapped,
            layouts=self.layouts | other.layouts,
            done=self.done + other.done,
            failed=self.failed + other.failed,
            replacements=self.replacements | other.replacements,
        )
