"""Report: what a Store says of itself, as data. Numbers count chunks since the start unless they
say otherwise.

A server's ``/v1/stats`` has one report for each chunk size. An engine gives vLLM's metrics the same
report of its own Store. :mod:`kvtier.store.reports.status` makes it.
"""

from __future__ import annotations

import msgspec

FIRST_BIT, PLACES = 10, 26
BOUNDS = tuple(2**bit / 1e9 for bit in range(FIRST_BIT, FIRST_BIT + PLACES))
"""Upper bounds of buckets in seconds, 1 microsecond to 34 s. One more bucket has what is longer."""


class LaneStatus(msgspec.Struct, frozen=True):
    """The threads and queues in front of one tier."""

    queued_reads: int
    queued_writes: int
    failures: int
    """Number of jobs that raised, which is a bug in a tier. It is logged and never fatal."""


class DiskStatus(msgspec.Struct, frozen=True):
    """One of several disks of a tier."""

    disk: str
    """Folder on the disk."""
    away: bool
    """Whether the disk is left alone because it failed. The trouble says why."""
    held: int
    """Chunks that it can serve now."""
    bytes_read: int
    bytes_written: int
    failed_reads: int
    failed_writes: int


class TierStatus(msgspec.Struct, frozen=True):
    """RAM or one lower tier of one size class."""

    tier: str
    capacity: int
    held: int
    """Chunks in the tier; in RAM those that are ready to be served."""
    loads: int
    """Chunks served from here: by RAM at once, by a lower tier into RAM."""
    misses: int
    """Chunks that counted as held and could not be read: they were bad, another engine evicted
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
    """Bytes written in the life of an NVMe folder, this start included. 0 for other tiers."""
    drive_writes_per_day: float
    """Capacities written a day to NVMe since the start; a first day counts as whole. Else 0."""
    open_breakers: int
    """Nodes of a networked tier that are not asked now because they failed."""
    breaker_trips: int
    owed_deletes: int
    """Deletes that wait until the tier can be reached."""
    lane: LaneStatus | None
    """Threads and queues of the tier; None for RAM."""
    what_if: dict[str, float]
    """The part of the asked chunks that an LRU of another size would have hit, by its size as a
    multiple of this one. Empty before anything is asked for."""
    what_if_error: float
    """Largest standard error of ``what_if``, where only some sessions are followed. Else 0."""
    disks: list[DiskStatus] = []
    """Disks of a tier that is on several, else empty."""


class TimingStatus(msgspec.Struct, frozen=True):
    """One histogram."""

    what: str
    """Name of what was timed: lookup, load_wait, load, save, promotion or spill."""
    tier: str
    """Name of the tier, empty if it belongs to none."""
    counts: list[int]
    """Number in each bucket, not cumulated. Bucket i ends at 2 ** (10 + i) ns, the last never."""
    seconds: list[float]
    """Sum of the durations in each bucket."""


class SizeClassStatus(msgspec.Struct, frozen=True):
    """One chunk size with the Store for it."""

    slot_bytes: int
    slots: int
    free: int
    filling: int
    pinned: int
    """Slots, filling or ready, that are read, waited for or written to a lower tier."""
    namespaces: int
    """Tenants and models that came last, at most 4,096."""
    asked: int
    """Chunks that loads named. The loads of all tiers / asked is the hit rate. An engine on another
    host asks twice."""
    asked_tokens: int
    """Tokens of whole chunks that prompts asked for and engines did not have themselves. A prompt
    counts once, when it gets its blocks."""
    ideal_tokens: int
    """Tokens that were hits, and those that would have been if nothing had ever left for want of
    room: their chunks were held once, and that is remembered. As many chunks that left are
    remembered as twice what all tiers hold, at most 1,048,576, and none from before the start."""
    asked_compute: int
    """Compute of ``asked_tokens``, in tokens at a prompt's beginning: a late token looks back at
    more than an early one. For the engine's model if it is known, and on a server for one of 8
    billion parameters."""
    saved_compute: int
    """Part of ``asked_compute`` that was for hits."""
    loads_refused: int
    """Chunks that a lower tier held but for which RAM had no free slot."""
    promotions_refused: int
    """Chunks that a lower tier held but whose lane was full."""
    declined: dict[str, int]
    """Chunks that could be had but were computed, by reason. Mostly because that was faster."""
    missed: dict[str, int]
    """Chunks that loads named and could not have, by reason, see
    :mod:`kvtier.store.reports.miss_reasons`. Only engines know salt, adapter, media and unnamed."""
    zero_hits: str
    """Reason why no asked chunk has been a hit for a long time. Empty while all is well."""
    policy: str
    """Setting of RAM's eviction order that is in use now."""
    policy_asked: int
    """Chunks tried with each setting. ``policy_hits`` counts how many each would have hit."""
    policy_hits: dict[str, int]
    policy_saved: dict[str, int]
    """Compute that those hits save, in chunks at a prompt's start. The setting with most rules."""
    audited: int
    """Loaded chunks that were compared with their copy in a lower tier."""
    timings: list[TimingStatus]
    audit_mismatches: int
    """Audited chunks that had other bytes: bad memory or a bug. They are dropped everywhere."""
    tiers: list[TierStatus]
    """RAM and the lower tiers, RAM first."""
    hints_over: int = 0
    recorded: int = 0
    """Prompts and hints that the process has recorded, of all chunk sizes."""
    unrecorded: int = 0
    """Prompts not recorded: the queue was full, or the folder could not be written."""
    models: list[str] = []
    """Ends of the names of the 4 models whose engines came last to a server."""
