"""ChunkFolder stays within its bytes, and finds its chunks again in order."""

import fcntl
import logging
import mmap
import os
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunk import KEY_BYTES, PAGE_BYTES, ChunkKey, coldest_first
from kvtier.core.errors import StateError, TierError
from kvtier.testing import content
from kvtier.tiers.nvme import files
from kvtier.tiers.nvme.check import check
from kvtier.tiers.nvme.disks import probe_disk
from kvtier.tiers.nvme.index import RECORD_BYTES, pack_record, payload_checksum, slots_within
from tests.child_process import DEADLINE_S
from tests.huge_pages import populated
from tests.nvme_place import LAYOUT, SLOT, chunk_folder, delete, fill, holds, is_direct, room

KEYS = LAYOUT.keys(range(40))


@given(
    bytes_=st.integers(0, 1 << 34), slot_bytes=st.integers(1, 5000).map(lambda pages: pages * 4096)
)
def test_slots_within_is_the_most_that_fits(bytes_, slot_bytes):
    slots = slots_within(bytes_, slot_bytes)
    assert not slots or room(slots, slot_bytes) <= bytes_
    assert room(slots + 1, slot_bytes) > bytes_


def blocks(folder):
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


def test_what_is_lent_takes_blocks_only_for_what_it_holds_and_is_given(tmp_path):
    path, table = tmp_path / "tier", room(20) - 20 * SLOT
    tier = chunk_folder(path, room(20), lent=True)
    assert tier.slots == 20
    assert blocks(path) == table
    assert not tier.write(KEYS[0], content(KEYS[0], SLOT)), "it has no room yet"
    assert tier.resize(12) == 12
    assert blocks(path) == table + 12 * SLOT
    fill(tier, KEYS[:12])
    for key in KEYS[2:9]:
        delete(tier, key)
    assert tier.resize(3) == 5, "what holds chunks is not given back"
    assert blocks(path) == table + 5 * SLOT
    tier.close()
    again = chunk_folder(path, room(20), lent=True)
    assert set(again.held()) == {*KEYS[:2], *KEYS[9:12]}
    assert blocks(path) == table + 5 * SLOT
    assert again.resize(20) == 20
    assert blocks(path) == room(20)
    assert all(holds(again, key) for key in (*KEYS[:2], *KEYS[9:12]))
    again.close()
    whole = chunk_folder(path, room(20))
    assert len(whole.held()) == 5 and blocks(path) == room(20)
    whole.close()
    lent = chunk_folder(path, room(20), lent=True)
    assert len(lent.held()) == 5 and blocks(path) == table + 5 * SLOT, "of free slots, too"
    lent.close()


def test_bytes_of_the_folders_life_outlive_stops_and_crashes(tmp_path):
    path = tmp_path / "tier"
    first = chunk_folder(path, room(4))
    for _ in range(3):
        fill(first, KEYS[:4])
        for key in KEYS[:3]:
            delete(first, key)
    assert first.counts["lifetime_bytes"] == first.counts["bytes_written"] == 10 * SLOT
    first.close([KEYS[3]])
    stopped = chunk_folder(path, room(4))
    assert (stopped.counts["lifetime_bytes"], stopped.counts["bytes_written"]) == (10 * SLOT, 0)
    fill(stopped, KEYS[4:6])
    killed = tmp_path / "killed"
    shutil.copytree(path, killed)
    stopped.close()
    again = chunk_folder(killed, room(4))
    assert again.counts["lifetime_bytes"] == 12 * SLOT
    again.close()


def test_more_records_than_numbers_after_a_power_cut_are_closed_and_found_again(tmp_path):
    path, keys = tmp_path / "tier", KEYS[:4]
    tier = chunk_folder(path, room(4))
    fill(tier, keys)
    tier.close()
    index = path / "index.kvtier"
    table = bytearray(index.read_bytes())
    for slot in range(4):
        at = PAGE_BYTES + slot * RECORD_BYTES
        key = ChunkKey(bytes(table[at : at + KEY_BYTES]))
        checksum = payload_checksum(key, memoryview(content(key, SLOT)))
        table[at : at + RECORD_BYTES] = pack_record(slot, SLOT, key, checksum, 1)
    index.write_bytes(table)
    for _ in range(2):
        tier = chunk_folder(path, room(4))
        assert all(holds(tier, key) for key in keys)
        tier.close()


def test_reserves_its_bytes_at_once_and_never_more(tmp_path):
    tier = chunk_folder(tmp_path / "tier", 1_000_000)
    files = list((tmp_path / "tier").iterdir())
    before = [file.stat().st_blocks * 512 for file in files]
    assert room(tier.slots) <= sum(before) <= 1_000_000
    fill(tier, LAYOUT.keys(range(tier.slots)))
    assert not tier.write(KEYS[0][::-1], content(KEYS[0], SLOT))
    assert tier.counts["refused"] == 1
    tier.close()
    assert [file.stat().st_blocks * 512 for file in files] == before


def test_payloads_bypass_the_page_cache_where_they_can(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(8))
    assert is_direct(tier) == probe_disk(str(tmp_path)).o_direct.value
    tier.close()


@pytest.mark.parametrize("size", [(4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_a_chunk_that_is_longer_than_a_threads_buffer_comes_back_whole(tmp_path, size):
    tier, key = (
        chunk_folder(tmp_path / "tier", 64 << 20, -(-size // PAGE_BYTES) * PAGE_BYTES),
        KEYS[0],
    )
    chunk = memoryview(os.urandom(size))
    assert tier.write(key, chunk)
    into = memoryview(bytearray(size + 1))[1:]  # no page's beginning: any memory will do
    assert tier.read(key, into)
    assert into == chunk
    tier.close()


# -- restart ---------------------------------------------------------------------------------------


def test_without_close_writes_and_deletes_are_kept_leaf_first(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tier = chunk_folder(tmp_path / "tier", room(20))
    run, other = KEYS[:5], LAYOUT.keys([9] * 3)
    fill(tier, [*run[:3], *other, *run[3:]])
    delete(tier, other[2])
    del tier
    tier = chunk_folder(tmp_path / "tier", room(20))
    assert coldest_first(tier.stamped()) == [other[1], other[0], *reversed(run)]
    assert all(holds(tier, key) for key in (*run, *other[:2]))
    assert "7 chunks found after a stop without close, 0 records damaged" in caplog.text
    tier.close()
    chunk_folder(tmp_path / "tier", room(20)).close()
    assert "7 chunks found, 0 records damaged" in caplog.text


def test_after_a_crash_new_writes_are_newer_than_old_ones(tmp_path):
    runs = [LAYOUT.keys([prompt]) for prompt in range(4)]
    for batch in (runs[:3], runs[3:]):
        tier = chunk_folder(tmp_path / "tier", room(20))
        for run in batch:
            fill(tier, run)
        del tier
    tier = chunk_folder(tmp_path / "tier", room(20))
    assert coldest_first(tier.stamped()) == [run[0] for run in runs]
    tier.close()


def test_close_puts_unnamed_chunks_before_the_named(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(20))
    runs = [LAYOUT.keys([prompt]) for prompt in range(5)]
    for run in runs:
        fill(tier, run)
    tier.close([runs[3][0], runs[1][0]])
    tier = chunk_folder(tmp_path / "tier", room(20))
    assert coldest_first(tier.stamped()) == [runs[index][0] for index in (0, 2, 4, 3, 1)]
    tier.close()


def test_grows_and_keeps_everything(tmp_path, caplog):
    tier = chunk_folder(tmp_path / "tier", room(8))
    fill(tier, KEYS[:8])
    tier.close()
    tier = chunk_folder(tmp_path / "tier", room(40))
    assert tier.slots == 40
    fill(tier, KEYS)
    assert all(holds(tier, key) for key in KEYS)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    tier.close()


def test_shrinks_with_a_warning_and_regrows_empty(tmp_path, caplog):
    tier = chunk_folder(tmp_path / "tier", room(40))
    fill(tier, KEYS)
    tier.close()
    tier = chunk_folder(tmp_path / "tier", room(9))
    assert "shrinks from 40 to 9 slots" in caplog.text
    assert sorted(tier.held()) == sorted(KEYS[:9])
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "tier").iterdir()) <= room(9)
    del tier
    for _ in range(2):
        tier = chunk_folder(tmp_path / "tier", room(40))
        assert sorted(tier.held()) == sorted(KEYS[:9])
        assert tier.counts["corrupt"] == 0
        del tier


def test_another_slot_size_empties_it_with_one_warning(tmp_path, caplog):
    tier = chunk_folder(tmp_path / "tier", room(8))
    fill(tier, KEYS[:8])
    tier.close()
    tier = chunk_folder(tmp_path / "tier", room(8), 2 * SLOT)
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "8 8192-byte slots" in warned[0]
    assert tier.held() == []
    tier.close()


# -- what cannot be opened -------------------------------------------------------------------------


def test_no_room_is_told_in_numbers_and_leaves_nothing(tmp_path):
    path = tmp_path / "new" / "tier"
    with pytest.raises(
        TierError, match=r"needs 1048575\.\d\d GiB more, but of [\d.]+ GiB free .* reserve at most"
    ):
        chunk_folder(path, 1 << 50, 1 << 30)
    assert not (tmp_path / "new").exists()


def test_no_room_to_grow_keeps_what_is_there(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(8))
    fill(tier, KEYS[:8])
    tier.close()
    with pytest.raises(TierError, match="GiB more"):
        chunk_folder(tmp_path / "tier", 1 << 50)
    tier = chunk_folder(tmp_path / "tier", room(8))
    assert all(holds(tier, key) for key in KEYS[:8])
    tier.close()


def test_less_than_one_chunk_is_refused(tmp_path):
    with pytest.raises(TierError, match="give at least 16,384"):
        chunk_folder(tmp_path / "tier", room(1) - 1)
    chunk_folder(tmp_path / "tier", 16384).close()


@pytest.mark.parametrize("slot_bytes", [0, 4095, 4097, 2 << 30])
def test_a_slot_size_that_is_no_multiple_of_a_page_is_a_bug(tmp_path, slot_bytes):
    with pytest.raises(StateError, match="multiple of 4096"):
        chunk_folder(tmp_path / "tier", 1 << 30, slot_bytes)


@pytest.mark.parametrize("size", [0, SLOT + 1])
def test_a_chunk_of_another_size_is_a_bug(tmp_path, size):
    tier = chunk_folder(tmp_path / "tier", room(8))
    with pytest.raises(StateError, match=f"{size} bytes for slots of {SLOT}"):
        tier.write(KEYS[0], memoryview(bytes(size)))
    tier.close()


def test_a_second_opener_is_refused_and_changes_nothing(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(8))
    fill(tier, KEYS[:3])
    with pytest.raises(TierError, match=f"in use by process {os.getpid()}; stop it, or give"):
        chunk_folder(tmp_path / "tier", room(4), 2 * SLOT)
    assert all(holds(tier, key) for key in KEYS[:3])
    tier.close()
    chunk_folder(tmp_path / "tier", room(8)).close()


def test_who_loses_the_race_to_open_removes_nothing(tmp_path, monkeypatch):
    def taken(_fd, _how):
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", taken)
    with pytest.raises(TierError, match="in use by another process"):
        chunk_folder(tmp_path / "tier", room(8))
    assert (tmp_path / "tier" / "index.kvtier").exists()


def test_a_place_that_is_no_folder_of_ours_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TierError, match="folder"):
        chunk_folder(tmp_path / "file", room(8))
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "index.kvtier").symlink_to(tmp_path / "file")
    with pytest.raises(TierError, match=r"index\.kvtier is a link or a pipe"):
        chunk_folder(tmp_path / "tier", room(8))
    assert (tmp_path / "file").read_text() == "mine"


# -- late and racing calls -------------------------------------------------------------------------


def test_after_close_every_call_is_a_miss(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(8))
    fill(tier, KEYS[:1])
    tier.close()
    assert not holds(tier, KEYS[0])
    assert not tier.write(KEYS[1], content(KEYS[1], SLOT))


def test_a_write_that_hangs_over_close_cannot_hit_another_file(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(8))
    inside, go_on = threading.Event(), threading.Event()
    wait_and_write = tier._files.write_payload

    def hang(slot, data):
        inside.set()
        go_on.wait(DEADLINE_S)
        wait_and_write(slot, data)

    tier._files.write_payload = hang
    results: list[bool] = []
    thread = threading.Thread(
        target=lambda: results.append(tier.write(KEYS[0], content(KEYS[0], SLOT)))
    )
    thread.start()
    inside.wait(DEADLINE_S)
    tier.close()
    with (tmp_path / "innocent").open("wb+") as innocent:
        go_on.set()
        thread.join()
        assert results == [False]
        assert innocent.read() == b""
    tier = chunk_folder(tmp_path / "tier", room(8))
    assert tier.held() == []
    tier.close()


def test_a_read_whose_slot_is_filled_anew_is_a_miss_and_harms_nobody(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(1))
    fill(tier, KEYS[:1])
    read = tier._files.read_payload

    def overtaken(slot, into, start=0):
        delete(tier, KEYS[0])
        fill(tier, KEYS[1:2])
        read(slot, into)

    tier._files.read_payload = overtaken
    assert not tier.read(KEYS[0], memoryview(bytearray(SLOT)))
    tier._files.read_payload = read
    assert holds(tier, KEYS[1])
    assert tier.counts["corrupt"] == 0
    tier.close()


def test_a_torn_read_does_not_drop_the_same_key_written_anew(tmp_path):
    tier = chunk_folder(tmp_path / "tier", room(1))
    fill(tier, KEYS[:1])
    read = tier._files.read_payload

    def torn(slot, into, start=0):
        read(slot, into)
        into[5] ^= 1
        delete(tier, KEYS[0])
        fill(tier, KEYS[:1])

    tier._files.read_payload = torn
    assert not tier.read(KEYS[0], memoryview(bytearray(SLOT)))
    tier._files.read_payload = read
    assert holds(tier, KEYS[0])
    assert tier.counts["corrupt"] == 0
    tier.close()


def in_pool_tier(path, pool):
    return chunk_folder(path, room(4, pool.slot_bytes), pool.slot_bytes, pool.in_huge_pages)


def test_a_chunk_in_huge_pages_goes_to_the_disk_and_back_as_it_is(tmp_path, monkeypatch):
    pool = populated(4)
    tier = in_pool_tier(tmp_path / "tier", pool)
    pool.view(0)[:] = chunk = os.urandom(pool.slot_bytes)
    monkeypatch.setattr(files, "_staging", None)
    assert tier.write(KEYS[0], pool.view(0))
    assert tier.read(KEYS[0], pool.view(2))
    assert pool.view(2) == chunk
    with pytest.raises(AttributeError, match="no attribute 'room'"):
        tier.write(KEYS[1], memoryview(mmap.mmap(-1, pool.slot_bytes)))
    tier.close()


def test_both_ways_to_the_disk_leave_the_same_files(tmp_path):
    """So a folder from a machine without huge pages is warm on one with them, and the other way
    round."""
    pool, path = populated(4), tmp_path / "tier"
    chunks = [os.urandom(pool.slot_bytes) for _ in range(2)]
    tier = in_pool_tier(path, pool)
    pool.view(0)[:] = chunks[0]
    assert tier.write(KEYS[0], pool.view(0))
    assert tier.write(KEYS[1], memoryview(chunks[1]))
    tier.close()
    other = chunk_folder(path, room(4, pool.slot_bytes), pool.slot_bytes)
    into = memoryview(bytearray(pool.slot_bytes))
    assert other.read(KEYS[0], into)
    assert into == chunks[0]
    other.close()
    again = in_pool_tier(path, pool)
    assert again.read(KEYS[1], pool.view(3))
    assert pool.view(3) == chunks[1]
    again.close()
    assert check(path).good == 2


@pytest.mark.parametrize("at", [0, 4096, (7 << 20) - 1])
def test_a_wrong_byte_is_a_miss_also_in_huge_pages(tmp_path, at):
    pool = populated(4)
    tier = in_pool_tier(tmp_path / "tier", pool)
    pool.view(0)[:] = os.urandom(pool.slot_bytes)
    assert tier.write(KEYS[0], pool.view(0))
    with (tmp_path / "tier" / "slots.kvtier").open("r+b") as slots:
        slots.seek(at)
        byte = slots.read(1)
        slots.seek(at)
        slots.write(bytes([byte[0] ^ 1]))
        os.fsync(slots.fileno())
    assert not tier.read(KEYS[0], pool.view(1))
    assert tier.counts["corrupt"] == 1
    tier.close()


def test_a_disk_that_gives_or_takes_less_than_asked_is_a_miss_also_in_huge_pages(
    tmp_path, monkeypatch
):
    pool = populated(4)
    tier = in_pool_tier(tmp_path / "tier", pool)
    with monkeypatch.context() as short:
        short.setattr(os, "pwritev", lambda fd, parts, offset: len(parts[0]) - PAGE_BYTES)
        assert not tier.write(KEYS[0], pool.view(0))
    assert tier.write(KEYS[0], pool.view(0))
    with monkeypatch.context() as short:
        short.setattr(os, "preadv", lambda fd, parts, offset: len(parts[0]) - PAGE_BYTES)
        assert not tier.read(KEYS[0], pool.view(1))
    assert (tier.counts["failed_writes"], tier.counts["failed_reads"]) == (1, 1)
    tier.close()
