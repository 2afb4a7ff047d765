"""What a crash, a stranger or records that contradict each other do to ChunkFolder: it may forget,
it never lies. Bits, files and slots that are damaged are in ``tests/trust/corruption.py``."""

import os
import random
import struct
import subprocess
import sys

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.core.chunk import PAGE_BYTES, ChunkKey
from kvtier.core.tenant import UNOWNED, owner_of
from kvtier.testing import content
from kvtier.tiers.nvme.files import SlotFiles
from kvtier.tiers.nvme.index import (
    EMPTY_RECORD,
    RECORD_BYTES,
    Superblock,
    pack_record,
    payload_checksum,
)
from tests.nvme_place import LAYOUT, ON_SETS, SLOT, chunk_folder, fill, flip, held, opened, room

SLOTS = 8
ROOM = room(SLOTS)
KEYS = LAYOUT.keys(range(SLOTS))
KILLS = 20


@pytest.fixture
def place(tmp_path):
    """A tier's folder after a clean close: chunk i in slot i, all slots taken."""
    tier = chunk_folder(tmp_path / "tier", ROOM)
    fill(tier, KEYS)
    tier.close(KEYS)
    return tmp_path / "tier"


def recovered(tier):
    return {KEYS.index(key) for key in tier.held()}


def record_at(slot):
    return PAGE_BYTES + slot * RECORD_BYTES


# -- damage on the disk ----------------------------------------------------------------------------


def test_a_dropped_chunk_stays_dropped_after_a_crash(place):
    flip(place / "slots.kvtier", 3 * SLOT)
    tier = chunk_folder(place, ROOM)
    assert held(tier, KEYS) == set(range(SLOTS)) - {3}
    del tier
    tier = chunk_folder(place, ROOM)
    assert recovered(tier) == set(range(SLOTS)) - {3}
    tier.close()


def test_records_from_before_there_were_owners_are_nobodys(place):
    """And a reader from then takes today's records: it never looked at those bytes."""
    check, seed = struct.Struct("<Q"), SLOT << 32
    with (place / "index.kvtier").open("r+b") as table:
        for slot, key in enumerate(KEYS):
            body = struct.pack(
                "<40s16sQ56x", key, payload_checksum(key, content(key, SLOT)), slot + 1
            )
            table.seek(record_at(slot))
            table.write(body + check.pack(xxh3_64_intdigest(body, seed=seed + slot)))
    tier = chunk_folder(place, ROOM)
    assert recovered(tier) == held(tier, KEYS) == set(range(SLOTS))
    assert tier.owners(KEYS) == [UNOWNED] * SLOTS
    tier.close()


def test_owners_outlive_a_crash_and_a_name_cannot_be_read_from_the_disk(tmp_path):
    whose = [owner_of(LAYOUT.fingerprint, f"tenant{slot % 2}") for slot in range(SLOTS)]
    tier = chunk_folder(tmp_path / "tier", ROOM)
    for key, owner in zip(KEYS, whose, strict=True):
        assert tier.write(key, content(key, SLOT), owner)
    del tier  # no close
    tier = chunk_folder(tmp_path / "tier", ROOM)
    assert tier.owners(KEYS) == whose
    tier.close()
    assert b"tenant" not in (tmp_path / "tier" / "index.kvtier").read_bytes()
    flip(tmp_path / "tier" / "index.kvtier", record_at(3) + 64)
    tier = chunk_folder(tmp_path / "tier", ROOM)
    assert tier.owners(KEYS) == [*whose[:3], UNOWNED, *whose[4:]]
    assert held(tier, KEYS) == set(range(SLOTS)) - {3}, "another owner makes it no record"
    tier.close()


def test_a_foreign_version_is_emptied_with_one_warning(place, caplog):
    with (place / "index.kvtier").open("r+b") as table:
        table.write(Superblock(SLOT, SLOTS, 1, clean=True, version=2).pack())
    tier = chunk_folder(place, ROOM)
    assert caplog.text.count("dropped: the format is version 2") == 1
    assert recovered(tier) == held(tier, KEYS) == set()
    tier.close()


@pytest.mark.parametrize("name", ["index.kvtier", "slots.kvtier"])
def test_a_lost_file_costs_all(place, name):
    (place / name).unlink()
    tier = chunk_folder(place, ROOM)
    assert recovered(tier) == held(tier, KEYS) == set()
    fill(tier, KEYS)
    tier.close()


def test_a_file_truncated_under_us_is_a_miss_not_an_error(place):
    tier = chunk_folder(place, ROOM)
    os.truncate(place / "slots.kvtier", 6 * SLOT)
    assert held(tier, KEYS) == set(range(6))
    assert tier.counts["failed_reads"] == 2
    tier.close()


def test_a_payload_is_not_believed_under_another_key(place):
    stranger = ChunkKey(KEYS[3][::-1])
    with (place / "index.kvtier").open("r+b") as table:
        table.seek(record_at(3))
        table.write(
            pack_record(3, SLOT, stranger, payload_checksum(KEYS[3], content(KEYS[3], SLOT)), 100)
        )
    tier = chunk_folder(place, ROOM)
    assert stranger in tier.held()
    assert not tier.read(stranger, memoryview(bytearray(SLOT)))
    tier.close()


@pytest.mark.parametrize("number", [0, 1 << 62, (1 << 64) - 1])
def test_a_record_with_a_number_that_no_life_reaches_is_damaged(number, tmp_path):
    """Its checksum is right. Numbers go on from the largest, which must leave room for more."""
    key, other = LAYOUT.keys(range(2))
    tier = chunk_folder(tmp_path, room(4))
    fill(tier, [key])
    tier.close()
    whole = memoryview(content(other, SLOT))
    record = pack_record(1, SLOT, other, payload_checksum(other, whole), number)
    with (tmp_path / "slots.kvtier").open("r+b") as file:
        file.seek(SLOT)
        file.write(whole)
    with (tmp_path / "index.kvtier").open("r+b") as file:
        file.seek(PAGE_BYTES + RECORD_BYTES)
        file.write(record)
    for _ in range(2):
        again = chunk_folder(tmp_path, room(4))
        assert held(again, [key, other]) == {0}
        fill(again, [other])
        assert again.counts["lifetime_bytes"] < 1 << 40
        again.delete(other)
        again.close()


def test_of_two_records_for_a_key_the_newer_counts(place):
    """A power cut that lost the delete, after the key was written again elsewhere."""
    data = content(KEYS[1], SLOT)
    with (
        (place / "index.kvtier").open("r+b") as table,
        (place / "slots.kvtier").open("r+b") as slots,
    ):
        table.seek(record_at(5))
        table.write(pack_record(5, SLOT, KEYS[1], payload_checksum(KEYS[1], data), 100))
        slots.seek(5 * SLOT)
        slots.write(data)
        slots.seek(1 * SLOT)
        slots.write(bytes(SLOT))
    tier = chunk_folder(place, ROOM)
    keys = tier.held()
    assert len(keys) == SLOTS - 1 and tier.owed == 1
    assert held(tier, KEYS) == set(range(SLOTS)) - {5}
    fill(tier, KEYS[5:6])
    assert not tier.write(ChunkKey(KEYS[0][::-1]), data)
    assert held(tier, KEYS) == set(range(SLOTS))
    tier.close()


# -- kill -9 ---------------------------------------------------------------------------------------

WRITER = """
import os, random, sys
from pathlib import Path
from kvtier.core.chunk import ChunkLayout
from kvtier.testing import content
from tests.nvme_place import opened
slot, seed, *disks = map(int, sys.argv[2:])
keys = ChunkLayout(bytes(32), 1, 1, (slot,)).keys(range(40))
rng = random.Random(seed)
tier = opened(Path(sys.argv[1]), disks)
held = set(tier.recovered())
os.write(1, b"!")
for turn in range(5000):
    index = rng.randrange(len(keys))
    if keys[index] in held:
        os.write(1, bytes([index + 128]))
        tier.delete(keys[index])
        held.discard(keys[index])
    elif tier.write(keys[index], content(keys[index], slot)):
        os.write(1, bytes([index]))
        held.add(keys[index])
    if turn % 50 == 49:
        tier.close(sorted(held))
        tier = opened(Path(sys.argv[1]), disks)
"""


def run_and_kill(path, disks, seed):
    """Let a writer work in ``path``, kill -9 it at a random point, return all it had told by
    then."""
    command = [sys.executable, "-c", WRITER, str(path), *map(str, (SLOT, seed, *disks))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = b""
        for _ in range(random.Random(seed).randrange(1, 300)):
            told += writer.stdout.read(1)
        writer.kill()
        told += writer.stdout.read()
    assert writer.returncode == -9, "the writer must be killed, not end"
    return told


@ON_SETS
def test_kill_9_at_random_points_costs_nothing_that_was_acknowledged(tmp_path, disks):
    keys = LAYOUT.keys(range(40))
    acknowledged: set[int] = set()
    for seed in range(KILLS):
        for event in run_and_kill(tmp_path, disks, seed)[1:]:
            if event < 128:
                acknowledged.add(event)
            else:
                acknowledged.discard(event - 128)
        tier = opened(tmp_path, disks)
        found = {keys.index(key) for key in tier.recovered()}
        readable = held(tier, keys)
        assert readable == found, "after kill -9 (no power cut) what is found is whole"
        assert acknowledged <= readable
        assert len(readable - acknowledged) <= 1, "at most the one delete or write in flight"
        assert tier.counts["corrupt"] == 0
        acknowledged = readable
        del tier


def test_a_slot_is_free_only_when_its_record_is_off_the_disk(place, monkeypatch):
    """Another thread writes a chunk while a record is erased. In the wrong order its own record is
    erased: after a crash a chunk that was acknowledged is gone."""
    tier = chunk_folder(place, ROOM)
    new, acknowledged = LAYOUT.keys([9]), []

    def meanwhile(slot, record):
        if record == EMPTY_RECORD:
            acknowledged.append(tier.write(new[0], content(new[0], SLOT)))
        SlotFiles.write_record(tier._files, slot, record)

    monkeypatch.setattr(tier._files, "write_record", meanwhile)
    tier.delete(KEYS[4])
    assert tier.settle()
    monkeypatch.undo()
    assert acknowledged == [False], "no slot is free yet"
    fill(tier, new)
    del tier  # a crash
    tier = chunk_folder(place, ROOM)
    assert held(tier, [*KEYS, *new]) == set(range(SLOTS + 1)) - {4}
    tier.close()
