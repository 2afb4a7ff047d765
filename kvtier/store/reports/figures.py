"""Figures: every metric of a Store, one row each. A server's ``/metrics`` and an engine's (vLLM's)
are made of the same rows, so they have the same names, kinds and help texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvtier.store.reports.status import SizeClassStatus, TierStatus

GAUGE, COUNTER = "gauge", "counter"
PREFIX = "kvtier_"
MISSED = ("cold", "evicted", "corrupt", "forgotten", "tier_down", "saving")
"""Reasons that a Store can tell. Only engines know salt, adapter and media."""
DECLINED = ("slower", "unasked", "deadline", "refused")


class TierFigure(NamedTuple):
    """A metric by tier: its name without the prefix, gauge or counter, its help text, and where its
    value is read. ``lower_only``: RAM does not have it."""

    name: str
    kind: str
    text: str
    value: Callable[[SizeClassStatus, TierStatus], float]
    lower_only: bool = True


class StoreFigure(NamedTuple):
    """A metric of the whole Store."""

    name: str
    kind: str
    text: str
    value: Callable[[SizeClassStatus], float]


TIER_FIGURES = (
    TierFigure(
        "capacity_chunks", GAUGE, "Room, in chunks.", lambda _, t: t.capacity, lower_only=False
    ),
    TierFigure(
        "capacity_bytes",
        GAUGE,
        "Room, in bytes.",
        lambda r, t: t.capacity * r.slot_bytes,
        lower_only=False,
    ),
    TierFigure(
        "held_chunks", GAUGE, "Chunks held; in RAM: ready.", lambda _, t: t.held, lower_only=False
    ),
    TierFigure(
        "held_bytes",
        GAUGE,
        "Bytes held; in RAM: ready.",
        lambda r, t: t.held * r.slot_bytes,
        lower_only=False,
    ),
    TierFigure(
        "loads", COUNTER, "Chunks served from here.", lambda _, t: t.loads, lower_only=False
    ),
    TierFigure(
        "stores",
        COUNTER,
        "Chunks put here: saves in RAM, spills in lower tiers.",
        lambda _, t: t.stores,
        lower_only=False,
    ),
    TierFigure(
        "refusals",
        COUNTER,
        "Chunks not taken: no room, or no time.",
        lambda _, t: t.refused,
        lower_only=False,
    ),
    TierFigure(
        "load_misses",
        COUNTER,
        "Chunks counted as held that could not be read.",
        lambda _, t: t.misses,
    ),
    TierFigure(
        "late_spills", COUNTER, "Chunks that left RAM before their spill.", lambda _, t: t.late
    ),
    TierFigure(
        "over_budget",
        COUNTER,
        "Chunks not written, to spare the device.",
        lambda _, t: t.over_budget,
    ),
    TierFigure(
        "evictions",
        COUNTER,
        "Chunks that left to make room.",
        lambda _, t: t.evicted,
        lower_only=False,
    ),
    TierFigure(
        "evicted_unread",
        COUNTER,
        "Chunks written and deleted unread.",
        lambda _, t: t.evicted_unread,
    ),
    TierFigure(
        "failures",
        COUNTER,
        "Calls that failed with an I/O or network error.",
        lambda _, t: t.failed,
    ),
    TierFigure(
        "corrupt_chunks",
        COUNTER,
        "Checksums that did not match; never served.",
        lambda _, t: t.corrupt,
    ),
    TierFigure(
        "read_bytes",
        COUNTER,
        "Bytes read; in RAM: by loads.",
        lambda _, t: t.bytes_read,
        lower_only=False,
    ),
    TierFigure(
        "written_bytes",
        COUNTER,
        "Bytes written; in RAM: by saves.",
        lambda _, t: t.bytes_written,
        lower_only=False,
    ),
    TierFigure(
        "open_breakers",
        GAUGE,
        "Nodes that are not asked now because they failed.",
        lambda _, t: t.open_breakers,
    ),
    TierFigure("breaker_trips", COUNTER, "Times a breaker opened.", lambda _, t: t.breaker_trips),
    TierFigure(
        "owed_deletes",
        GAUGE,
        "Deletes that wait until the tier can be reached.",
        lambda _, t: t.owed_deletes,
    ),
)
STORE_FIGURES = (
    StoreFigure(
        "pinned_slots", GAUGE, "Slots that somebody reads, spills or waits for.", lambda r: r.pinned
    ),
    StoreFigure("asked_chunks", COUNTER, "Chunks that loads named.", lambda r: r.asked),
    StoreFigure(
        "load_refusals",
        COUNTER,
        "Chunks in a lower tier for which RAM had no slot.",
        lambda r: r.loads_refused,
    ),
    StoreFigure(
        "promotion_refusals",
        COUNTER,
        "Chunks that a full lane refused.",
        lambda r: r.promotions_refused,
    ),
    StoreFigure(
        "audited_chunks",
        COUNTER,
        "Loaded chunks compared with their copy in a lower tier.",
        lambda r: r.audited,
    ),
    StoreFigure(
        "audit_mismatches",
        COUNTER,
        "Audited chunks that had other bytes.",
        lambda r: r.audit_mismatches,
    ),
    StoreFigure(
        "unrecorded",
        COUNTER,
        "Prompts and hints that could not be recorded, of all chunk sizes.",
        lambda r: r.unrecorded,
    ),
)
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
"""What is measured -> its help text. ``load``, ``promotion`` and ``spill`` are by tier."""
BY_TIER = ("load", "promotion", "spill")


def seconds(what: str) -> str:
    """The name of the histogram."""
    return f"{PREFIX}{what}_seconds"
