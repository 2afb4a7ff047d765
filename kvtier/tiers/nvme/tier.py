"""NvmeTier: chunks on a local disk, in preallocated slots, found again after a restart or a crash.

The index lives in memory (one dict entry and 44 packed bytes a chunk) and, record by record, on
disk. See :mod:`kvtier.tiers.nvme.index` for what is believed after a crash,
:mod:`kvtier.tiers.nvme.files` for the files and how payloads get there.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvtier.core.chunk import PAGE_BYTES, ChunkKey, coldest_first
from kvtier.core.errors import StateError, TierError
from kvtier.core.tenant import OWNER_BYTES, UNOWNED
from kvtier.tiers.base import EVENTS, EventCounts, Tier
from kvtier.tiers.nvme.files import SlotFiles
from kvtier.tiers.nvme.index import (
    CHECKSUM_BYTES,
    EMPTY_RECORD,
    MOST_SLOT_BYTES,
    RECORD_BYTES,
    pack_record,
    payload_checksum,
    read_records,
    slots_within,
    table_bytes,
)

_LOG = logging.getLogger(__name__)
_NEIGHBOURS = 64


class NvmeTier(Tier):
    """Chunks on a local file system.

    Args:
        path: a folder of its own. Made, with mode 0700, if missing.
        bytes_: room the tier may take there, both files together. Never exceeded.
        slot_bytes: the largest chunk, a multiple of 4096, at most 1 GiB.
        direct: bypass the page cache where the file system allows it.
        lent: only slots with chunks from before have blocks until :meth:`resize`. Else all room is
            reserved at once.
        in_huge_pages: whether memory is page-aligned and in huge pages, so that it needs no copy.

    Raises TierError when the folder is in use, not this user's alone, not writable, or without
    room. Then nothing is left behind.

    Threads: any number of lane threads. ``_lock`` guards the index. No I/O under it. A slot has one
    owner at any time: the free list, the write that fills it, the index, or the call that empties
    it.

    ``counts["evicted_unread"]``: chunks deleted without having been read. The disk wore out for
    nothing. ``counts["lifetime_bytes"]``: written since the folder was empty, by the records'
    sequence numbers, so a crash loses the newest.

    ``owed``: chunks that are gone, but their records could not be erased. Each write tries that
    again, and none is believed after a close.

    ``trouble``: the folder was removed or replaced while in use, as each write and read checks.
    Nothing is written until it is back. Chunks are served as before.
    """

    name = "nvme"
    keeps_owners = True

    def __init__(
        self,
        path: str | Path,
        bytes_: int,
        slot_bytes: int,
        *,
        direct: bool = True,
        lent: bool = False,
        in_huge_pages: Callable[[memoryview], bool] = lambda _: False,
    ) -> None:
        if not 0 < slot_bytes <= MOST_SLOT_BYTES or slot_bytes % PAGE_BYTES:
            raise StateError(
                f"slot_bytes={slot_bytes}: expected a multiple of {PAGE_BYTES} up to "
                f"{MOST_SLOT_BYTES}"
            )
        slots = slots_within(bytes_, slot_bytes)
        if not slots:
            raise TierError(
                f"NVMe tier {path}: {bytes_:,} bytes hold no chunk of {slot_bytes:,} bytes; "
                f"give at least {slot_bytes + 2 * PAGE_BYTES:,}"
            )
        self.capacity, self.slot_bytes = slots, slot_bytes
        self.chunk_room, self.fixed_room = slot_bytes, table_bytes(slots)
        folder = Path(path).absolute()
        self._events = EventCounts(
            (*EVENTS, "evicted_unread", "lifetime_bytes"), _LOG, f"NVMe tier {folder}"
        )
        self._files = SlotFiles(
            folder,
            slots,
            slot_bytes,
            direct=direct,
            in_huge_pages=in_huge_pages,
            lent=lent,
        )
        self.direct = self._files.direct
        self._lock = threading.Lock()
        self._trouble = ""
        # key -> place = seq * capacity + slot: one integer says where, and tells this filling of
        # the slot from others.
        self._places: dict[ChunkKey, int] = {}
        self._checksums = np.zeros(slots, f"V{CHECKSUM_BYTES}")
        self._owners = np.zeros(slots, f"V{OWNER_BYTES}")
        self._stamps = np.zeros(slots, np.uint64)
        self._unread = bytearray(slots)
        """1 for each slot written since the start and not read."""
        self._given: list[int] = []
        """Slots whose blocks were given back to the file system."""
        self._free = array("I")
        self._unerased: dict[int, ChunkKey] = {}
        """Slots that are not free before their records are erased, and whose they were."""
        self._seq = 0
        self._recovered = self._recover()
        self._events.add("lifetime_bytes", self._seq * slot_bytes)
        if lent:
            self.resize(len(self._places))

    @property
    def counts(self) -> Mapping[str, int]:
        return self._events.values

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def stamp(self, key: ChunkKey) -> int:
        """Orders chunks of several folders by their age, or their place in the order of a close."""
        return int(self._stamps[self._places[key] % self.capacity])

    def held(self) -> Sequence[ChunkKey]:
        with self._lock:
            return list(self._places)

    @property
    def trouble(self) -> str:
        return self._trouble

    @property
    def owed(self) -> int:
        return len(self._unerased)

    def unerased(self) -> Sequence[ChunkKey]:
        with self._lock:
            return list(self._unerased.values())

    def recovered(self) -> Sequence[ChunkKey]:
        keys, self._recovered = self._recovered, []
        return keys

    def owners(self, keys: Sequence[ChunkKey]) -> list[int]:
        with self._lock:
            places = [self._places.get(key) for key in keys]
            return [
                UNOWNED if place is None else self._owner(place % self.capacity) for place in places
            ]

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        if not 0 < data.nbytes <= self.slot_bytes:
            raise StateError(f"a chunk of {data.nbytes} bytes for slots of {self.slot_bytes} bytes")
        self._erase()
        with self._lock:
            if key in self._places:
                return True
            if not self._free:
                self._events.add("refused")
                return False
            slot = self._free.pop()
            self._seq += 1
            place = self._seq * self.capacity + slot
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
            slot = place % self.capacity
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
        """Free slots' blocks, the file's last first, go to the file system or are reserved."""
        with self._lock:
            going = list[int]()
            if (surplus := self.capacity - len(self._given) - chunks) > 0:
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
            return self.capacity - len(self._given)

    def works(self) -> bool:
        """Whether the folder is in place, a free slot can be written, a slot be read, and nothing
        is owed."""
        self._erase()
        chunk = memoryview(bytearray(self.slot_bytes))
        with self._lock:
            slot = self._free.pop() if self._free else None
        try:
            if slot is not None:
                self._files.write_payload(slot, chunk)
            self._files.read_payload(slot or 0, chunk)
            return self._look() and not self._unerased
        except OSError:
            return False
        finally:
            if slot is not None:
                with self._lock:
                    self._free.append(slot)

    def find(self, keys: Sequence[ChunkKey]) -> int:
        places = self._places
        for count, key in enumerate(keys):
            if key not in places:
                return count
        return len(keys)

    def delete(self, key: ChunkKey) -> None:
        with self._lock:
            place = self._places.pop(key, None)
            if place is None:
                return
            self._events.add("evicted_unread", self._unread[place % self.capacity])
            self._unerased[place % self.capacity] = key
        self._erase()

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        """Keys that ``coldest_first`` leaves out count as colder. Later calls miss."""
        with self._lock:
            places, self._places = self._places, {}
            self._free = array("I")
        # Counted over what other folders hold of the same order, too.
        stamps = {key: at for at, key in enumerate(coldest_first, 1) if key in places}
        others = places.keys() - stamps.keys()
        order = [*sorted(others, key=places.__getitem__), *stamps]
        table = bytearray(RECORD_BYTES * self.capacity)
        # The last number says how often was written in the life of the folder. A power cut may have
        # brought back records of deleted chunks, so that there are more records than numbers.
        for seq, key in enumerate(order, start=max(1, self._seq - len(order) + 1)):
            slot = places[key] % self.capacity
            checksum, stamp = self._checksum(slot), stamps.get(key, 0)
            record = pack_record(
                slot, self.slot_bytes, key, checksum, seq, self._owner(slot), stamp
            )
            table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
        try:
            self._files.close(memoryview(table))
        except OSError as error:
            self._events.log_first("close", error)

    def _recover(self) -> list[ChunkKey]:
        records = read_records(self._read_table(), self._files.kept, self.slot_bytes)
        # A key with two records (its delete was lost in a power cut) keeps the newer: later entries
        # win.
        self._places = dict(
            zip(
                records.keys,
                (
                    seq * self.capacity + slot  # more than 64 bits where there are many slots
                    for seq, slot in zip(records.seqs.tolist(), records.slots.tolist(), strict=True)
                ),
                strict=True,
            )
        )
        self._checksums[records.slots] = records.checksums
        self._owners[records.slots] = records.owners
        self._stamps[records.slots] = records.stamps
        self._seq = int(records.seqs[-1]) if len(records.seqs) else 0
        unused = np.ones(self.capacity, dtype=bool)
        unused[
            np.fromiter(
                (place % self.capacity for place in self._places.values()),
                dtype=np.int64,
                count=len(self._places),
            )
        ] = False
        # Popped from the end: the first chunks go to the first slots.
        self._free = array("I", np.flatnonzero(unused)[::-1].astype(np.uint32).tobytes())
        self._events.add("corrupt", records.damaged)
        if self._places or records.damaged:
            how = "" if self._files.clean else " after a stop without close"
            _LOG.info(
                "NVMe tier %s: %d chunks found%s, %d records damaged",
                self._files.path,
                len(self._places),
                how,
                records.damaged,
            )
        # a record is as old as its write, and a prompt's first chunk is written first
        return coldest_first((key, age) for age, key in enumerate(self._places))

    def _read_table(self) -> memoryview:
        try:
            return self._files.read_table()
        except OSError as error:
            self._events.log_first("read", error)
            self._files.kept = 0
            return memoryview(b"")

    def _fill(self, key: ChunkKey, place: int, data: memoryview, owner: int) -> bool:
        """Write payload, then record. The slot's old record is gone or (power cut) names a payload
        that is no longer there, so a reader never believes anything false. The order decides only a
        count: a record without its payload is counted as corrupt."""
        if not self._look():
            self._events.add("refused")
            return False
        seq, slot = divmod(place, self.capacity)
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
        if self._files.in_place():
            self._trouble = ""
            return True
        self._trouble = "its folder was removed or replaced"
        return False

    def _drop(self, key: ChunkKey, place: int, count: str) -> None:
        """Forget a bad chunk, unless it was deleted, and maybe written anew, during the read."""
        with self._lock:
            if self._places.get(key) != place:
                self._events.add("misses")
                return
            del self._places[key]
            self._events.add(count)
            self._unerased[place % self.capacity] = key
        self._events.log_first(count, key.hex())
        self._erase()

    def _erase(self) -> None:
        """Erase a record, then free its slot: else the next chunk's record might be erased."""
        while self._unerased:
            with self._lock:
                if not self._unerased:
                    return
                slot, key = self._unerased.popitem()
            try:
                self._files.write_record(slot, EMPTY_RECORD)
            except OSError as error:
                self._events.log_first("write", error)
                self._events.add("failed_writes")
                with self._lock:
                    self._unerased[slot] = key
                return
            with self._lock:
                self._free.append(slot)

    def _checksum(self, slot: int) -> bytes:
        return bytes(self._checksums[slot])

    def _owner(self, slot: int) -> int:
        return int.from_bytes(self._owners[slot].tobytes(), "little")


def _neighbours(slots: Sequence[int]) -> Iterator[Sequence[int]]:
    """Pieces of ``slots`` (ascending) without gaps, one file system call each."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1 or at - first == _NEIGHBOURS:
            yield slots[first:at]
            first = at
