"""Figures: every metric of a Store, one row each. A server's ``/metrics`` and an engine's (vLLM's)
are made of the same rows, and have the same names, kinds and help texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvtier.core.lookup import RAM
from kvtier.core.report import SizeClassStatus, TierStatus
from kvtier.eviction.what_if import SCALES

GAUGE, COUNTER = "gauge", "counter"
PREFIX = "kvtier_"
MISSED = ("cold", "other_chunk_size", "evicted", "corrupt", "forgotten", "tier_down", "saving")
"""Reasons of misses that a Store can tell. Only engines know salt, adapter, media and unnamed."""
QUEUES = ("reads", "writes")
DECLINED = ("slower", "unasked", "deadline", "refused")


def every(_tier: str) -> bool:
    return True


def below_ram(tier: str) -> bool:
    return tier != RAM


def on_a_disk(tier: str) -> bool:
    """Return whether the tier wears out."""
    return tier == "nvme"


class Figure(NamedTuple):
    """Metric of a Store.

    ``values``: returns the metric's values by its labels' values. ``tiers``: of a metric by tier,
    whether a tier has it."""

    name: str
    """Name without the prefix."""
    kind: str
    text: str
    labels: tuple[str, ...]
    values: Callable[[SizeClassStatus], Mapping[tuple[str, ...], float]]
    tiers: Callable[[str], bool] = every


Value = str | Callable[..., float]
"""Field of the report with a metric's value, or a function that computes it from the report."""


def _read(value: Value) -> Callable[..., float]:
    """Return the function that reads ``value`` of a report, or of its last part: a tier, a disk."""
    return value if callable(value) else lambda *told: float(getattr(told[-1], value))


def of_tier(name: str, kind: str, tiers: Callable[[str], bool], value: Value, text: str) -> Figure:
    read = _read(value)

    def values(report: SizeClassStatus) -> Mapping[tuple[str, ...], float]:
        return {(tier.tier,): read(report, tier) for tier in report.tiers if tiers(tier.tier)}

    return Figure(name, kind, text, ("tier",), values, tiers)


def of_store(name: str, kind: str, value: Value, text: str) -> Figure:
    read = _read(value)
    return Figure(name, kind, text, (), lambda report: {(): read(report)})


def of_label(
    name: str,
    kind: str,
    label: str,
    values: Callable[[SizeClassStatus], Mapping[str, float]],
    text: str,
) -> Figure:
    return Figure(
        name, kind, text, (label,), lambda report: {(k,): v for k, v in values(report).items()}
    )


def of_disk(name: str, kind: str, value: Value, text: str) -> Figure:
    read = _read(value)

    def values(report: SizeClassStatus) -> Mapping[tuple[str, ...], float]:
        return {(tier.tier, one.disk): read(one) for tier in report.tiers for one in tier.disks}

    return Figure(f"disk_{name}", kind, text, ("tier", "disk"), values)


WHAT_IF = "whatif_hit_ratio"
WHAT_IF_SCALES = tuple(f"{scale:g}" for scale in SCALES)
_CORRUPT = "Checksums that did not match; never served."
_HIT_TOKENS = "Tokens of prompts that engines were given from here."
_LIFETIME = "Bytes written in the life of the folder."
_AWAY = "Nodes that are not asked now because they failed."
_OWED = "Deletes that wait until the tier can be reached."
_PER_DAY = "How often the capacity was written in a day, on average since the start."
_TIERS: tuple[tuple[str, str, Callable[[str], bool], Value, str], ...] = (
    ("capacity_chunks", GAUGE, every, "capacity", "Room, in chunks."),
    ("capacity_bytes", GAUGE, every, lambda r, t: t.capacity * r.slot_bytes, "Room, in bytes."),
    ("held_chunks", GAUGE, every, "held", "Chunks held; in RAM: ready."),
    ("held_bytes", GAUGE, every, lambda r, t: t.held * r.slot_bytes, "Bytes held; in RAM: ready."),
    ("loads", COUNTER, every, "loads", "Chunks served from here."),
    ("stores", COUNTER, every, "stores", "Chunks put here: saves in RAM, spills in lower tiers."),
    ("refusals", COUNTER, every, "refused", "Chunks not taken: no room, or no time."),
    ("load_misses", COUNTER, below_ram, "misses", "Chunks counted as held that could not be read."),
    ("late_spills", COUNTER, below_ram, "late", "Chunks that left RAM before their spill."),
    ("over_budget", COUNTER, below_ram, "over_budget", "Chunks not written, to spare the device."),
    ("evictions", COUNTER, every, "evicted", "Chunks that left to make room."),
    ("evicted_unread", COUNTER, below_ram, "evicted_unread", "Chunks written and deleted unread."),
    ("failures", COUNTER, below_ram, "failed", "Calls that failed with an I/O or network error."),
    ("corrupt_chunks", COUNTER, below_ram, "corrupt", _CORRUPT),
    ("read_bytes", COUNTER, every, "bytes_read", "Bytes read; in RAM: by loads."),
    ("written_bytes", COUNTER, every, "bytes_written", "Bytes written; in RAM: by saves."),
    ("hit_tokens", COUNTER, every, "hit_tokens", _HIT_TOKENS),
    ("lifetime_written_bytes", GAUGE, on_a_disk, "lifetime_bytes", _LIFETIME),
    ("drive_writes_per_day", GAUGE, on_a_disk, "drive_writes_per_day", _PER_DAY),
    ("open_breakers", GAUGE, below_ram, "open_breakers", _AWAY),
    ("breaker_trips", COUNTER, below_ram, "breaker_trips", "Times a breaker opened."),
    ("owed_deletes", GAUGE, below_ram, "owed_deletes", _OWED),
)
TIER_FIGURES = tuple(of_tier(*row) for row in _TIERS)
DISK_FIGURES = (
    of_disk("away", GAUGE, "away", "1 while this one of several disks is left alone."),
    of_disk("held_chunks", GAUGE, "held", "Chunks that this disk can serve."),
    of_disk("read_bytes", COUNTER, "bytes_read", "Bytes read from this disk."),
    of_disk("written_bytes", COUNTER, "bytes_written", "Bytes written to this disk."),
    of_disk("failed_reads", COUNTER, "failed_reads", "Reads that failed on this disk."),
    of_disk("failed_writes", COUNTER, "failed_writes", "Writes that failed on it."),
)
_ASKED = "Tokens of whole chunks that prompts asked for."
_NO_SLOT = "Chunks in a lower tier for which RAM had no slot."
_AUDITED = "Loaded chunks compared with their copy in a lower tier."
_MISMATCHES = "Audited chunks that had other bytes."
_IDEAL = "Those that are hits, or would be if nothing had left for want of room."
_ASKED_COMPUTE = "What asked tokens take to compute, in tokens at the beginning of a prompt."
_TRIED = "Chunks that each setting of RAM's eviction order was tried with."
_UNRECORDED = "Prompts and hints that could not be recorded, of all chunk sizes."
STORE_FIGURES = (
    of_store("pinned_slots", GAUGE, "pinned", "Slots that are read, spilled or waited for."),
    of_store("asked_chunks", COUNTER, "asked", "Chunks that loads named."),
    of_store("asked_tokens", COUNTER, "asked_tokens", _ASKED),
    of_store("ideal_tokens", COUNTER, "ideal_tokens", _IDEAL),
    of_store("asked_compute_tokens", COUNTER, "asked_compute", _ASKED_COMPUTE),
    of_store("saved_compute_tokens", COUNTER, "saved_compute", "That of those that were hits."),
    of_store("load_refusals", COUNTER, "loads_refused", _NO_SLOT),
    of_store(
        "promotion_refusals", COUNTER, "promotions_refused", "Chunks that a full lane refused."
    ),
    of_store("audited_chunks", COUNTER, "audited", _AUDITED),
    of_store("audit_mismatches", COUNTER, "audit_mismatches", _MISMATCHES),
    of_store("policy_asked_chunks", COUNTER, "policy_asked", _TRIED),
    of_store("session_ends", COUNTER, "hints_over", "Hints that said that a session is over."),
    of_store("unrecorded", COUNTER, "unrecorded", _UNRECORDED),
)
_HIT = "Those that the setting would have hit."
_SAVED = "What those would have saved, in chunks at the beginning of a prompt."
_OTHER_SIZE = "Part of the asked chunks that an LRU of so many times the size would have hit."


def _in_use(report: SizeClassStatus) -> Mapping[str, float]:
    return {name: name == report.policy for name in report.policy_hits}


LABELLED_FIGURES = (
    of_label("policy_hit_chunks", COUNTER, "setting", lambda r: r.policy_hits, _HIT),
    of_label("policy_saved_chunks", COUNTER, "setting", lambda r: r.policy_saved, _SAVED),
    of_label("policy_rules", GAUGE, "setting", _in_use, "1 for the setting in use."),
    Figure(
        WHAT_IF,
        GAUGE,
        _OTHER_SIZE,
        ("tier", "scale"),
        lambda r: {(t.tier, scale): ratio for t in r.tiers for scale, ratio in what_if(t).items()},
    ),
)
"""Figures of eviction settings, and of the hits that other settings and sizes would have had."""


def _queued(report: SizeClassStatus) -> Mapping[tuple[str, ...], float]:
    return {
        (tier.tier, queue): count
        for tier in report.tiers
        if (lane := tier.lane) is not None
        for queue, count in zip(QUEUES, (lane.queued_reads, lane.queued_writes), strict=True)
    }


def _failures(report: SizeClassStatus) -> Mapping[str, float]:
    return {tier.tier: tier.lane.failures for tier in report.tiers if tier.lane is not None}


_QUEUED = "Jobs that wait in front of a tier."
LANE_FIGURES = (
    Figure("lane_queued", GAUGE, _QUEUED, ("tier", "queue"), _queued),
    of_label("lane_failures", COUNTER, "tier", _failures, "Jobs that raised: a bug."),
)
OF_ENGINES = (*STORE_FIGURES, *TIER_FIGURES, *DISK_FIGURES, *LABELLED_FIGURES, *LANE_FIGURES)
"""Figures that an engine's metrics have too."""
TIMINGS = {
    "lookup": "How long it took to say how much of a prompt can be served.",
    "load_wait": "From the claim of a prompt's chunks until no promotion of them was left.",
    "load": "From the claim of a prompt's chunks to the end of their copy, by the slowest tier one "
    "came from.",
    "save": "From the reservation of a prompt's slots until they were filled.",
    "promotion": "From the request for a chunk of a lower tier until it was in RAM, with its queue "
    "time.",
    "spill": "How long the write of one chunk to a lower tier took.",
}
"""Timing -> its help text. ``load``, ``promotion`` and ``spill`` are by tier."""
BY_TIER = ("load", "promotion", "spill")


def what_if(tier: TierStatus) -> Mapping[str, float]:
    """Return the tier's hit ratios by scale, which are 0 before anything is asked for."""
    return dict.fromkeys(WHAT_IF_SCALES, 0.0) | tier.what_if


def seconds(what: str) -> str:
    return f"{PREFIX}{what}_seconds"
