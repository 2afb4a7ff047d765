"""What a server says of itself, as one document: read from the objects' own counts, kept nowhere.

The Structs are the answer of ``GET /v1/stats``, the schemas of the OpenAPI document, and what
:mod:`kvtier.admin.prometheus` turns into Prometheus' text: one truth, three forms. All counts are since the start of
the server; chunks unless said otherwise.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

import kvtier
from kvtier.core.lanes import Executor, Lane
from kvtier.server.registry import Realm, Realms
from kvtier.store.store import Store
from kvtier.store.what_if import Point
from kvtier.tiers.base import Tier as LowerTier

_DECLINED, _MISSED = "declined_", "missed_"
_FAILED = ("failed_reads", "failed_writes", "failed_finds", "failed_deletes", "failed")


class LaneStatus(msgspec.Struct, frozen=True):
    """The threads and queues in front of one tier."""

    queued_reads: int
    queued_writes: int
    failures: int
    """Works that raised: a bug in a tier, logged, never fatal."""


class TierStatus(msgspec.Struct, frozen=True):
    """RAM or one lower tier of one realm."""

    tier: str
    capacity: int
    held: int
    """In RAM: ready to be served."""
    loads: int
    """Served from here: by RAM at once, by a lower tier into RAM."""
    misses: int
    """Counted as held, and could not be read: bad, evicted by somebody else, or the tier was away."""
    stores: int
    """Put here: by engines into RAM (saves), from RAM into a lower tier (spills)."""
    refused: int
    """Not taken: no free slot, a full lane, or a tier that is full or left alone."""
    late: int
    """Spills that were not done, because the chunk had left RAM before its turn."""
    over_budget: int
    """Not written, because that would have been more than the tier may write in a day."""
    evicted_unread: int
    """Written, and deleted without ever having been read: what the device wore out for."""
    failed: int
    """Calls that failed with an I/O or network error."""
    corrupt: int
    """Chunks whose checksum did not match; never served."""
    bytes_read: int
    bytes_written: int
    open_breakers: int
    """Nodes of a networked tier that are left alone now because they failed."""
    breaker_trips: int
    owed_deletes: int
    """Deletes that wait until the tier can be reached."""
    lane: LaneStatus | None
    """None for RAM."""
    what_if: dict[str, float]
    """The part of the chunks asked for that an LRU of another size would have hit, by its size as a multiple of this
    one; empty before anything is asked for."""
    what_if_error: float
    """The largest standard error of these, where a part of the sessions is followed; else 0."""


class RealmStatus(msgspec.Struct, frozen=True):
    """One chunk size with the Store for it."""

    slot_bytes: int
    slots: int
    free: int
    filling: int
    pinned: int
    """Slots, filling or ready, that somebody reads, waits for or writes below."""
    namespaces: int
    """Tenants and models that came last, at most 4,096."""
    asked: int
    """Chunks that loads named; loads of all tiers / asked is the hit rate. An engine on another host asks twice."""
    loads_refused: int
    """Held lower, but RAM had no free slot for them."""
    promotions_refused: int
    """Held lower, but the lane was full."""
    declined: dict[str, int]
    """Chunks that could be had and were computed instead, by reason: computing them was faster."""
    missed: dict[str, int]
    """Chunks that loads named and could not have, by reason: see :mod:`kvtier.store.miss_reasons`. Salt, adapter and
    media are known to engines only."""
    zero_hits: str
    """Why not one chunk that was asked for has been a hit for long, in words; empty while all is well."""
    policy: str
    """The setting of RAM's order of leaving that rules now."""
    policy_asked: int
    """Chunks that were tried with each setting; and how many of them each would have hit."""
    policy_hits: dict[str, int]
    audited: int
    """Loaded chunks that were compared with their copy in a lower tier."""
    audit_mismatches: int
    """Of them, those that had other bytes: bad memory, or a bug. Dropped everywhere."""
    tiers: list[TierStatus]
    """RAM first."""


class ConnectionStatus(msgspec.Struct, frozen=True):
    open: int
    lingering: int
    """Closed connections of engines of which some process has the pool mapped still."""
    leases: int
    accepted: int
    rejected: int
    dropped: int
    ended: int


class MemoryStatus(msgspec.Struct, frozen=True):
    """Bytes resident now, from /proc/self/status; 0 where the kernel does not say."""

    process: int
    """Anonymous memory and files: what the server needs beside the pools."""
    pools: int


class Stats(msgspec.Struct, frozen=True):
    """Everything, now."""

    version: str
    uptime_s: float
    ready: bool
    """Engines are let in."""
    trouble: list[str]
    """What is wrong now, in words, as in ``/healthz``."""
    memory: MemoryStatus
    connections: ConnectionStatus
    realms: list[RealmStatus]


class Peer(Protocol):
    """What is read of a connection."""

    @property
    def leases(self) -> int: ...


class Served(Protocol):
    """What is read of a server."""

    realms: Realms
    counts: Counter[str]
    ready: bool
    trouble: dict[str, str]
    started: float
    """``time.monotonic()`` at its making."""

    @property
    def connections(self) -> Collection[Peer]: ...

    @property
    def lingering(self) -> Collection[Peer]: ...


def read(server: Served) -> Stats:
    """On the server's loop. No walk over chunks: these are counts that are kept."""
    return Stats(
        version=kvtier.__version__,
        uptime_s=time.monotonic() - server.started,
        ready=server.ready,
        trouble=trouble(server),
        memory=_memory(Path("/proc/self/status")),
        connections=_connections(server),
        realms=[_realm(realm) for realm in server.realms.open.values()],
    )


def trouble(server: Served) -> list[str]:
    """What is wrong now, in words: what the start found, tiers that are left alone, and tiers that have lost their
    place. It costs hits, and is no reason to take the server out of service."""
    tiers = [tier for realm in server.realms.open.values() for tier in realm.store.tiers]
    lost = (str(getattr(tier, "trouble", "")) for tier in tiers)
    away = (
        f"{tier.name}: {_number(tier, 'open_breakers')} of its nodes failed and are left alone for a while: misses"
        for tier in tiers
        if _number(tier, "open_breakers")
    )
    return [*server.trouble.values(), *away, *(text for text in lost if text)]


def _connections(server: Served) -> ConnectionStatus:
    every = {*server.connections, *server.lingering}
    return ConnectionStatus(
        open=len(server.connections),
        lingering=len(server.lingering),
        leases=sum(peer.leases for peer in every),
        **{event: server.counts[event] for event in ("accepted", "rejected", "dropped", "ended")},
    )


def _realm(realm: Realm) -> RealmStatus:
    store = realm.store
    stats = Counter(store.stats())
    counts: Callable[[str], int] = stats.__getitem__
    lower = [_tier(*each, counts) for each in zip(store.tiers, store.capacities, store.lanes, strict=True)]
    curves, policies = store.what_if(), _by_reason(stats, "policy_hits_")
    tiers = [_with_curve(tier, curves[tier.tier]) for tier in (_ram(store, counts), *lower)]
    return RealmStatus(
        slot_bytes=store.pool.slot_bytes,
        slots=store.slots,
        free=counts("ram_free"),
        filling=counts("ram_filling"),
        pinned=counts("ram_pinned"),
        namespaces=len(realm.owners),
        asked=counts("load_asked"),
        loads_refused=counts("load_refused"),
        promotions_refused=counts("promotion_refused"),
        declined=_by_reason(stats, _DECLINED),
        missed=_by_reason(stats, _MISSED),
        zero_hits=realm.zero_hits.verdict,
        policy=(list(policies) or ["lru"])[counts("policy_now")],
        policy_asked=counts("policy_asked"),
        policy_hits=policies,
        audited=counts("audited"),
        audit_mismatches=counts("audit_mismatch"),
        tiers=tiers,
    )


def _with_curve(tier: TierStatus, points: Sequence[Point]) -> TierStatus:
    return msgspec.structs.replace(
        tier,
        what_if={f"{point.scale:g}": round(point.ratio, 6) for point in points},
        what_if_error=round(max((point.error for point in points), default=0.0), 6),
    )


def _by_reason(stats: Mapping[str, int], kind: str) -> dict[str, int]:
    return {name.removeprefix(kind): count for name, count in stats.items() if name.startswith(kind)}


def _ram(store: Store, counts: Callable[[str], int]) -> TierStatus:
    nothing = dict.fromkeys(set(TierStatus.__struct_fields__) - {"tier", "lane", "what_if"}, 0)
    known = {
        "capacity": store.slots,
        "held": counts("ram_ready"),
        "loads": counts("ram_loaded"),
        "stores": counts("saved"),
        "refused": counts("save_refused"),
    }
    return TierStatus(tier="ram", lane=None, what_if={}, **(nothing | known))


def _tier(tier: LowerTier, capacity: int, lane: Executor, counts: Callable[[str], int]) -> TierStatus:
    name = tier.name
    own: Mapping[str, int] = Counter(getattr(tier, "counts", {}))
    return TierStatus(
        tier=name,
        capacity=capacity,
        held=counts(f"{name}_held"),
        loads=counts(f"{name}_loaded"),
        misses=counts(f"{name}_missed"),
        stores=counts(f"{name}_stored"),
        refused=counts(f"{name}_spill_refused") + own["refused"],
        late=counts(f"{name}_spill_late"),
        over_budget=counts(f"{name}_write_over_budget"),
        evicted_unread=own["evicted_unread"],
        failed=sum(own[count] for count in _FAILED),
        corrupt=own["corrupt"],
        bytes_read=own["bytes_read"],
        bytes_written=own["bytes_written"],
        open_breakers=_number(tier, "open_breakers"),
        breaker_trips=own["breaker_trips"],
        owed_deletes=_number(tier, "owed"),
        lane=_lane(lane),
        what_if={},
        what_if_error=0.0,
    )


def _lane(lane: Executor) -> LaneStatus | None:
    return LaneStatus(*lane.queued, lane.failures) if isinstance(lane, Lane) else None


def _number(tier: LowerTier, name: str) -> int:
    """What only some tiers have."""
    return int(getattr(tier, name, 0))


def _memory(path: Path) -> MemoryStatus:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return MemoryStatus(0, 0)
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    process = kib.get("RssAnon", 0) + kib.get("RssFile", 0)
    return MemoryStatus(process * 1024, kib.get("RssShmem", 0) * 1024)
