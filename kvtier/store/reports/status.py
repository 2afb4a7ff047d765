"""Status of a Store, read from the objects' own counts and kept nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvtier.core.lookup import RAM
from kvtier.core.pool import Pool
from kvtier.core.report import LaneStatus, SizeClassStatus, TierStatus, TimingStatus
from kvtier.eviction.what_if import Point
from kvtier.store.lower.lower_tier import LowerTier
from kvtier.store.observers.follower import Follower
from kvtier.store.observers.timings import Timings

_DAY_S = 86_400.0
_DECLINED, _MISSED = "declined_", "missed_"
_FAILED = ("failed_reads", "failed_writes", "failed_finds", "failed_deletes", "failed")


class Measured(Protocol):
    """Part of a Store that :func:`read` needs."""

    pool: Pool
    lower: list[LowerTier]
    timings: Timings
    follower: Follower

    clock: Callable[[], float]
    begun: float

    @property
    def most_held(self) -> int: ...

    def stats(self) -> dict[str, int]: ...


def read(
    store: Measured, namespaces: int = 0, zero_hits: str = "", models: Sequence[str] = ()
) -> SizeClassStatus:
    """Return a Store's status from counts that are kept, without a walk over chunks. Any thread."""
    stats = Counter(store.stats())
    counts: Callable[[str], int] = stats.__getitem__
    curve = store.follower.read_curve
    policies = _by_reason(stats, "policy_hits_")
    lower = [_tier(store, each, counts, _curve(curve(each.tier.name))) for each in store.lower]
    return SizeClassStatus(
        slot_bytes=store.pool.slot_bytes,
        slots=store.most_held,
        free=counts("ram_free"),
        filling=counts("ram_filling"),
        pinned=counts("ram_pinned"),
        namespaces=namespaces,
        asked=counts("load_asked"),
        asked_tokens=counts("asked_tokens"),
        ideal_tokens=counts("ideal_tokens"),
        asked_compute=counts("asked_compute"),
        saved_compute=counts("saved_compute"),
        loads_refused=counts("load_refused"),
        promotions_refused=counts("promotion_refused"),
        declined=_by_reason(stats, _DECLINED),
        missed=_by_reason(stats, _MISSED),
        zero_hits=zero_hits,
        policy=(list(policies) or ["lru"])[counts("policy_now")],
        policy_asked=counts("policy_asked"),
        policy_hits=policies,
        policy_saved=_by_reason(stats, "policy_saved_"),
        audited=counts("audited"),
        timings=[
            TimingStatus(what, tier, histogram.counts, histogram.sums)
            for what, tier, histogram in store.timings.each()
        ],
        audit_mismatches=counts("audit_mismatch"),
        tiers=[_ram(store, counts, _curve(curve(RAM))), *lower],
        hints_over=counts("hints_over"),
        recorded=counts("recorded"),
        unrecorded=counts("unrecorded"),
        models=list(models),
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
        "capacity": store.most_held,
        "held": counts("ram_ready"),
        "loads": counts("ram_loaded"),
        "stores": counts("saved"),
        "refused": counts("save_refused"),
        "evicted": counts("ram_evicted"),
        "bytes_read": counts("ram_loaded") * size,
        "bytes_written": counts("saved") * size,
        "hit_tokens": counts("ram_hit_tokens"),
        "disks": [],
    }
    return TierStatus(**(nothing | known | curve))


def _tier(
    store: Measured, lower: LowerTier, counts: Callable[[str], int], curve: dict[str, Any]
) -> TierStatus:
    tier, lane, capacity = lower.tier, lower.lane, lower.chunks.capacity
    name, age_s = tier.name, store.clock() - store.begun
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
        drive_writes_per_day=_wear(own, capacity * store.pool.slot_bytes, age_s),
        open_breakers=tier.open_breakers,
        breaker_trips=own["breaker_trips"],
        owed_deletes=tier.owed,
        lane=LaneStatus(*lane.queued, lane.failures),
        disks=list(tier.by_disk),
        **curve,
    )


def _wear(own: Mapping[str, int], room: int, age_s: float) -> float:
    """Return drive writes a day, or 0 for a tier that does not count its device's writes."""
    if "lifetime_bytes" not in own or not room:
        return 0.0
    return own["bytes_written"] / room / max(1.0, age_s / _DAY_S)
