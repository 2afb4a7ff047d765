"""Figures: every metric of a Store, one row each. A server's ``/metrics`` and an engine's (vLLM's)
are made of the same rows, so they have the same names, kinds and help texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvtier.store.status import SizeClassStatus, TierStatus

GAUGE, COUNTER = "gauge", "counter"
PREFIX = "kvtier_"
MISSED = ("cold", "evicted", "corrupt", "forgotten", "tier_down", "saving")
"""Reasons that a Store can tell. Only engines know salt, adapter and media."""
DECLINED = ("slower", "unasked", "deadline", "refused")


class TierFigure(NamedTuple):
    """A metric by tier: its name without the prefix, gauge or counter, its help text, and where its
    value is read. ``below``: only lower tiers have it, RAM does not."""

    name: str
    kind: str
    text: str
    value: Callable[[SizeClassStatus, TierStatus], float]
    below: bool = True


class StoreFigure(NamedTuple):
    """A metric of the whole Store."""

    name: str
    kind: str
    text: str
    value: Callable[[SizeClassStatus], float]


TIER_FIGURES = (
    TierFigure("capacity_chunks", GAUGE, "Room, in chunks.", lambda _, t: t.capacity, below=False),
    TierFigure(
        "capacity_bytes",
        GAUGE,
        "Room, in bytes.",
        lambda r, t: t.capacity * r.slot_bytes,
        below=False,
    ),
    TierFigure(
        "held_chunks", GAUGE, "Chunks held; in RAM: ready.", lambda _, t: t.held, below=False
    ),
    TierFigure(
        "held_bytes",
        GAUGE,
        "Bytes held; in RAM: ready.",
        lambda r, t: t.held * r.slot_bytes,
        below=False,
    ),
    TierFigure("loads", COUNTER, "Chunks served from here.", lambda _, t: t.loads, below=False),
    TierFigure(
        "stores",
        COUNTER,
        ("Chunks put here: saves in RAM, spills below."),
        lambda _, t: t.stores,
        below=False,
    ),
    TierFigure(
        "refusals",
        COUNTER,
        ("Chunks not taken: no room, or no time."),
        lambda _, t: t.refused,
        below=False,
    ),
    TierFigure(
        "load_misses",
        COUNTER,
        ("Chunks counted as held that could not be read."),
        lambda _, t: t.misses,
    ),
    TierFigure(
        "late_spills", COUNTER, ("Chunks that left RAM before their spill."), lambda _, t: t.late
    ),
    TierFigure(
        "over_budget",
        COUNTER,
        ("Chunks not written to spare the device."),
        lambda _, t: t.over_budget,
    ),
    TierFigure(
        "evictions", COUNTER, "Chunks that left for room.", lambda _, t: t.evicted, below=False
    ),
    TierFigure(
        "evicted_unread",
        COUNTER,
        ("Chunks written and deleted unread."),
        lambda _, t: t.evicted_unread,
    ),
    TierFigure(
        "failures",
        COUNTER,
        ("Calls that failed with an I/O or network error."),
        lambda _, t: t.failed,
    ),
    TierFigure(
        "corrupt_chunks",
        COUNTER,
        ("Checksums that did not match; never served."),
        lambda _, t: t.corrupt,
    ),
    TierFigure(
        "read_bytes",
        COUNTER,
        "Bytes read; of RAM: by loads.",
        lambda _, t: t.bytes_read,
        below=False,
    ),
    TierFigure(
        "written_bytes",
        COUNTER,
        ("Bytes written; to RAM: by saves."),
        lambda _, t: t.bytes_written,
        below=False,
    ),
    TierFigure(
        "open_breakers",
        GAUGE,
        ("Nodes left alone now because they failed."),
        lambda _, t: t.open_breakers,
    ),
    TierFigure("breaker_trips", COUNTER, "Times a breaker opened.", lambda _, t: t.breaker_trips),
    TierFigure(
        "owed_deletes",
        GAUGE,
        ("Deletes that wait for the tier to be back."),
        lambda _, t: t.owed_deletes,
    ),
)
STORE_FIGURES = (
    StoreFigure("pinned_slots", GAUGE, "Slots in use by somebody.", lambda r: r.pinned),
    StoreFigure("asked_chunks", COUNTER, "Chunks that loads named.", lambda r: r.asked),
    StoreFigure(
        "load_refusals",
        COUNTER,
        ("Chunks held below that RAM had no slot for."),
        lambda r: r.loads_refused,
    ),
    StoreFigure(
        "promotion_refusals",
        COUNTER,
        ("Chunks that a full lane refused."),
        lambda r: r.promotions_refused,
    ),
    StoreFigure(
        "audited_chunks",
        COUNTER,
        ("Loaded chunks compared with their copy below."),
        lambda r: r.audited,
    ),
    StoreFigure(
        "audit_mismatches",
        COUNTER,
        ("Audited chunks that had other bytes."),
        lambda r: r.audit_mismatches,
    ),
)
TIMINGS = {
    "lookup": "How long it took to say how far a prompt can be served.",
    "load_wait": "From the claim of a prompt's chunks until none of them was on its way any more.",
    "load": (
        "From the claim of a prompt's chunks to the end of their copy, by the slowest tier one "
        "came from."
    ),
    "save": "From the reservation of a prompt's slots until they were filled.",
    "promotion": (
        "From the wish to have a chunk of a lower tier until it was in RAM, its queue included."
    ),
    "spill": "How long the write of one chunk to a lower tier took.",
}
"""What is measured -> its help text. ``load``, ``promotion`` and ``spill`` are by tier."""
BY_TIER = ("load", "promotion", "spill")


def seconds(what: str) -> str:
    """The name of the histogram."""
    return f"{PREFIX}{what}_seconds"
