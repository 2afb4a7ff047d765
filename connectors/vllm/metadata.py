"""Messages between the scheduler's and the workers' halves of the connector: slot numbers,
block ids and, for loads, the names of requests, because vLLM is told of a load by that name. Never
keys or KV bytes. Never tokens either, except those that a worker shall compute in place
(:class:`.groups.InPlaceRun`). It is plain data, which vLLM pickles between its own processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.connectors.vllm.groups import InPlaceRun, SpanMove

Parts = tuple[tuple[tuple[int, bool], ...], ...]


class _Brief:
    """Dataclass that is pickled by position, without defaults at its end. Every step sends one to
    every worker, and the names of its fields would be most of it."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        kind: Any = type(self)
        told, usual = [*vars(self).values()], _defaults(kind)
        while told and told[-1] == usual[len(told) - 1]:
            told.pop()
        return kind, tuple(told)


@cache
def _defaults(kind: Any) -> list[Any]:
    """Return the default of each field, MISSING for one that has none."""
    return [
        one.default if one.default_factory is MISSING else one.default_factory()
        for one in fields(kind)
    ]


@dataclass
class RankLayout(KVConnectorHandshakeMetadata):
    """One worker rank's KV cache, told once, at the start."""

    block_bytes: tuple[int, ...]
    """Bytes of a block in each cache group that is kept."""
    description: dict[str, Any]
    """Shape of the regions, for the fingerprint. Several groups: ``{"groups": [...]}``."""
    model: dict[str, Any] | None = None
    """Part of the fingerprint (:mod:`.worker_side.loaded`). None if no model was found."""
    weights: str | None = None
    """Digest of the loaded parameters, where they do not come from local files and can be read."""
    others: tuple[tuple[str, str, str], ...] = ()
    """Checkpoints of which the model takes weights too: name, revision and folder inside."""
    why_no_spans: str = "off"
    """Reason why tokens cannot be moved here, or empty."""
    why_not_in_place: str = "off"
    server: bytes = b""
    """Name of the server on this rank's host, where the engine has several. Empty if it is away."""
    why_no_prefixes: str = ""
    """Reason, as this rank sees it, why nothing may be kept or served, or empty."""


@dataclass(frozen=True)
class PoolAddress(_Brief):
    path: str
    witness_path: str | None
    """File that a worker keeps open as long as it maps a server's pool."""
    slots: int
    slot_bytes: int
    parts: Parts
    """First byte of a part of a slot, and whether the rank writes it, by rank and kept group."""
    inode: int = 0
    """Inode of a server's pool. After a restart another pool may lie at the same path."""
    ticket: bytes = b""
    """Word by which a worker's server lets it map the pool, if the scheduler is elsewhere."""

    @property
    def is_lent(self) -> bool:
        return self.witness_path is not None or bool(self.ticket)


@dataclass(frozen=True)
class HostPools(PoolAddress):
    """Pools of an engine on several hosts. A slot's number stands for one on each host: see
    :class:`kvtier.client.hosts.HostsPool`."""

    hosts: tuple[PoolAddress, ...] = ()


class Move(NamedTuple):
    """Copy of one group's pieces. A load may start in its first piece and end in its last."""

    group: int
    """Index among the groups that are kept."""
    slots: list[int]
    blocks: list[int]
    first: int = 0
    """Index of the block in the first piece at which ``blocks`` begins."""


class LoadEnd(NamedTuple):
    number: int
    request_id: str
    blocks: list[int]
    """Blocks of the whole load."""
    kept: int
    """Number of blocks that vLLM keeps if all parts were copied. It computes those behind them."""


@dataclass
class Job(_Brief):
    number: int
    pool: PoolAddress
    moves: list[Move]
    request_id: str | None = None
    """Request of a load. None for a save, and for a part of a load."""
    tokens: int = 0
    """Tokens of a load."""
    part_of: int | None = None
    """Number of the load of which this is a part."""
    end: LoadEnd | None = None
    """End of the load, even if parts were not copied. If None, a :class:`LoadEnd` follows."""

    @property
    def blocks(self) -> list[int]:
        return [block for move in self.moves for block in move.blocks]


@dataclass
class SpanJob:
    """Copy of tokens in slots into blocks, some of them to be moved to other positions."""

    number: int
    pool: PoolAddress
    pieces: list[SpanMove]
    blocks: list[int]
    """Blocks of the whole request, in its one group."""
    request_id: str
    tokens: int
    twins: list[tuple[int, int, int]]
    """Places in slots that have the same token: ``(slot, one, other)``."""
    goes_on: bool = False
    """Whether a :class:`SpanPass` follows in a later step, which ends the load."""


@dataclass
class SpanPass:
    """End of a span job that every rank has copied: all compute these tokens in the same step."""

    number: int
    request_id: str
    blocks: list[int]
    """Blocks of the whole request, in its one group."""
    runs: list[InPlaceRun]
    """Runs in ascending order. Empty if some rank could not copy, so the load has failed."""


@dataclass
class StepMetadata(_Brief, KVConnectorMetadata):
    """Message to the workers for one step. Its fields that most steps need come first."""

    pool: PoolAddress | None
    """Pool of jobs to come. Workers unmap all pools but this one and those of this step's jobs."""
    number: int = 0
    """Number of the step in :class:`kvtier.load_policy.prefill.StepClock`."""
    computes: bool = False
    """Whether the step runs a forward pass, so that requests wait for it."""
    may_reuse: bool = True
    """Whether blocks that earlier steps' saves read may be another request's from this step on."""
    saves: list[Job] = field(default_factory=list)
    loads: list[Job] = field(default_factory=list)
    reads_on: bool = False
    """Whether steps may run while saves are read: blocks stay as they are until ``may_reuse``."""
    replacements_seen: Counter[int] = field(default_factory=Counter)
    """Rank -> replacements of its weights that the scheduler knew of when it planned this step."""
    ended_saves: list[Job] = field(default_factory=list)
    """Saves of requests that have ended, read before the step writes anything."""
    ends: list[LoadEnd] = field(default_factory=list)
    """Ends of loads whose last part had no ``end``."""
    spans: list[SpanJob] = field(default_factory=list)
    passes: list[SpanPass] = field(default_factory=list)
    renewed: dict[PoolAddress, list[int]] = field(default_factory=dict)
    """Slots of a server's pool that have other memory than before."""
    asks_layout: bool = False


class Counts(dict[int, int]):
    """Numbers by number, 0 for each that is not there. It costs less to make than a Counter, and
    every step makes some."""

    def __missing__(self, _: int) -> int:
        return 0


@dataclass
class StepReport(_Brief, KVConnectorWorkerMetadata):
    """Message of the workers to the scheduler for one step, merged over ranks."""

    step: int = 0
    loaded_tokens: float = 0.0
    """Tokens that the slowest rank loaded, like ``load_s``."""
    load_s: float = 0.0
    save_s: float = 0.0
    done: dict[int, int] = field(default_factory=Counts)
    unmapped: str = ""
    layouts: dict[tuple[int, int], RankLayout] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=Counts)
    replacements: dict[int, int] = field(default_factory=Counts)
    """Rank whose weights were replaced in this step -> how often since its start."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(
            step=max(self.step, other.step),
            loaded_tokens=max(self.loaded_tokens, other.loaded_tokens),
            load_s=max(self.load_s, other.load_s),
            save_s=max(self.save_s, other.save_s),
            unmapped=self.unmapped or other.unmapped,
            layouts=self.layouts | other.layouts,
            done=Counts(Counter(self.done) + Counter(other.done)),
            failed=Counts(Counter(self.failed) + Counter(other.failed)),
            replacements=Counts(Counter(self.replacements) | Counter(other.replacements)),
        )
