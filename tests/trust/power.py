"""Power cuts on the NVMe tier's real files: every write is recorded, and images are rebuilt without
some of them.

``python -m tests.trust.power [--cuts 1000] [--seed 0]`` prints one object of JSON.

A store with real lanes and a real :class:`DiskSet` saves, loads, evicts and forgets, is closed or
dies and is opened again, while a layer between it and its two files notes what is written where,
and which writes a completed ``fdatasync`` has made durable. A cut takes the journal up to any
write. What was durable stays. Of every 512-byte sector that was not, any of its contents since then
is left, independently of all others (see :class:`tests.trust.disk.SimFile`), so writes are lost,
torn and reordered in every way a device may do it. The image is written to real files, and then:

- ``kvtier check`` and the tier agree how many chunks are whole, and how many are not.
- The tier serves the right bytes or misses. Each chunk that it had found and cannot serve is
  counted as corrupt.
- A chunk that was durable, and whose slot nobody has written to since, is served (unless the one
  page that says what the files are was cut through).
- Its log says how many chunks were found, after a stop without close, and how many records were
  damaged.
- It takes as many chunks as it has room for, and holds exactly these after the next start.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import kvtier.tiers.nvme.files
import kvtier.tiers.nvme.folder
import kvtier.tiers.own_folder
from kvtier.core.chunk import PAGE_BYTES, ChunkKey
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.store import Store
from kvtier.testing import content
from kvtier.tiers.nvme.check import check
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.nvme.folder import INDEX_NAME, SLOTS_NAME
from kvtier.tiers.nvme.index import RECORD_BYTES, Superblock, read_records
from tests.nvme_place import LAYOUT, SLOT, chunk_folder, room
from tests.server_process import load, save
from tests.trust.disk import SECTOR, SimFile

SLOTS = 24
PROMPTS, LONGEST = 10, 5
TURNS = 40
"""Saves and loads between two openings."""
OPENINGS = 5
_DEATHS = 0.4


class Step(NamedTuple):
    """One change of one file: bytes written, a new size, or (neither) a completed sync."""

    file: str
    at: int = 0
    data: bytes | None = None
    size: int | None = None


class Recorder:
    """Stands in for ``os`` in the tier's modules: notes what changes, and has the real one do it.

    A write is noted before it is done, a sync after: between the two anything may have reached the
    device.
    """

    def __init__(self):
        self.steps: list[Step] = []
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        self._names[fd] = Path(path).name
        return fd

    def pwritev(self, fd, parts, at):
        self._note(Step(self._names[fd], at, b"".join(parts)))
        return os.pwritev(fd, parts, at)

    def pwrite(self, fd, data, at):
        self._note(Step(self._names[fd], at, bytes(data)))
        return os.pwrite(fd, data, at)

    def ftruncate(self, fd, size):
        os.ftruncate(fd, size)
        self._note(Step(self._names[fd], size=size))

    def posix_fallocate(self, fd, at, size):
        os.posix_fallocate(fd, at, size)
        self._note(Step(self._names[fd], size=max(at + size, os.fstat(fd).st_size)))

    def fdatasync(self, fd):
        os.fdatasync(fd)
        self._note(Step(self._names[fd]))

    def _note(self, step):
        with self._lock:
            self.steps.append(step)


@contextmanager
def recorded():
    """The tier's files, noted."""
    modules: Any = (kvtier.tiers.nvme.files, kvtier.tiers.nvme.folder, kvtier.tiers.own_folder)
    recorder = Recorder()
    for module in modules:
        module.os = recorder
    try:
        yield recorder
    finally:
        for module in modules:
            module.os = os


def journal(folder, draw):
    """All changes of the files in ``folder`` by a store under load, opened a few times."""
    with recorded() as recorder:
        for _ in range(OPENINGS):
            lane = Lane("nvme", 2, urgent_bound=256, bound=256)
            tier = DiskSet([DiskPlace(folder, room(SLOTS), 2)], SLOT)
            place = TierSpec(tier, lane, on_evict=draw.random() < 0.5)
            store = Store(Pool(LONGEST + 3, SLOT), [place])
            for _ in range(TURNS):
                keys = LAYOUT.keys([draw.randrange(PROMPTS), *range(draw.randrange(LONGEST))])
                draw.choice((save, save, load))(store, keys)
                if draw.random() < 0.1:
                    store.invalidate(keys[-1:])
            if draw.random() < _DEATHS:  # the next one finds the records as they are
                assert lane.close(5.0) and tier.disks[0].lane.close(5.0)
                tier.disks[0].chunks._files.release()
            else:
                assert store.close()
    return recorder.steps


class Platter:
    """What the device holds after the first steps of a journal, and what of it is certain."""

    def __init__(self):
        self.files = {INDEX_NAME: SimFile(), SLOTS_NAME: SimFile()}
        self._certain: dict[int, ChunkKey] = {}
        """Chunks by slot that a power cut cannot take any more."""

    def do(self, step):
        file = self.files[step.file]
        if step.data is not None:
            file.write(step.at, step.data)
            self._doubt(step.file, step.at, len(step.data))
        elif step.size is not None:
            file.resize(step.size)
        else:
            file.unsynced.clear()
            if not any(each.unsynced for each in self.files.values()):
                self._certain = self._records()

    def certain(self):
        return set(self._certain.values())

    def cut(self, draw):
        """The files after a power cut now, and how many sectors were lost."""
        left, keep = copy.deepcopy(self.files), draw.choice((0.0, 0.1, 0.5, 0.9))
        return left, sum(file.power_cut(draw, keep) for file in left.values())

    def _doubt(self, name, at, size):
        """A sector that is written again may be left with anything: so may all records in it, and
        its slot."""
        if name == SLOTS_NAME:
            slots = range(at // SLOT, -(-(at + size) // SLOT))
        else:
            first, end = (
                at // SECTOR * SECTOR - PAGE_BYTES,
                -(-(at + size) // SECTOR) * SECTOR - PAGE_BYTES,
            )
            slots = range(max(0, first // RECORD_BYTES), max(0, end // RECORD_BYTES))
        for slot in slots:
            self._certain.pop(slot, None)

    def _records(self):
        table = bytes(self.files[INDEX_NAME].data[PAGE_BYTES:])
        records = read_records(memoryview(table), min(SLOTS, len(table) // RECORD_BYTES), SLOT)
        return dict(zip(records.slots.tolist(), records.keys, strict=True))


@dataclass
class Damage:
    """What the cuts did, and what the tier made of it."""

    cuts: int = 0
    seeds: int = 0
    sectors: int = 0
    """Lost, torn or older than what was written."""
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


@lru_cache(maxsize=1024)
def right(key):
    return bytes(content(key, SLOT))


class Said(logging.Handler):
    """The tier's own words."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def examine(folder, files, certain, damage, said):
    """Open the image. AssertionError when a promise is broken."""
    for name, file in files.items():
        (folder / name).touch(0o600)
        (folder / name).write_bytes(file.data)
    report = check(folder)
    said.lines.clear()
    tier = chunk_folder(folder, room(SLOTS))
    found = tier.held()
    served = {key for key in found if reads(tier, key)}
    assert (len(served), len(found) - len(served)) == (report.good, report.corrupt), (
        f"check says {report}"
    )
    assert tier.counts["corrupt"] == len(found) - len(served) + report.damaged, (
        "a loss is not counted"
    )
    whole = Superblock.unpack(bytes(files[INDEX_NAME].data[:PAGE_BYTES])) is not None
    assert not whole or certain <= served, f"{len(certain - served)} durable chunks are lost"
    if found or report.damaged:
        how = "" if report.closed else " after a stop without close"
        line = f"{len(found)} chunks found{how}, {report.damaged} records damaged"
        assert any(line in each for each in said.lines), f"not said: {line}"
    fresh = LAYOUT.keys(range(1000, 1000 + SLOTS + 1))
    taken = [key for key in fresh if tier.write(key, memoryview(right(key)))]
    assert len(served) + len(taken) == SLOTS, (
        f"room for {len(served) + len(taken)} chunks of {SLOTS}"
    )
    tier.close(taken)
    again = chunk_folder(folder, room(SLOTS))
    assert set(again.held()) == served | set(taken), "another start finds other chunks"
    assert all(reads(again, key) for key in (*served, *taken)), "what was whole is not any more"
    again.close()
    damage.counts.update(
        found=len(found), served=len(served), corrupt=tier.counts["corrupt"], certain=len(certain)
    )
    damage.counts["superblock cut through"] += not whole


def reads(tier, key):
    into = memoryview(bytearray(SLOT))
    held = tier.read(key, into) is True
    assert not held or into == right(key), "wrong bytes are served"
    return held


def many(cuts, seed=0, at_once=250):
    """Cut the power so many times, ``at_once`` in one journal."""
    damage, said = Damage(), Said()
    log = logging.getLogger("kvtier.tiers.nvme")
    before = log.level
    log.addHandler(said)
    log.setLevel(logging.INFO)
    try:
        for turn in range(-(-cuts // at_once)):
            _cut_one_journal(min(at_once, cuts - turn * at_once), seed + turn, damage, said)
            damage.seeds += 1
    finally:
        log.removeHandler(said)
        log.setLevel(before)
    return damage


def _cut_one_journal(cuts, seed, damage, said):
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvtier-power-") as folder:
        steps = journal(Path(folder) / "run", draw)
        image = Path(folder) / "image"
        image.mkdir()
        platter, done = Platter(), 0
        for where in sorted(draw.choices(range(1, len(steps) + 1), k=cuts)):
            for step in steps[done:where]:
                platter.do(step)
            done = where
            files, lost = platter.cut(draw)
            damage.cuts += 1
            damage.sectors += lost
            try:
                examine(image, files, platter.certain(), damage, said)
            except AssertionError as error:
                damage.violations.append(
                    f"seed {seed}, after {where} of {len(steps)} steps: {error}"
                )


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("kvtier").addHandler(logging.NullHandler())
    begun = time.monotonic()
    damage = many(given.cuts, given.seed)
    result = {
        "cuts": damage.cuts,
        "seeds": damage.seeds,
        "sectors": damage.sectors,
        "chunks": dict(damage.counts),
        "seconds": round(time.monotonic() - begun, 1),
        "violations": damage.violations,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return bool(damage.violations)


if __name__ == "__main__":
    sys.exit(main())
