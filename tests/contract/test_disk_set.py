"""DiskSet: every promise of a tier, on disks of other sizes too, and which disk has what."""

from __future__ import annotations

import shutil

import pytest

from kvtier.testing import check_tier, content
from kvtier.tiers.nvme.chunk_folder import ChunkFolder
from kvtier.tiers.nvme.parts import parts_of
from tests.clock import Clock
from tests.nvme_place import LAYOUT, ON_SETS, SLOT, chunk_folder, fill, holds, opened, room

KEYS = LAYOUT.keys(range(40))


def on_each(tier):
    return [set(disk.chunks.held()) for disk in tier.disks]


@ON_SETS
@pytest.mark.parametrize("size", [1, 4096, 5000, SLOT])
def test_keeps_every_promise_of_a_tier(tmp_path, size, disks):
    def reopen():  # with a clock that stands: under load no disk counts as slow
        return opened(tmp_path / "set", disks, clock=Clock())

    def make():
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        return reopen()

    check_tier(make, chunk_bytes=size, reopen=reopen)


def test_a_prompts_chunks_lie_on_all_disks_and_a_full_one_is_passed_over(tmp_path):
    tier = opened(tmp_path, [4, 20, 20])
    fill(tier, KEYS[:9])
    assert min(map(len, on_each(tier))) >= 2
    fill(tier, KEYS[9:])
    assert len(on_each(tier)[0]) == 4
    assert tier.capacity == 44 and sum(map(len, on_each(tier))) == 40
    assert all(holds(tier, key) for key in KEYS)
    tier.close()


def test_a_folder_from_before_is_one_disk_of_a_set_and_a_disk_may_leave_it(tmp_path):
    alone = chunk_folder(tmp_path / "disk0", room(20))
    fill(alone, KEYS[:9])
    alone.close(KEYS[8::-1])
    tier = opened(tmp_path, [20, 20])
    assert tier.recovered() == KEYS[8::-1]
    fill(tier, KEYS[9:20])
    tier.close(KEYS[19::-1])
    tier = opened(tmp_path, [20, 20])
    second = set(on_each(tier)[1])
    tier.close()
    alone = chunk_folder(tmp_path / "disk0", room(20))
    assert set(alone.held()) == set(KEYS[:20]) - second and second
    alone.close()


def test_a_chunk_on_two_disks_is_kept_on_one(tmp_path):
    for at in range(2):
        one = chunk_folder(tmp_path / f"disk{at}", room(4))
        fill(one, KEYS[: at + 2])
        one.close()
    tier = opened(tmp_path, [4, 4])
    assert sorted(tier.recovered()) == sorted(KEYS[:3])
    assert sum(map(len, on_each(tier))) == 3
    tier.close()


def test_what_is_lent_is_divided_by_what_each_disk_could_have(tmp_path):
    tier = opened(tmp_path, [20, 5], lent=True)
    tables = sum(room(slots) - slots * SLOT for slots in (20, 5))
    assert (tier.capacity, tier.fixed_room, tier.chunk_room) == (25, tables, SLOT)
    assert not tier.write(KEYS[0], content(KEYS[0], SLOT)), "it has no room yet"
    assert tier.resize(10) == 10
    assert [disk.chunks.free for disk in tier.disks] == [8, 2]
    fill(tier, KEYS[:10])
    assert tier.resize(4) == 10, "what holds chunks is not given back"
    assert tier.resize(25) == 25
    fill(tier, KEYS[10:25])
    tier.close()


def test_a_faster_disk_gets_more(tmp_path, monkeypatch):
    now, write = [0.0], ChunkFolder.write

    def timed(tier, key, data, owner=0):
        now[0] += 0.003 if tier is slow else 0.001
        return write(tier, key, data, owner)

    tier = opened(tmp_path, [400, 400], clock=lambda: now[0])
    slow = tier.disks[0].chunks
    monkeypatch.setattr(ChunkFolder, "write", timed)
    fill(tier, LAYOUT.keys(range(320)))
    few, many = map(len, on_each(tier))
    assert 2.5 < many / few < 3.5
    tier.close()


def test_bytes_are_divided_by_room_and_kept_while_they_nearly_fit():
    assert parts_of(100, [300, 100, 0], [0, 0, 0]) == [75, 25, 0]
    assert parts_of(1000, [700, 300], [500, 490]) == [500, 490]
    assert parts_of(1100, [700, 300], [500, 490]) == [770, 330]
    assert parts_of(1000, [10], [995]) == [1000]
