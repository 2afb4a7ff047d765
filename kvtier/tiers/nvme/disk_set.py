"""DiskSet: the NVMe tier: a folder, or folders on several disks. Each is whole, a
:class:`ChunkFolder`, so a folder that was alone is one disk of a set, and warm.

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
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey, coldest_first
from kvtier.core.errors import KVTierError, TierError
from kvtier.core.report import DiskStatus
from kvtier.core.tenant import UNOWNED, may
from kvtier.tiers.base import EVENTS, EventCounts, Tier
from kvtier.tiers.nvme.chunk_folder import ChunkFolder
from kvtier.tiers.nvme.disks import servers_bytes
from kvtier.tiers.nvme.folder import asked, below, is_silent
from kvtier.tiers.nvme.index import table_bytes
from kvtier.tiers.nvme.set_disk import SetDisk

_LOG = logging.getLogger(__name__)
START_S, CLOSE_S = 10.0, 10.0
"""Longest that a start, and a close, wait for disks."""
_FIRST_PACE_S = 0.001
"""Seconds a chunk that a disk is assumed to take before any pace is known."""
_LATE_FACTOR = 4
"""Chunks by which a busy disk may fall behind before others get its chunks."""


class DiskPlace(NamedTuple):
    folder: Path
    bytes_: int
    most_calls: int
    """Most calls at once. A disk that hangs holds this many threads of the lane."""


class DiskSet(Tier):
    """NVMe tier on one or several disks. Raises TierError where none can be opened, and none hangs.
    ``in_huge_pages``, and ``lent`` of ``open``: see :class:`ChunkFolder`.

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
        self.disks = [
            SetDisk(
                ChunkFolder(place.folder, place.bytes_, slot_bytes, in_huge_pages),
                place.most_calls,
                threading.Condition(self._lock),
                clock,
            )
            for place in places
        ]
        self._events = EventCounts(EVENTS, _LOG, "NVMe tier's disks")
        self._turn = 0.0
        self._lost: list[ChunkKey] = []
        self._found: list[SetDisk] = []
        self.chunk_room = slot_bytes
        self.fixed_room = sum(table_bytes(disk.chunks.slots) for disk in self.disks)
        self._try_again()
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        until = time.monotonic() + START_S
        with self._lock:
            while any(
                (disk.calls or (disk.chunks.owed and not disk.away)) and not is_silent(disk.folder)
                for disk in self.disks
            ) and ((left := until - time.monotonic()) > 0):
                self._tried.wait(left)
            away = [disk for disk in self.disks if disk.away]
            for disk in away:
                disk.leave_alone(disk.away)
        if len(away) == len(self.disks) and not any(disk.calls for disk in away):
            self.close()
            raise TierError("; ".join(disk.away for disk in away))
        for disk in away:
            said = "the other disks serve without it, and it is tried again"
            _LOG.warning("NVMe tier %s: %s; %s", disk.folder, disk.away, said)

    # ---- chunks ----------------------------------------------------------------------------------

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        self._try_again()
        if self._of(key) is not None:
            return True
        tried = list[SetDisk]()
        while (disk := self._chosen(tried)) is not None:
            tried.append(disk)
            if self._call(disk, partial(disk.chunks.write, key, data, owner)):
                with self._lock:
                    self._look()
                    if disk.away:
                        disk.chunks.delete(key)
                    return not disk.away
        self._events.add("refused")
        return False

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        disk = self._of(key)
        if disk is None:
            self._events.add("misses")
            return None if any(disk.away and key in disk.chunks for disk in self.disks) else False
        return self._call(disk, partial(disk.chunks.read, key, into))

    def may_read(self, key: ChunkKey) -> bool:
        holding = [disk for disk in self.disks if key in disk.chunks]
        return not holding or any(disk.well() for disk in holding)

    def find(self, keys: Sequence[ChunkKey]) -> int:
        self._try_again()
        return next((at for at, key in enumerate(keys) if self._of(key) is None), len(keys))

    def delete(self, key: ChunkKey) -> None:
        for disk in self.disks:
            if key in disk.chunks:
                disk.chunks.delete(key)
                if self._call(disk, disk.chunks.settle, moves=False) is None:
                    disk.lane.submit(partial(self._settle, disk))

    def lost_and_found(self) -> tuple[Sequence[ChunkKey], Sequence[ChunkKey]]:
        self._try_again()
        with self._lock:
            self._look()
            lost, self._lost = self._lost, []
            found, self._found = self._found, []
        return lost, coldest_first(chain.from_iterable(disk.chunks.stamped() for disk in found))

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Close the disks that answer. One that hangs is as after a crash at the next start."""
        order, until = list(coldest_first), time.monotonic() + CLOSE_S
        with self._lock:
            self._closed = True
            closing = [disk for disk in self.disks if disk.answers()]
        for disk in closing:
            disk.lane.submit(partial(disk.chunks.close, order), urgent=True)
        for disk in self.disks:
            left_s = max(0.0, until - time.monotonic()) if disk in closing else 0.0
            if not disk.lane.close(left_s):
                _LOG.warning("NVMe tier %s: it hangs, so it is not closed", disk.folder)

    # ---- owners ----------------------------------------------------------------------------------

    def owners(self, keys: Sequence[ChunkKey]) -> list[int]:
        every = [disk.chunks.owners(keys) for disk in self.disks]
        return [next(filter(None, whose), UNOWNED) for whose in zip(*every, strict=True)]

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """Return chunks of disks that are left alone: the Directory knows all others. Deletions
        that these owe are noted on other disks, so that a crash does not undo them."""
        for disk in self.disks:
            for other in self.disks if disk.away or disk.chunks.owed else ():
                if other is not disk:
                    note = partial(other.chunks.note, f"{disk.note}{owner or 0:x}")
                    self._call(other, note, moves=False)
        going, away = list[ChunkKey](), [disk.chunks for disk in self.disks if disk.away]
        for chunks in away:
            held = chunks.held()
            whose = zip(held, chunks.owners(held), strict=True)
            going += [key for key, one in whose if may(owner, one)]
        return going, all(chunks.was_open for chunks in away)

    # ---- room ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:  # type: ignore[override]  # it changes with the disks
        return sum(disk.chunks.slots for disk in self.disks if not disk.away)

    def resize(self, chunks: int) -> int:
        """Keep room on each disk for what it holds. The rest is divided by what each could have
        beside a server's other chunk sizes, which may have more of one disk than of another."""
        disks = [disk.chunks for disk in self.disks if not disk.away]
        self._lent = self._lent or chunks < self.capacity
        held = [disk.used for disk in disks]
        could = [
            max(0, disk.slots - used - -(-taken // self.chunk_room))
            for disk, used in zip(disks, held, strict=True)
            for taken in [servers_bytes(disk.path.parent, but=disk.path).value or 0]
        ]
        most = sum(could)
        spare, room = min(max(0, chunks - sum(held)), most), 0
        for disk, used, free in zip(disks, held, could, strict=True):
            mine = -(-spare * free // most) if most else 0
            spare, most = spare - mine, most - free
            room += disk.resize(used + mine)
        return room

    # ---- health ----------------------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        counts = Counter(self._events.values)
        for disk in self.disks:
            counts.update(disk.chunks.counts)
        return counts

    @property
    def by_disk(self) -> Sequence[DiskStatus]:
        return [disk.status() for disk in self.disks] if len(self.disks) > 1 else []

    @property
    def nodes_away(self) -> Sequence[str]:
        return [f"{disk.folder} ({disk.away})" for disk in self.disks if disk.away]

    @property
    def owed(self) -> int:
        return sum(disk.chunks.owed for disk in self.disks)

    # ---- which disk ------------------------------------------------------------------------------

    def _of(self, key: ChunkKey) -> SetDisk | None:
        return next((disk for disk in self.disks if not disk.away and key in disk.chunks), None)

    def _chosen(self, tried: Sequence[SetDisk]) -> SetDisk | None:
        """Choose a disk with room for one more chunk, or None. Each gets chunks at its pace:
        start-time fair queueing (Goyal, Vin and Cheng, 1996). ``tried``: disks left out."""
        with self._lock:
            self._look()
            able = [
                disk
                for disk in self.disks
                if not disk.away and disk not in tried and disk.chunks.free
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
        """Return the known paces of the disks that are well, and their indexes, the fastest first.
        Under the lock."""
        disks = enumerate(self.disks)
        return sorted((one.pace_s, at) for at, one in disks if one.pace_s and not one.away)

    def _call(
        self, disk: SetDisk, work: Callable[[], bool], *, moves: bool = True, patient: bool = False
    ) -> bool | None:
        """Do ``work`` as soon as the disk has fewer calls than its most. None if it is left alone,
        or late and the caller is not ``patient``. ``moves``: the work is a chunk's."""
        with self._lock:
            while True:
                self._look()
                if disk.away:
                    return None
                if disk.calls < disk.most_calls:
                    call, done = disk.begun(), False
                    break
                if not patient and not disk.well():
                    return None
                disk.freed.wait(min(disk.frozen_s, disk.late_s))
        try:
            done = work()
            return done
        finally:
            with self._lock:
                disk.ended(call, moved=done and moves)
                self._look()
                paces = self._paces()
                for at, one in enumerate(self.disks):
                    one.keep_up(next((pace for pace, of in paces if of != at), math.inf))

    def _look(self) -> None:
        """Leave alone the disks that fail. Under the lock."""
        for disk in self.disks:
            if not disk.away and (why := disk.fault()):
                held = disk.leave_alone(why)
                self._found = [back for back in self._found if back is not disk]
                self._lost += held
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
                if self._closed or not (disk.away and not disk.calls and disk.breaker.allows()):
                    continue
                call = disk.begun()
            disk.lane.submit(partial(self._try, disk, call), urgent=True)

    def _try(self, disk: SetDisk, call: int) -> None:
        """Open a disk again, on its own thread."""
        try:
            disk.try_again(lent=self._lent)
            why = ""
        except (KVTierError, MemoryError, OSError) as error:
            why = str(error)
        notes = list[Path]()
        for other in self.disks:
            with suppress(OSError):
                notes += below(other.folder, f"{disk.note}*") or ()
        cleared = [_owner(note.name.removeprefix(disk.note)) for note in notes]
        with self._admitting:
            held = disk.chunks.held()
            going = [
                key
                for key, whose in zip(held, disk.chunks.owners(held), strict=True)
                if self._of(key) is not None or any(may(owner, whose) for owner in cleared)
            ]
            with self._lock:
                disk.ended(call, moved=False)
                if why:
                    disk.leave_alone(why)
                elif not self._closed:
                    for key in going:
                        disk.chunks.delete(key)
                    disk.away, disk.due = "", self._turn
                    self._found.append(disk)
                    if disk.breaker.ok():
                        _LOG.warning(
                            "NVMe tier %s: it is back, with %d chunks", disk.folder, len(held)
                        )
        if self._closed:
            disk.chunks.close()
        self._settle(disk)
        for note in () if disk.away or disk.chunks.owed else notes:
            with suppress(OSError):
                asked(note.parent, note.unlink, None)

    def _settle(self, disk: SetDisk) -> None:
        """Erase records that the disk owes, on its own thread."""
        while disk.chunks.owed:
            if self._call(disk, disk.chunks.settle, moves=False, patient=True) is None:
                break
        with self._lock:
            self._tried.notify_all()


def _owner(note: str) -> int | None:
    """Return whose chunks a note says are cleared. None for everybody's, and if it cannot be read,
    as a file that somebody else has put there."""
    with suppress(ValueError):
        return int(note, 16) or None
    return None
