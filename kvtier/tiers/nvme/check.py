"""Check of an NVMe tier's folder. Reads every slot. Only a repair changes any.

Compared are the superblock with both files' sizes, every record with its own checksum, every
payload with the checksum in its record, and keys with each other. The Store writes whole slots, so
a payload is as long as its slot. Payloads are dropped from the page cache before they are read: the
answer is the disk's. Encrypted chunks are compared as they are, without the key.

A folder in use is refused: it changes under the reader, and its owner checks its reads anyway.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.tenant import may
from kvtier.tiers.nvme.files import read_table
from kvtier.tiers.nvme.folder import INDEX_NAME, LEARNT_NAME, SLOTS_NAME, TierFolder, lock
from kvtier.tiers.nvme.index import (
    EMPTY_RECORD,
    FORMAT_VERSION,
    RECORD_BYTES,
    Records,
    Superblock,
    payload_checksum,
    read_records,
    table_bytes,
)


class Report(msgspec.Struct):
    """Findings in one folder. Every slot counts once: good, corrupt, damaged, stale or free."""

    path: str
    slot_bytes: int = 0
    slots: int = 0
    closed: bool = False
    """Whether the last owner closed it. After a crash all that was written is there too."""
    good: int = 0
    corrupt: int = 0
    """Number of good records whose payload does not match, or cannot be read."""
    damaged: int = 0
    stale: int = 0
    """Number of older records of a key: a power cut undid their deletion. No tier believes them."""
    free: int = 0
    repaired: int = 0
    problems: list[str] = []

    @property
    def bad(self) -> bool:
        return bool(self.problems or (self.corrupt + self.damaged and not self.repaired))


def tier_folders(place: Path) -> list[Path]:
    """Return tiers' folders: ``place`` and those directly in it (a server's size classes, an
    engine's replicas). Raises ConfigError when there is none."""
    folders = (place, *sorted(place.glob("*/")))
    # not Path.exists, which raises for a folder that this user may not enter
    found = [folder for folder in folders if os.path.exists(folder / INDEX_NAME)]
    if not found:
        raise ConfigError(
            f"{place}: no NVMe tier's folder (none has {INDEX_NAME}); give the folder in nvme_path"
        )
    return found


def check(folder: Path, *, repair: bool = False) -> Report:
    """Read every slot, about as fast as one thread reads the disk. ``repair``: make bad ones free.

    Raises TierError when the folder is in use, not this user's alone, not readable, or of a newer
    format (which is not ours to repair)."""
    with _locked(folder, os.O_RDWR if repair else os.O_RDONLY) as (files, index):
        report = Report(str(folder), problems=[])
        superblock = Superblock.unpack(os.pread(index, PAGE_BYTES, 0))
        if superblock is None:
            report.problems.append(
                "the superblock is not readable: the next start drops everything here"
            )
            if repair:
                os.ftruncate(index, 0)
                report.repaired, report.problems = 1, []
            return report
        if superblock.version != FORMAT_VERSION:
            raise TierError(
                f"{folder}: format version {superblock.version}, expected {FORMAT_VERSION}; use "
                "its kvtier"
            )
        report.slot_bytes, report.slots, report.closed = (
            superblock.slot_bytes,
            superblock.slots,
            superblock.clean,
        )
        table, records = _read_table(index, superblock)
        bad = _count(report, files, table, records)
        _compare_sizes(report, files)
        if repair and bad:
            _make_free(index, bad)
            report.repaired = len(bad)
        return report


def discard(folder: Path, owner: int | None = None) -> int:
    """Remove a tier's folder, or only ``owner``'s chunks (:func:`kvtier.core.tenant.may`). Returns
    the number of chunks. A folder of another format always goes. Raises TierError when it is in
    use."""
    with _locked(folder, os.O_RDWR) as (files, index):
        superblock = Superblock.unpack(os.pread(index, PAGE_BYTES, 0))
        chunks = 0
        if superblock is not None and superblock.version == FORMAT_VERSION:
            _, records = _read_table(index, superblock)
            whose = [int.from_bytes(each.tobytes(), "little") for each in records.owners]
            going = [at for at, each in enumerate(whose) if may(owner, each)]
            chunks = len({records.keys[at] for at in going})
            if len(going) < len(whose):
                _make_free(index, [int(records.slots[at]) for at in going])
                return chunks
        for name in (LEARNT_NAME, SLOTS_NAME, INDEX_NAME):
            files.remove(name)
        with suppress(OSError):
            folder.rmdir()
        return chunks


@contextmanager
def _locked(folder: Path, mode: int) -> Iterator[tuple[TierFolder, int]]:
    """Open folder, and index descriptor under the lock of a running tier."""
    try:
        with TierFolder(folder) as files, files.opened(INDEX_NAME, mode) as index:
            if who := lock(index):
                raise TierError(f"{folder}: in use by {who}; stop it first")
            yield files, index
    except OSError as error:
        raise TierError(f"{folder}: {error}") from error
    except MemoryError as error:
        size = os.stat(folder / INDEX_NAME).st_size
        raise TierError(
            f"{folder}: no memory for its table of {size:,} bytes; free some, or remove the folder "
            "by hand"
        ) from error


def _read_table(index: int, superblock: Superblock) -> tuple[memoryview, Records]:
    """Return the table and the records in the file. The slots behind them are free."""
    there = max(0, os.fstat(index).st_size - PAGE_BYTES) // RECORD_BYTES
    slots = min(superblock.slots, there)
    table = read_table(index, slots)
    return table, read_records(table, slots, superblock.slot_bytes)


def _count(report: Report, files: TierFolder, table: memoryview, records: Records) -> list[int]:
    words = np.frombuffer(table, dtype="<u8").reshape(-1, RECORD_BYTES // 8)
    used = set(np.flatnonzero(words[:, 7] | words[:, -1]).tolist())  # sequence number and checksum
    believed = records.slots.tolist()
    newest = dict(zip(records.keys, range(len(believed)), strict=True))
    corrupt = _corrupt(
        files, records, sorted(newest.values(), key=believed.__getitem__), report.slot_bytes
    )
    damaged = used.difference(believed)
    stale = set(believed).difference(believed[at] for at in newest.values())
    report.good, report.corrupt = len(newest) - len(corrupt), len(corrupt)
    report.damaged, report.stale, report.free = len(damaged), len(stale), report.slots - len(used)
    return sorted({*corrupt, *damaged, *stale})


def _corrupt(
    files: TierFolder, records: Records, order: Sequence[int], slot_bytes: int
) -> list[int]:
    with suppress(OSError), files.opened(SLOTS_NAME, os.O_RDONLY) as payload:
        whole = memoryview(mmap.mmap(-1, slot_bytes))
        order = [
            at
            for at in order
            if not _read(payload, int(records.slots[at]) * slot_bytes, whole)
            or payload_checksum(records.keys[at], whole) != records.checksums[at].tobytes()
        ]
    return [int(records.slots[at]) for at in order]


def _read(payload: int, offset: int, into: memoryview) -> bool:
    try:
        os.posix_fadvise(payload, offset, len(into), os.POSIX_FADV_DONTNEED)
        return os.preadv(payload, [into], offset) == len(into)
    except OSError:
        return False


def _compare_sizes(report: Report, files: TierFolder) -> None:
    wanted = {INDEX_NAME: table_bytes(report.slots), SLOTS_NAME: report.slots * report.slot_bytes}
    for name, size in wanted.items():
        found = 0
        with suppress(FileNotFoundError), files.opened(name, os.O_RDONLY) as fd:
            found = os.fstat(fd).st_size
        if found < size:
            report.problems.append(
                f"{name} has {found:,} bytes, expected {size:,}: the next start reserves the rest"
            )


def _make_free(index: int, slots: Sequence[int]) -> None:
    for slot in slots:
        os.pwrite(index, EMPTY_RECORD, PAGE_BYTES + slot * RECORD_BYTES)
    os.fdatasync(index)
