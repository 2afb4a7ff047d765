"""ChunkFolder: chunks of one disk of a set, in preallocated slots, found again after a restart or a
crash.

The index lives in memory (one dict entry and 44 packed bytes a chunk) and, record by record, on
disk. See :mod:`kvtier.tiers.nvme.index` for what is believed after a crash,
:mod:`kvtier.tiers.nvme.files` for the files and how payloads get there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvtier.core.chunk import PAGE_BYTES, ChunkKey
from kvtier.core.errors import StateError, TierError
from kvtier.core.tenant import OWNER_BYTES, UNOWNED
from kvtier.tiers.base import EVENTS, EventCounts
from kvtier.tiers.nvme.files import SlotFiles, read_table
from kvtier.tiers.nvme.index import (
    CHECKSUM_BYTES,
    EMPTY_RECORD,
    MOST_SLOT_BYTES,
    RECORD_BYTES,
    Records,
    pack_record,
    payload_checksum,
    read_records,
    slots_within,
)

_LOG = logging.getLogger(__name__)
_NEIGHBOURS = 64
_SETTLED_RECORDS = 64
"""Most records emptied in one call."""


class ChunkFolder:
    """Folder of chunks on a local file system, which holds none before :meth:`open`.

    Args:
        path: made, with mode 0700, if missing.
        bytes_: room that may be taken there, both files together. Never exceeded.
        slot_bytes: the largest chunk, a multiple of 4096, at most 1 GiB.
        in_huge_pages: whether memory is page-aligned and in huge pages, so that it needs no copy.

    Threads: any number of lane threads, but for :meth:`open`. ``_lock`` guards the index. No I/O
    under it. A slot has one owner at any time: the free list, the write that fills it, the index,
    what is owed, or the call that empties it.

    ``counts["evicted_unread"]``: chunks deleted without having been read. The disk wore out for
    nothing. ``counts["lifetime_bytes"]``: written since the folder was empty, by the records'
    sequence numbers, so a crash loses the newest.

    ``trouble``: the folder was removed or replaced while in use, as each write and read checks.
    Nothing is written until it is back. Chunks are served as before.
    """

    def __init__(
        self,
        path: Path,
        bytes_: int,
        slot_bytes: int,
        in_huge_pages: Callable[[memoryview], bool] = lambda _: False,
    ) -> None:
        if not 0 < slot_bytes <= MOST_SLOT_BYTES or slot_bytes % PAGE_BYTES:
            raise StateError(
                f"slot_bytes={slot_bytes}: expected a multiple of {PAGE_BYTES} up to "
                f"{MOST_SLOT_BYTES}"
            )
        self.path, self.slot_bytes = path.absolute(), slot_bytes
        self._bytes, self._in_huge_pages = bytes_, in_huge_pages
        self.slots = slots_within(bytes_, slot_bytes)
        self._events = EventCounts(
            (*EVENTS, "evicted_unread", "lifetime_bytes"), _LOG, f"NVMe tier {self.path}"
        )
        self.counts = self._events.values
        self._lock = threading.Lock()
        self.trouble = ""
        self._files: SlotFiles
        self.was_open = False
        # key -> place = seq * slots + slot: one integer says where, and tells this filling of the
        # slot from others.
        self._places: dict[ChunkKey, int] = {}
        self._owed: dict[int, ChunkKey] = {}
        """Place -> chunk that is gone. The slot is not free before its record is erased."""
        self._free = array("I")
        self._given: list[int] = []
        """Slots whose blocks were given back to the file system."""
        self._seq = self._device = 0

    def open(self, *, lent: bool = False) -> None:
        """Open the folder, or open it again. Deleted chunks stay gone.

        ``lent``: only slots with chunks from before have blocks until :meth:`resize`. Else all room
        is reserved at once.

        Raises OSError, and TierError when the folder is in use, not this user's alone, not
        writable, or without room. Then nothing is left behind.
        """
        if not self.slots:
            raise TierError(
                f"NVMe tier {self.path}: {self._bytes:,} bytes hold no chunk of "
                f"{self.slot_bytes:,} bytes; give at least {self.slot_bytes + 2 * PAGE_BYTES:,}"
            )
        if self.was_open:
            # Nothing may be made where the disk is not mounted.
            if self._device != os.stat(self.path).st_dev:
                raise TierError("its folder lies on another device now: restart to use that one")
            self._files.release()
        files = SlotFiles(
            self.path, self.slots, self.slot_bytes, in_huge_pages=self._in_huge_pages, lent=lent
        )
        self._device = os.stat(self.path).st_dev
        records = self._read_records(files)
        self._recover(files, records)
        if lent:
            self.resize(len(self._places))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._places)

    @property
    def owed(self) -> int:
        """Number of chunks that are gone, but whose records are not."""
        return len(self._owed)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def stamped(self) -> Iterator[tuple[ChunkKey, tuple[int, int]]]:
        """Return chunks with stamps that order those of several folders by age, or by their last
        close. Of records without one only the folder's own order is known."""
        with self._lock:
            places = list(self._places.items())
        return ((key, (int(self._stamps[at % self.slots]), at)) for key, at in places)

    def held(self) -> list[ChunkKey]:
        with self._lock:
            return list(self._places)

    def owners(self, keys: Sequence[ChunkKey]) -> list[int]:
        with self._lock:
            places = [self._places.get(key) for key in keys]
            return [
                UNOWNED if place is None else self._owner(place % self.slots) for place in places
            ]

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        if not 0 < data.nbytes <= self.slot_bytes:
            raise StateError(f"a chunk of {data.nbytes} bytes for slots of {self.slot_bytes} bytes")
        self.settle()
        with self._lock:
            if key in self._places:
                return True
            if not self._free:
                self._events.add("refused")
                return False
            slot = self._free.pop()
            self._seq += 1
            place = self._seq * self.slots + slot
        held = False
        try:
            held = self._fill(key, place, data, owner)
        finally:
            with self._lock:
                if held:
                    self._places[key] = place
                    self._unread[slot] = 1
                    self._events.add("writes")
                    self._events.add("bytes_written", data.nbytes)
                    self._events.add("lifetime_bytes", data.nbytes)
                else:
                    self._free.append(slot)
        return held

    def read(self, key: ChunkKey, into: memoryview) -> bool:
        with self._lock:
            place = self._places.get(key)
            if place is None:
                self._events.add("misses")
                return False
            slot = place % self.slots
            checksum = self._checksum(slot)
        self._look()
        # From here on the slot may be freed and filled with another chunk: then the checksum does
        # not match.
        try:
            self._files.read_payload(slot, into)
            if payload_checksum(key, into) == checksum:
                with self._lock:
                    self._unread[slot] = 0
                self._events.add("reads")
                self._events.add("bytes_read", into.nbytes)
                return True
            self._drop(key, place, "corrupt")
        except OSError as error:
            self._events.log_first("read", error)
            self._drop(key, place, "failed_reads")
        return False

    def resize(self, chunks: int) -> int:
        """Give blocks of free slots, the file's last first, to the file system, or reserve them."""
        with self._lock:
            going = list[int]()
            if (surplus := self.slots - len(self._given) - chunks) > 0:
                free = sorted(self._free, reverse=True)
                going, self._free = free[:surplus], array("I", free[surplus:])
            back = sorted(self._given.pop() for _ in range(min(len(self._given), -surplus)))
        had = list[int]()
        try:
            for run in _neighbours(going[::-1]):
                self._files.give_back(run[0], len(run))
            for run in _neighbours(back):
                self._files.reserve(run[0], len(run))
                had += run
        except OSError as error:
            self._events.log_first("resize", error)
        with self._lock:
            self._given += [*going, *back[len(had) :]]
            self._free.extend(had)
            return self.slots - len(self._given)

    def works(self) -> bool:
        """Return whether the folder is in place, a record can be erased, a slot written and
        read."""
        if not (self._look() and self.settle()):
            return False
        chunk = memoryview(bytearray(self.slot_bytes))
        with self._lock:
            slot = self._free.pop() if self._free else None
        try:
            if slot is not None:
                self._files.write_payload(slot, chunk)
            self._files.read_payload(slot or 0, chunk)
            return True
        except OSError:
            return False
        finally:
            if slot is not None:
                with self._lock:
                    self._free.append(slot)

    def delete(self, key: ChunkKey) -> None:
        """Delete the chunk without I/O: its record goes with the next :meth:`settle`."""
        with self._lock:
            if (place := self._places.pop(key, None)) is not None:
                self._events.add("evicted_unread", self._unread[place % self.slots])
                self._owed[place] = key

    def settle(self) -> bool:
        """Erase records of deleted chunks, then free their slots: else the next chunk's record
        might be erased. Returns False if one could not be."""
        for _ in range(min(len(self._owed), _SETTLED_RECORDS)):
            with self._lock:
                if not self._owed:
                    break
                place, key = self._owed.popitem()
            try:
                self._files.write_record(place % self.slots, EMPTY_RECORD)
            except OSError as error:
                self._events.log_first("write", error)
                self._events.add("failed_writes")
                with self._lock:
                    self._owed[place] = key
                return False
            with self._lock:
                self._free.append(place % self.slots)
        return True

    def note(self, name: str) -> bool:
        """Make an empty file. Returns whether it could be made."""
        with suppress(OSError):
            (self.path / name).touch(0o600)
            return True
        return False

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Close with this order. Keys that it leaves out count as colder. Later calls miss."""
        if not self.was_open:
            return
        with self._lock:
            places, self._places = self._places, {}
            self._free = array("I")
        # Positions in the whole order, chunks of other folders included.
        stamps = {key: at for at, key in enumerate(coldest_first, 1) if key in places}
        others = places.keys() - stamps.keys()
        order = [*sorted(others, key=places.__getitem__), *stamps]
        table = bytearray(RECORD_BYTES * self.slots)
        # The last number says how often was written in the life of the folder. A power cut may have
        # brought back records of deleted chunks, so that there are more records than numbers.
        for seq, key in enumerate(order, start=max(1, self._seq - len(order) + 1)):
            slot = places[key] % self.slots
            checksum, stamp = self._checksum(slot), stamps.get(key, 0)
            record = pack_record(
                slot, self.slot_bytes, key, checksum, seq, self._owner(slot), stamp
            )
            table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
        try:
            self._files.close(memoryview(table))
        except OSError as error:
            self._events.log_first("close", error)

    def _recover(self, files: SlotFiles, records: Records) -> None:
        # more than 64 bits where there are many slots
        places = [
            seq * self.slots + slot
            for seq, slot in zip(records.seqs.tolist(), records.slots.tolist(), strict=True)
        ]
        # Of a key with two records (its delete was lost in a power cut) the older one is owed.
        newest = dict(zip(records.keys, places, strict=True))
        with self._lock:
            self._checksums = np.zeros(self.slots, f"V{CHECKSUM_BYTES}")
            self._owners = np.zeros(self.slots, f"V{OWNER_BYTES}")
            self._stamps = np.zeros(self.slots, np.uint64)
            self._unread = bytearray(self.slots)
            """Slot -> 1 if it was written since the open and not read."""
            self._given = []
            self._files, self.was_open = files, True
            self._checksums[records.slots] = records.checksums
            self._owners[records.slots] = records.owners
            self._stamps[records.slots] = records.stamps
            self._seq = int(records.seqs[-1]) if len(records.seqs) else 0
            self._owed = {
                place: key
                for key, place in zip(records.keys, places, strict=True)
                if newest[key] != place or self._owed.get(place) == key
            }
            self._places = {key: place for key, place in newest.items() if place not in self._owed}
            unused = np.ones(self.slots, dtype=bool)
            unused[records.slots] = False
            # Popped from the end: the first chunks go to the first slots.
            self._free = array("I", np.flatnonzero(unused)[::-1].astype(np.uint32).tobytes())
        self._events.add("corrupt", records.damaged)
        self._events.values["lifetime_bytes"] = self._seq * self.slot_bytes
        if self._places or records.damaged:
            how = "" if self._files.clean else " after a stop without close"
            _LOG.info(
                "NVMe tier %s: %d chunks found%s, %d records damaged",
                self.path,
                len(self._places),
                how,
                records.damaged,
            )

    def _read_records(self, files: SlotFiles) -> Records:
        try:
            return read_records(read_table(files.index, files.kept), files.kept, self.slot_bytes)
        except OSError as error:
            self._events.log_first("read", error)
            return read_records(memoryview(b""), 0, self.slot_bytes)

    def _fill(self, key: ChunkKey, place: int, data: memoryview, owner: int) -> bool:
        """Write payload, then record. The slot's old record is gone or (power cut) names a payload
        that is no longer there, so a reader never believes anything false. The order decides only a
        count: a record without its payload is counted as corrupt."""
        if not self._look():
            self._events.add("refused")
            return False
        seq, slot = divmod(place, self.slots)
        checksum, stamp = payload_checksum(key, data), time.time_ns()
        try:
            self._files.write_payload(slot, data)
            self._files.write_record(
                slot, pack_record(slot, self.slot_bytes, key, checksum, seq, owner, stamp)
            )
        except OSError as error:
            self._events.log_first("write", error)
            self._events.add("failed_writes")
            return False
        self._checksums[slot], self._stamps[slot] = checksum, stamp
        self._owners[slot] = owner.to_bytes(OWNER_BYTES, "little")
        return True

    def _look(self) -> bool:
        is_there = self._files.in_place()
        self.trouble = "" if is_there else "its folder was removed or replaced"
        return is_there

    def _drop(self, key: ChunkKey, place: int, count: str) -> None:
        """Forget a bad chunk, unless it was deleted, and maybe written anew, during the read."""
        with self._lock:
            if self._places.get(key) != place:
                self._events.add("misses")
                return
            del self._places[key]
            self._events.add(count)
            self._owed[place] = key
        self._events.log_first(count, key.hex())
        self.settle()

    def _checksum(self, slot: int) -> bytes:
        return bytes(self._checksums[slot])

    def _owner(self, slot: int) -> int:
        return int.from_bytes(self._owners[slot].tobytes(), "little")


def _neighbours(slots: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield pieces of ``slots`` (ascending) without gaps, one file system call each."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1 or at - first == _NEIGHBOURS:
            yield slots[first:at]
            first = at
