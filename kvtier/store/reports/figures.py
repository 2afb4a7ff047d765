"""Figures: every metric of a Store, one row each. A server's ``/metrics`` and an engine's (vLLM's)
are made of the same rows, so they have the same names, kinds and help texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvtier.core.lookup import RAM
from kvtier.core.report import DiskStatus, SizeClassStatus, TierStatus
from kvtier.eviction.what_if import SCALES

GAUGE, COUNTER = "gauge", "counter"
PREFIX = "kvtier_"
MISSED = ("cold", "other_chunk_size", "evicted", "corrupt", "forgotten", "tier_down", "saving")
"""Reasons that a Store can tell. Only engines know salt, adapter, media and unnamed."""
QUEUES = ("reads", "writes")
DECLINED = ("slower", "unasked", "deadline", "refused")


def every(_tier: str) -> bool:
    return True


def below_ram(tier: str) -> bool:
    return tier != RAM


def on_a_disk(tier: str) -> bool:
    """True for a tier that wears out."""
    return tier == "nvme"


class Figure(NamedTuple):
    """A metric of a Store.

    ``values``: the values of its labels -> the metric's. ``tiers``: of a metric by tier, which ones
    have it."""

    name: str
    """Without the prefix."""
    kind: str
    text: str
    labels: tuple[str, ...]
    values: Callable[[SizeClassStatus], Mapping[tuple[str, ...], float]]
    tiers: Callable[[str], bool] = every


def of_tier(
    name: str,
    kind: str,
    text: str,
    value: Callable[[SizeClassStatus, TierStatus], float],
    tiers: Callable[[str], bool] = below_ram,
) -> Figure:
    """A metric by tier."""

    def values(report: SizeClassStatus) -> Mapping[tuple[str, ...], float]:
        return {(tier.tier,): value(report, tier) for tier in report.tiers if tiers(tier.tier)}

    return Figure(name, kind, text, ("tier",), values, tiers)


def of_store(name: str, kind: str, text: str, value: Callable[[SizeClassStatus], float]) -> Figure:
    """A metric of the whole Store."""
    return Figure(name, kind, text, (), lambda report: {(): value(report)})


def of_disk(name: str, kind: str, text: str, value: Callable[[DiskStatus], float]) -> Figure:
    """A metric by disk, of tiers on several."""

    def values(report: SizeClassStatus) -> Mapping[tuple[str, ...], float]:
        return {(tier.tier, one.disk): value(one) for tier in report.tiers for one in tier.disks}

    return Figure(f"disk_{name}", kind, text, ("tier", "disk"), values)


WHAT_IF = "whatif_hit_ratio"
WHAT_IF_SCALES = tuple(f"{scale:g}" for scale in SCALES)


TIER_FIGURES = (
    of_tier("capacity_chunks", GAUGE, "Room, in chunks.", lambda _, t: t.capacity, tiers=every),
    of_tier(
        "capacity_bytes",
        GAUGE,
        "Room, in bytes.",
        lambda r, t: t.capacity * r.slot_bytes,
        tiers=every,
    ),
    of_tier("held_chunks", GAUGE, "Chunks held; in RAM: ready.", lambda _, t: t.held, tiers=every),
    of_tier(
        "held_bytes",
        GAUGE,
        "Bytes held; in RAM: ready.",
        lambda r, t: t.held * r.slot_bytes,
        tiers=every,
    ),
    of_tier("loads", COUNTER, "Chunks served from here.", lambda _, t: t.loads, tiers=every),
    of_tier(
        "stores",
        COUNTER,
        "Chunks put here: saves in RAM, spills in lower tiers.",
        lambda _, t: t.stores,
        tiers=every,
    ),
    of_tier(
        "refusals",
        COUNTER,
        "Chunks not taken: no room, or no time.",
        lambda _, t: t.refused,
        tiers=every,
    ),
    of_tier(
        "load_misses",
        COUNTER,
        "Chunks counted as held that could not be read.",
        lambda _, t: t.misses,
    ),
    of_tier(
        "late_spills", COUNTER, "Chunks that left RAM before their spill.", lambda _, t: t.late
    ),
    of_tier(
        "over_budget",
        COUNTER,
        "Chunks not written, to spare the device.",
        lambda _, t: t.over_budget,
    ),
    of_tier(
        "evictions", COUNTER, "Chunks that left to make room.", lambda _, t: t.evicted, tiers=every
    ),
    of_tier(
        "evicted_unread",
        COUNTER,
        "Chunks written and deleted unread.",
        lambda _, t: t.evicted_unread,
    ),
    of_tier(
        "failures",
        COUNTER,
        "Calls that failed with an I/O or network error.",
        lambda _, t: t.failed,
    ),
    of_tier(
        "corrupt_chunks",
        COUNTER,
        "Checksums that did not match; never served.",
        lambda _, t: t.corrupt,
    ),
    of_tier(
        "read_bytes",
        COUNTER,
        "Bytes read; in RAM: by loads.",
        lambda _, t: t.bytes_read,
        tiers=every,
    ),
    of_tier(
        "written_bytes",
        COUNTER,
        "Bytes written; in RAM: by saves.",
        lambda _, t: t.bytes_written,
        tiers=every,
    ),
    of_tier(
        "hit_tokens",
        COUNTER,
        "Tokens of prompts that engines were given from here.",
        lambda _, t: t.hit_tokens,
        tiers=every,
    ),
    of_tier(
        "lifetime_written_bytes",
        GAUGE,
        "Bytes written in the life of the folder.",
        lambda _, t: t.lifetime_bytes,
        tiers=on_a_disk,
    ),
    of_tier(
        "drive_writes_per_day",
        GAUGE,
        "How often the capacity was written in a day, on average since the start.",
        lambda _, t: t.drive_writes_per_day,
        tiers=on_a_disk,
    ),
    of_tier(
        "open_breakers",
        GAUGE,
        "Nodes that are not asked now because they failed.",
        lambda _, t: t.open_breakers,
    ),
    of_tier("breaker_trips", COUNTER, "Times a breaker opened.", lambda _, t: t.breaker_trips),
    of_tier(
        "owed_deletes",
        GAUGE,
        "Deletes that wait until the tier can be reached.",
        lambda _, t: t.owed_deletes,
    ),
)
DISK_FIGURES = (
    of_disk("away", GAUGE, "1 while this one of several disks is left alone.", lambda d: d.away),
    of_disk("held_chunks", GAUGE, "Chunks that this disk can serve.", lambda d: d.held),
    of_disk("read_bytes", COUNTER, "Bytes read from this disk.", lambda d: d.bytes_read),
    of_disk("written_bytes", COUNTER, "Bytes written to this disk.", lambda d: d.bytes_written),
    of_disk("failed_reads", COUNTER, "Reads that failed on this disk.", lambda d: d.failed_reads),
    of_disk("failed_writes", COUNTER, "Writes that failed on it.", lambda d: d.failed_writes),
)
STORE_FIGURES = (
    of_store(
        "pinned_slots", GAUGE, "Slots that are read, spilled or waited for.", lambda r: r.pinned
    ),
    of_store("asked_chunks", COUNTER, "Chunks that loads named.", lambda r: r.asked),
    of_store(
        "asked_tokens",
        COUNTER,
        "Tokens of whole chunks that prompts asked for.",
        lambda r: r.asked_tokens,
    ),
    of_store(
        "ideal_tokens",
        COUNTER,
        "Those that are hits, or would be if nothing had left for want of room.",
        lambda r: r.ideal_tokens,
    ),
    of_store(
        "asked_compute_tokens",
        COUNTER,
        "What asked tokens take to compute, in tokens at the beginning of a prompt.",
        lambda r: r.asked_compute,
    ),
    of_store(
        "saved_compute_tokens", COUNTER, "That of those that were hits.", lambda r: r.saved_compute
    ),
    of_store(
        "load_refusals",
        COUNTER,
        "Chunks in a lower tier for which RAM had no slot.",
        lambda r: r.loads_refused,
    ),
    of_store(
        "promotion_refusals",
        COUNTER,
        "Chunks that a full lane refused.",
        lambda r: r.promotions_refused,
    ),
    of_store(
        "audited_chunks",
        COUNTER,
        "Loaded chunks compared with their copy in a lower tier.",
        lambda r: r.audited,
    ),
    of_store(
        "audit_mismatches",
        COUNTER,
        "Audited chunks that had other bytes.",
        lambda r: r.audit_mismatches,
    ),
    of_store(
        "policy_asked_chunks",
        COUNTER,
        "Chunks that each setting of RAM's eviction order was tried with.",
        lambda r: r.policy_asked,
    ),
    of_store(
        "session_ends", COUNTER, "Hints that said that a session is over.", lambda r: r.hints_over
    ),
    of_store(
        "unrecorded",
        COUNTER,
        "Prompts and hints that could not be recorded, of all chunk sizes.",
        lambda r: r.unrecorded,
    ),
)
LABELLED_FIGURES = (
    Figure(
        "policy_hit_chunks",
        COUNTER,
        "Those that the setting would have hit.",
        ("setting",),
        lambda r: {(name,): count for name, count in r.policy_hits.items()},
    ),
    Figure(
        "policy_saved_chunks",
        COUNTER,
        "What those would have saved, in chunks at the beginning of a prompt.",
        ("setting",),
        lambda r: {(name,): count for name, count in r.policy_saved.items()},
    ),
    Figure(
        "policy_rules",
        GAUGE,
        "1 for the setting in use.",
        ("setting",),
        lambda r: {(name,): float(name == r.policy) for name in r.policy_hits},
    ),
    Figure(
        WHAT_IF,
        GAUGE,
        "Part of the asked chunks that an LRU of so many times the size would have hit.",
        ("tier", "scale"),
        lambda r: {(t.tier, scale): ratio for t in r.tiers for scale, ratio in what_if(t).items()},
    ),
)
"""Hits that other settings of eviction, and other sizes, would have had."""
LANE_FIGURES = (
    Figure(
        "lane_queued",
        GAUGE,
        "Jobs that wait in front of a tier.",
        ("tier", "queue"),
        lambda r: {
            (tier.tier, queue): count
            for tier in r.tiers
            if tier.lane is not None
            for queue, count in zip(
                QUEUES, (tier.lane.queued_reads, tier.lane.queued_writes), strict=True
            )
        },
    ),
    Figure(
        "lane_failures",
        COUNTER,
        "Jobs that raised: a bug.",
        ("tier",),
        lambda r: {(t.tier,): t.lane.failures for t in r.tiers if t.lane is not None},
    ),
)
OF_ENGINES = (*STORE_FIGURES, *TIER_FIGURES, *DISK_FIGURES, *LABELLED_FIGURES, *LANE_FIGURES)
"""Figures that an engine's metrics have too."""
TIMINGS = {
    "lookup": "How long it took to say how much of a prompt can be served.",
    "load_wait": "From the claim of a prompt's chunks until no promotion of them was left.",
    "load": (
        "From the claim of a prompt's chunks to the end of their copy, by the slowest tier one "
        "came from."
    ),
    "save": "From the reservation of a prompt's slots until they were filled.",
    "promotion": (
        "From the request for a chunk of a lower tier until it was in RAM, with its queue time."
    ),
    "spill": "How long the write of one chunk to a lower tier took.",
}
"""Timing -> its help text. ``load``, ``promotion`` and ``spill`` are by tier."""
BY_TIER = ("load", "promotion", "spill")


def what_if(tier: TierStatus) -> Mapping[str, float]:
    """The curve by scale, which is 0 before anything is asked for."""
    return dict.fromkeys(WHAT_IF_SCALES, 0.0) | tier.what_if


def seconds(what: str) -> str:
    """The name of the histogram."""
    return f"{PREFIX}{what}_seconds"
