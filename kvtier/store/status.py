"""What a Store says of itself, read from the objects' own counts and kept nowhere: chunks unless
said otherwise, since the start.

A server's ``/v1/stats`` has one a chunk size; an engine tells vLLM's metrics the same of its own
Store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvtier.core.lanes import Executor, Lane
from kvtier.core.pool import Pool
from kvtier.store.timings import RAM, Timings
from kvtier.store.what_if import Point
from kvtier.tiers.base import Tier

_DECLINED, _MISSED = "declined_", "missed_"
_FAILED = ("failed_reads", "failed_writes", "failed_finds", "failed_deletes", "failed")


class LaneStatus(msgspec.Struct, frozen=True):
    """The threads and queues in front of one tier."""

    queued_reads: int
    queued_writes: int
    failures: int
    """Works that raised: a bug in a tier, logged, never fatal."""


class TierStatus(msgspec.Struct, frozen=True):
    """RAM or one lower tier of one size class."""

    tier: str
    capacity: int
    held: int
    """In RAM: ready to be served."""
    loads: int
    """Served from here: by RAM at once, by a lower tier into RAM."""
    misses: int
    """Counted as held, and could not be read: bad, evicted by somebody else, or the tier was
    away."""
    stores: int
    """Put here: by engines into RAM (saves), from RAM into a lower tier (spills)."""
    refused: int
    """Not taken: no free slot, a full lane, or a tier that is full or left alone."""
    late: int
    """Spills that were not done, because the chunk had left RAM before its turn."""
    over_budget: int
    """Not written, because that would have been more than the tier may write in a day."""
    evicted: int
    """Left for room."""
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
    """The part of the chunks asked for that an LRU of another size would have hit, by its size as a
    multiple of this one; empty before anything is asked for."""
    what_if_error: float
    """The largest standard error of these, where a part of the sessions is followed; else 0."""


class TimingStatus(msgspec.Struct, frozen=True):
    """One histogram."""

    what: str
    """lookup, load_wait, load, save, promotion or spill."""
    tier: str
    """Empty where it is of no tier."""
    counts: list[int]
    """By place, not cumulated. Place i is up to 2 ** (10 + i) nanoseconds, the last one is all
    above."""
    seconds: list[float]
    """Their sum by place."""


class SizeClassStatus(msgspec.Struct, frozen=True):
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
    """Chunks that loads named; loads of all tiers / asked is the hit rate. An engine on another
    host asks twice."""
    loads_refused: int
    """Held lower, but RAM had no free slot for them."""
    promotions_refused: int
    """Held lower, but the lane was full."""
    declined: dict[str, int]
    """Chunks that could be had and were computed instead, by reason: computing them was faster."""
    missed: dict[str, int]
    """Chunks that loads named and could not have, by reason: see :mod:`kvtier.store.miss_reasons`.
    Salt, adapter and media are known to engines only."""
    zero_hits: str
    """Why not one chunk that was asked for has been a hit for long, in words; empty while all is
    well."""
    policy: str
    """The setting of RAM's order of leaving that rules now."""
    policy_asked: int
    """Chunks that were tried with each setting; and how many of them each would have hit."""
    policy_hits: dict[str, int]
    audited: int
    """Loaded chunks that were compared with their copy in a lower tier."""
    timings: list[TimingStatus]
    """How long lookups, loads, waits before loads, saves, promotions and spills took."""
    audit_mismatches: int
    """Of them, those that had other bytes: bad memory, or a bug. Dropped everywhere."""
    tiers: list[TierStatus]
    """RAM first."""


class Measured(Protocol):
    """What :func:`read` asks of a Store."""

    pool: Pool
    tiers: list[Tier]
    timings: Timings

    @property
    def slots(self) -> int: ...

    @property
    def capacities(self) -> list[int]: ...

    @property
    def lanes(self) -> Sequence[Executor]: ...

    def stats(self) -> dict[str, int]: ...

    def what_if(self) -> dict[str, list[Point]]: ...


def read(store: Measured, namespaces: int = 0, zero_hits: str = "") -> SizeClassStatus:
    """Any thread. No walk over chunks: these are counts that are kept."""
    stats = Counter(store.stats())
    counts: Callable[[str], int] = stats.__getitem__
    lower = [
        _tier(*each, counts)
        for each in zip(store.tiers, store.capacities, store.lanes, strict=True)
    ]
    curves, policies = store.what_if(), _by_reason(stats, "policy_hits_")
    return SizeClassStatus(
        slot_bytes=store.pool.slot_bytes,
        slots=store.slots,
        free=counts("ram_free"),
        filling=counts("ram_filling"),
        pinned=counts("ram_pinned"),
        namespaces=namespaces,
        asked=counts("load_asked"),
        loads_refused=counts("load_refused"),
        promotions_refused=counts("promotion_refused"),
        declined=_by_reason(stats, _DECLINED),
        missed=_by_reason(stats, _MISSED),
        zero_hits=zero_hits,
        policy=(list(policies) or ["lru"])[counts("policy_now")],
        policy_asked=counts("policy_asked"),
        policy_hits=policies,
        audited=counts("audited"),
        timings=[
            TimingStatus(what, tier, histogram.counts, histogram.sums)
            for what, tier, histogram in store.timings.each()
        ],
        audit_mismatches=counts("audit_mismatch"),
        tiers=[_with_curve(tier, curves[tier.tier]) for tier in (_ram(store, counts), *lower)],
    )


def _with_curve(tier: TierStatus, points: Sequence[Point]) -> TierStatus:
    return msgspec.structs.replace(
        tier,
        what_if={f"{point.scale:g}": round(point.ratio, 6) for point in points},
        what_if_error=round(max((point.error for point in points), default=0.0), 6),
    )


def _by_reason(stats: Mapping[str, int], kind: str) -> dict[str, int]:
    return {
        name.removeprefix(kind): count for name, count in stats.items() if name.startswith(kind)
    }


def _ram(store: Measured, counts: Callable[[str], int]) -> TierStatus:
    nothing = dict.fromkeys(set(TierStatus.__struct_fields__) - {"tier", "lane", "what_if"}, 0)
    size = store.pool.slot_bytes
    known = {
        "capacity": store.slots,
        "held": counts("ram_ready"),
        "loads": counts("ram_loaded"),
        "stores": counts("saved"),
        "refused": counts("save_refused"),
        "evicted": counts("ram_evicted"),
        "bytes_read": counts("ram_loaded") * size,
        "bytes_written": counts("saved") * size,
    }
    return TierStatus(tier=RAM, lane=None, what_if={}, **(nothing | known))


def _tier(tier: Tier, capacity: int, lane: Executor, counts: Callable[[str], int]) -> TierStatus:
    name = tier.name
    own: Mapping[str, int] = Counter(tier.counts)
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
        evicted=counts(f"{name}_evicted"),
        evicted_unread=own["evicted_unread"],
        failed=sum(own[count] for count in _FAILED),
        corrupt=own["corrupt"],
        bytes_read=own["bytes_read"],
        bytes_written=own["bytes_written"],
        open_breakers=tier.open_breakers,
        breaker_trips=own["breaker_trips"],
        owed_deletes=tier.owed,
        lane=_lane(lane),
        what_if={},
        what_if_error=0.0,
    )


def _lane(lane: Executor) -> LaneStatus | None:
    return LaneStatus(*lane.queued, lane.failures) if isinstance(lane, Lane) else None
