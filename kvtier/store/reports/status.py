"""What a Store reports of itself, read from the objects' own counts and kept nowhere. Numbers count
chunks since the start unless they say otherwise.

A server's ``/v1/stats`` has one report for each chunk size. An engine gives vLLM's metrics the same
report of its own Store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvtier.core.pool import Pool
from kvtier.eviction.what_if import Point
from kvtier.store.lower.lower_tier import LowerTier
from kvtier.store.reports.timings import RAM, Timings

_DAY_S = 86_400.0
_DECLINED, _MISSED = "declined_", "missed_"
_FAILED = ("failed_reads", "failed_writes", "failed_finds", "failed_deletes", "failed")


class LaneStatus(msgspec.Struct, frozen=True):
    """The threads and queues in front of one tier."""

    queued_reads: int
    queued_writes: int
    failures: int
    """Jobs that raised: a bug in a tier. It is logged and never fatal."""


class TierStatus(msgspec.Struct, frozen=True):
    """RAM or one lower tier of one size class."""

    tier: str
    capacity: int
    held: int
    """In RAM: chunks that are ready to be served."""
    loads: int
    """Chunks served from here: by RAM at once, by a lower tier into RAM."""
    misses: int
    """Chunks that counted as held and could not be read: they were bad, somebody else evicted
    them, or the tier could not be reached."""
    stores: int
    """Chunks put here: by engines into RAM (saves), from RAM into a lower tier (spills)."""
    refused: int
    """Chunks not taken: no free slot, a full lane, a full tier, or a tier with an open breaker."""
    late: int
    """Spills that were not done because the chunk had left RAM before its turn."""
    over_budget: int
    """Chunks not written because the tier may not write so much in a day."""
    evicted: int
    """Chunks that left to make room."""
    evicted_unread: int
    """Chunks written and deleted without ever having been read: wear of the device for nothing."""
    failed: int
    """Calls that failed with an I/O or network error."""
    corrupt: int
    """Chunks whose checksum did not match. Never served."""
    bytes_read: int
    bytes_written: int
    hit_tokens: int
    """Tokens of prompts that engines were given from here."""
    lifetime_bytes: int
    """NVMe: what was written in the life of the folder, this start included. Else 0."""
    drive_writes_per_day: float
    """NVMe: how often the capacity was written in a day, on average since the start. A first day
    that is not over counts as a whole one. Else 0."""
    open_breakers: int
    """Nodes of a networked tier that are not asked now because they failed."""
    breaker_trips: int
    owed_deletes: int
    """Deletes that wait until the tier can be reached."""
    lane: LaneStatus | None
    """None for RAM."""
    what_if: dict[str, float]
    """The part of the asked chunks that an LRU of another size would have hit, by its size as a
    multiple of this one. Empty before anything is asked for."""
    what_if_error: float
    """The largest standard error of these, where only a part of the sessions is followed. Else
    0."""


class TimingStatus(msgspec.Struct, frozen=True):
    """One histogram."""

    what: str
    """lookup, load_wait, load, save, promotion or spill."""
    tier: str
    """Empty where it belongs to no tier."""
    counts: list[int]
    """By bucket, not cumulated. Bucket i is up to 2 ** (10 + i) nanoseconds. The last one is all
    above."""
    seconds: list[float]
    """The sum of the durations by bucket."""


class SizeClassStatus(msgspec.Struct, frozen=True):
    """One chunk size with the Store for it."""

    slot_bytes: int
    slots: int
    free: int
    filling: int
    pinned: int
    """Slots, filling or ready, that somebody reads, waits for or writes to a lower tier."""
    namespaces: int
    """Tenants and models that came last, at most 4,096."""
    asked: int
    """Chunks that loads named. The loads of all tiers / asked is the hit rate. An engine on another
    host asks twice."""
    asked_tokens: int
    """Tokens of whole chunks that prompts asked for and engines did not have themselves. A prompt
    counts once, when it gets its blocks."""
    ideal_tokens: int
    """Those that were hits, and those that would have been if nothing had ever left for want of
    room: their chunks were held once, and that is remembered. As many chunks that left are
    remembered as twice what all tiers hold, at most 1,048,576, and none from before the start."""
    loads_refused: int
    """Chunks that a lower tier held but for which RAM had no free slot."""
    promotions_refused: int
    """Chunks that a lower tier held but whose lane was full."""
    declined: dict[str, int]
    """Chunks that could be had but were computed, by reason. Mostly because that was faster."""
    missed: dict[str, int]
    """Chunks that loads named and could not have, by reason: see
    :mod:`kvtier.store.reports.miss_reasons`. Only engines know salt, adapter and media."""
    zero_hits: str
    """Why no asked chunk has been a hit for a long time, in words. Empty while all is well."""
    policy: str
    """The setting of RAM's eviction order that is in use now."""
    policy_asked: int
    """Chunks that were tried with each setting. ``policy_hits`` counts how many each would have
    hit."""
    policy_hits: dict[str, int]
    audited: int
    """Loaded chunks that were compared with their copy in a lower tier."""
    timings: list[TimingStatus]
    """How long lookups, loads, waits before loads, saves, promotions and spills took."""
    audit_mismatches: int
    """Those of them that had other bytes: bad memory or a bug. They are dropped everywhere."""
    tiers: list[TierStatus]
    """RAM first."""
    hints_over: int = 0
    """Hints that said that a session is over."""
    recorded: int = 0
    """Prompts and hints that the process has recorded, of all chunk sizes."""
    unrecorded: int = 0
    """Those that could not be recorded: the queue was full, or the folder could not be written."""


class Measured(Protocol):
    """What :func:`read` asks of a Store."""

    pool: Pool
    lower: list[LowerTier]
    timings: Timings

    @property
    def slots(self) -> int: ...

    @property
    def age_s(self) -> float: ...

    def stats(self) -> dict[str, int]: ...

    def what_if(self) -> dict[str, list[Point]]: ...


def read(store: Measured, namespaces: int = 0, zero_hits: str = "") -> SizeClassStatus:
    """Any thread. No walk over chunks: these are counts that are kept."""
    stats = Counter(store.stats())
    counts: Callable[[str], int] = stats.__getitem__
    curves, policies = store.what_if(), _by_reason(stats, "policy_hits_")
    lower = [_tier(store, each, counts, _curve(curves[each.tier.name])) for each in store.lower]
    return SizeClassStatus(
        slot_bytes=store.pool.slot_bytes,
        slots=store.slots,
        free=counts("ram_free"),
        filling=counts("ram_filling"),
        pinned=counts("ram_pinned"),
        namespaces=namespaces,
        asked=counts("load_asked"),
        asked_tokens=counts("asked_tokens"),
        ideal_tokens=counts("ideal_tokens"),
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
        tiers=[_ram(store, counts, _curve(curves[RAM])), *lower],
        hints_over=counts("hints_over"),
        recorded=counts("recorded"),
        unrecorded=counts("unrecorded"),
    )


def _curve(points: Sequence[Point]) -> dict[str, Any]:
    return {
        "what_if": {f"{point.scale:g}": round(point.ratio, 6) for point in points},
        "what_if_error": round(max((point.error for point in points), default=0.0), 6),
    }


def _by_reason(stats: Mapping[str, int], kind: str) -> dict[str, int]:
    return {
        name.removeprefix(kind): count for name, count in stats.items() if name.startswith(kind)
    }


def _ram(store: Measured, counts: Callable[[str], int], curve: dict[str, Any]) -> TierStatus:
    nothing = dict.fromkeys(TierStatus.__struct_fields__, 0)
    size = store.pool.slot_bytes
    known: dict[str, Any] = {
        "tier": RAM,
        "lane": None,
        "capacity": store.slots,
        "held": counts("ram_ready"),
        "loads": counts("ram_loaded"),
        "stores": counts("saved"),
        "refused": counts("save_refused"),
        "evicted": counts("ram_evicted"),
        "bytes_read": counts("ram_loaded") * size,
        "bytes_written": counts("saved") * size,
        "hit_tokens": counts("ram_hit_tokens"),
    }
    return TierStatus(**(nothing | known | curve))


def _tier(
    store: Measured, lower: LowerTier, counts: Callable[[str], int], curve: dict[str, Any]
) -> TierStatus:
    tier, lane, capacity = lower.tier, lower.lane, lower.chunks.capacity
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
        hit_tokens=counts(f"{name}_hit_tokens"),
        lifetime_bytes=own["lifetime_bytes"],
        drive_writes_per_day=_wear(own, capacity * store.pool.slot_bytes, store.age_s),
        open_breakers=tier.open_breakers,
        breaker_trips=own["breaker_trips"],
        owed_deletes=tier.owed,
        lane=LaneStatus(*lane.queued, lane.failures),
        **curve,
    )


def _wear(own: Mapping[str, int], room: int, age_s: float) -> float:
    """Drive writes per day, of a tier that counts what its device has been given."""
    if "lifetime_bytes" not in own or not room:
        return 0.0
    return own["bytes_written"] / room / max(1.0, age_s / _DAY_S)
