"""DiskSet: folders on several disks as one tier. Each folder is a whole :class:`NvmeTier`, as it is
alone, so a folder from before is one disk of a set, and warm.

A chunk lies whole on one disk, which is chosen when it is written. The chunks of a prompt are
spread, so one load reads from all disks. Pieces of one chunk on all disks would be read no sooner
than so, and one bad disk would cost all chunks.

A disk that fails, hangs or becomes far slower than the others is left alone, one that does not
answer at the start too. Its chunks are misses, its room leaves ``capacity``, and the others go on.
It is tried again on a thread of its own, and told with what it still holds. What is deleted
meanwhile is gone at once, and from the disk when it answers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey, coldest_first
from kvtier.core.errors import KVTierError, TierError
from kvtier.core.report import DiskStatus
from kvtier.core.tenant import UNOWNED, may
from kvtier.tiers.base import EVENTS, EventCounts, Tier
from kvtier.tiers.nvme.disks import servers_bytes
from kvtier.tiers.nvme.folder import is_silent
from kvtier.tiers.nvme.index import slots_within, table_bytes
from kvtier.tiers.nvme.set_disk import SetDisk
from kvtier.tiers.nvme.tier import NvmeTier

_LOG = logging.getLogger(__name__)
START_S, CLOSE_S = 10.0, 10.0
"""Longest that a start, or a close, waits for disks."""
_FIRST_PACE_S = 0.001
"""Pace of disks before any is known."""
_LATE_FACTOR = 4
"""Chunks by which a busy disk may fall behind before others get its chunks."""


class DiskPlace(NamedTuple):
    folder: Path
    bytes_: int
    most_calls: int
    """Calls at once. A disk that hangs holds so many threads of the lane."""


class DiskSet(Tier):
    """Raises TierError where no disk can be opened, and none hangs. ``lent`` and ``in_huge_pages``:
    see :class:`NvmeTier`.

    Threads: any number of lane threads. ``_lock`` guards the disks' states, and ``_admitting``, for
    one disk at a time, which chunks others have. No I/O under them.
    """

    name = "nvme"
    keeps_owners = True

    def __init__(
        self,
        places: Sequence[DiskPlace],
        slot_bytes: int,
        lent: bool = False,
        in_huge_pages: Callable[[memoryview], bool] = lambda _: False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock, self._admitting = threading.Lock(), threading.Lock()
        self._tried = threading.Condition(self._lock)
        self._lent, self._closed = lent, False

        def opened(place: DiskPlace, lent: bool) -> NvmeTier:
            folder, bytes_, _ = place
            return NvmeTier(folder, bytes_, slot_bytes, lent=lent, in_huge_pages=in_huge_pages)

        self.disks = [
            SetDisk(
                place.folder,
                partial(opened, place),
                place.most_calls,
                threading.Condition(self._lock),
                clock,
            )
            for place in places
        ]
        self._events = EventCounts(EVENTS, _LOG, "NVMe tier's disks")
        self._turn = 0.0
        self._lost: list[ChunkKey] = []
        self._found: list[tuple[SetDisk, Sequence[ChunkKey]]] = []
        self.capacity = 0
        self.chunk_room = slot_bytes
        self.fixed_room = sum(
            table_bytes(slots_within(place.bytes_, slot_bytes)) for place in places
        )
        self._try_again()
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        until = time.monotonic() + START_S
        with self._lock:
            while any(
                (disk.calls or disk.owed) and not is_silent(disk.folder) for disk in self.disks
            ) and ((left := until - time.monotonic()) > 0):
                self._tried.wait(left)
            away = [disk for disk in self.disks if disk.away]
            for disk in away:
                disk.leave_alone(disk.away)
        if len(away) == len(self.disks) and all(disk.idle for disk in away):
            self.close()
            raise TierError("; ".join(disk.away for disk in away))
        for disk in away:
            said = "the other disks serve without it, and it is tried again"
            _LOG.warning("NVMe tier %s: %s; %s", disk.folder, disk.away, said)

    # ---- chunks ----------------------------------------------------------------------------------

    def recovered(self) -> Sequence[ChunkKey]:
        with self._lock:
            found, self._found = self._found, []
        # of records without a stamp a disk's own order is known only
        return coldest_first(
            (key, (disk.well_tier.stamp(key), rank / len(held)))
            for disk, held in found
            for rank, key in enumerate(held)
            if disk.holds(key)
        )

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        self._try_again()
        if self._of(key) is not None:
            return True
        tried = [disk for disk in self.disks if key in disk.owed]
        while (disk := self._chosen(tried)) is not None:
            tried.append(disk)
            if (call := self._begin(disk)) is None:
                continue
            held = False
            try:
                held = disk.well_tier.write(key, data, owner)
            finally:
                kept = self._end(disk, call, moved=held, wrote=key)
            if held:
                return kept
        self._events.add("refused")
        return False

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        disk = self._of(key)
        if disk is None:
            self._events.add("misses")
            return None if any(disk.away and disk.holds(key) for disk in self.disks) else False
        if (call := self._begin(disk)) is None:
            return None
        held = False
        try:
            held = disk.well_tier.read(key, into)
        finally:
            self._end(disk, call, moved=held)
        return held

    def may_read(self, key: ChunkKey) -> bool:
        holding = [disk for disk in self.disks if disk.holds(key)]
        return not holding or any(disk.well() for disk in holding)

    def find(self, keys: Sequence[ChunkKey]) -> int:
        self._try_again()
        return next((at for at, key in enumerate(keys) if self._of(key) is None), len(keys))

    def delete(self, key: ChunkKey) -> None:
        for disk in self.disks:
            if not disk.holds(key):
                continue
            if (call := self._begin(disk)) is None:
                with self._lock:
                    disk.owed.add(key)
                disk.lane.submit(partial(self._settle, disk))
                continue
            try:
                disk.well_tier.delete(key)
            finally:
                self._end(disk, call, moved=False)

    def lost_and_found(self) -> tuple[Sequence[ChunkKey], Sequence[ChunkKey]]:
        self._try_again()
        with self._lock:
            self._look()
            lost, self._lost = self._lost, []
            found, self._found = self._found, []
        return lost, [key for disk, held in found for key in held if disk.holds(key)]

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """A disk that hangs is as after a crash at the next start."""
        order, until = list(coldest_first), time.monotonic() + CLOSE_S
        with self._lock:
            self._closed = True
            closing = [disk for disk in self.disks if disk.answers()]
        for disk in closing:
            disk.lane.submit(partial(disk.close, order), urgent=True)
        for disk in self.disks:
            left_s = max(0.0, until - time.monotonic()) if disk in closing else 0.0
            if not disk.lane.close(left_s):
                _LOG.warning("NVMe tier %s: it hangs, so it is not closed", disk.folder)

    # ---- owners ----------------------------------------------------------------------------------

    def owners(self, keys: Sequence[ChunkKey]) -> list[int]:
        whose = dict[ChunkKey, int]()
        for disk in self.disks:
            if (tier := disk.tier) is not None:
                held = [key for key in keys if key in tier]
                whose.update(zip(held, tier.owners(held), strict=True))
        return [whose.get(key, UNOWNED) for key in keys]

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """Of the disks that are left alone: the Directory knows the others' chunks."""
        going, away = list[ChunkKey](), [disk for disk in self.disks if disk.away]
        for disk in away:
            if (tier := disk.tier) is not None:
                held = tier.held()
                whose = zip(held, tier.owners(held), strict=True)
                going += [key for key, one in whose if may(owner, one) and key not in disk.owed]
        return going, all(disk.tier is not None for disk in away)

    # ---- room ------------------------------------------------------------------------------------

    def resize(self, chunks: int) -> int:
        """Each disk keeps room for what it holds. The rest is divided by what they could have
        beside a server's other chunk sizes, which may have more of one disk than of another."""
        disks = [(one.folder, tier) for one in self.disks if (tier := one.tier) and not one.away]
        self._lent = self._lent or chunks < self.capacity
        held = [tier.used for _, tier in disks]
        could = [
            max(0, tier.capacity - used - -(-taken // self.chunk_room))
            for (folder, tier), used in zip(disks, held, strict=True)
            for taken in [servers_bytes(folder.parent, but=folder).value or 0]
        ]
        most = sum(could)
        spare, room = min(max(0, chunks - sum(held)), most), 0
        for (_, tier), used, free in zip(disks, held, could, strict=True):
            mine = -(-spare * free // most) if most else 0
            spare, most = spare - mine, most - free
            room += tier.resize(used + mine)
        return room

    # ---- health ----------------------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        counts = Counter(self._events.values)
        for disk in self.disks:
            counts.update(disk.counts)
        return counts

    @property
    def by_disk(self) -> Sequence[DiskStatus]:
        return [disk.status() for disk in self.disks] if len(self.disks) > 1 else []

    @property
    def nodes_away(self) -> Sequence[str]:
        return [f"{disk.folder} ({disk.away})" for disk in self.disks if disk.away]

    @property
    def owed(self) -> int:
        tiers = [disk.tier for disk in self.disks if disk.tier is not None]
        return sum(len(disk.owed) for disk in self.disks) + sum(tier.owed for tier in tiers)

    # ---- which disk ------------------------------------------------------------------------------

    def _of(self, key: ChunkKey) -> SetDisk | None:
        return next((disk for disk in self.disks if not disk.away and disk.holds(key)), None)

    def _chosen(self, tried: Sequence[SetDisk]) -> SetDisk | None:
        """The disk for one more chunk, of those with room. Each gets them at its pace: start-time
        fair queueing (Goyal, Vin and Cheng, 1996). None: no other disk has room."""
        with self._lock:
            self._look()
            able = [
                disk
                for disk in self.disks
                if not disk.away and disk not in tried and disk.tier and disk.tier.free
            ]
            if not able:
                return None
            usual_s = next(iter(self._paces()), (_FIRST_PACE_S, 0))[0]
            late_s = _LATE_FACTOR * usual_s
            disk = min(
                able,
                key=lambda one: (not one.well(), one.due + late_s * (one.calls >= one.most_calls)),
            )
            self._turn = max(self._turn, disk.due)
            disk.due = self._turn + (disk.pace_s or usual_s)
            return disk

    def _paces(self) -> list[tuple[float, int]]:
        """Under the lock: of the disks that are well, as far as known, and their index. The fastest
        is first."""
        disks = enumerate(self.disks)
        return sorted((one.pace_s, at) for at, one in disks if one.pace_s and not one.away)

    def _begin(self, disk: SetDisk, *, patient: bool = False) -> int | None:
        """A call to a disk begins as soon as it has fewer than its most. None: it is left alone, or
        nobody but who is ``patient`` waits for it now."""
        with self._lock:
            while True:
                self._look()
                if disk.away:
                    return None
                if disk.calls < disk.most_calls:
                    return disk.begun()
                if not patient and not disk.well():
                    return None
                disk.freed.wait(min(disk.frozen_s, disk.late_s))

    def _end(self, disk: SetDisk, call: int, *, moved: bool, wrote: ChunkKey | None = None) -> bool:
        """Whether the disk is still well. If not, it owes the deletion of what it was given."""
        with self._lock:
            disk.ended(call, moved=moved)
            self._look()
            paces = self._paces()
            for at, one in enumerate(self.disks):
                one.keep_up(next((pace for pace, of in paces if of != at), math.inf))
            if disk.away and moved and wrote is not None:
                disk.owed.add(wrote)
            return not disk.away

    def _look(self) -> None:
        """Under the lock: leave alone what fails."""
        for disk in self.disks:
            if not disk.away and (why := disk.fault()):
                held = disk.leave_alone(why)
                self._found = [back for back in self._found if back[0] is not disk]
                self._lost += held
                self.capacity = sum(one.capacity for one in self.disks)
                _LOG.warning(
                    "NVMe tier %s: %s. It is left alone and tried again: its %d chunks are "
                    "misses, and the other disks go on",
                    disk.folder,
                    why,
                    len(held),
                )

    def _try_again(self) -> None:
        """Try the disks whose time has come, each on its own thread."""
        for disk in self.disks:
            if not disk.away:
                continue
            with self._lock:
                if self._closed or not (disk.away and disk.idle and disk.breaker.allows()):
                    continue
                call = disk.begun()
            disk.lane.submit(partial(self._try, disk, call), urgent=True)

    def _try(self, disk: SetDisk, call: int) -> None:
        """On the disk's own thread."""
        held, why = list[ChunkKey](), ""
        try:
            held = list(disk.try_again(lent=self._lent))
        except (KVTierError, MemoryError, OSError) as error:
            why = str(error)
        with self._admitting:
            others = [other for other in self.disks if not other.away]
            twice = [key for key in held if any(other.holds(key) for other in others)]
            with self._lock:
                disk.ended(call, moved=False)
                if why:
                    disk.leave_alone(why)
                elif not self._closed:
                    disk.owed.update(twice)
                    disk.away, disk.due = "", self._turn
                    self._found.append((disk, held))
                    self.capacity = sum(one.capacity for one in self.disks)
                    if disk.breaker.ok():
                        _LOG.warning(
                            "NVMe tier %s: it is back, with %d chunks", disk.folder, len(held)
                        )
        if self._closed:
            disk.close()
        self._settle(disk)

    def _settle(self, disk: SetDisk) -> None:
        """On the disk's own thread: delete what it owes."""
        while True:
            with self._lock:
                key = next(iter(disk.owed), None)
            if key is None or (call := self._begin(disk, patient=True)) is None:
                break
            disk.well_tier.delete(key)
            with self._lock:
                disk.owed.discard(key)
            self._end(disk, call, moved=False)
        with self._lock:
            self._tried.notify_all()
