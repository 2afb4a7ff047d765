"""One of several disks that fails, hangs, vanishes or comes back costs its chunks and no others,
under a Store too."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

import kvtier.tiers.nvme.files
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.core.tenant import owner_of
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.store import Store
from kvtier.testing import content
from kvtier.tiers.nvme import disk_set, parts
from kvtier.tiers.nvme.disk_set import DiskPlace, DiskSet
from kvtier.tiers.nvme.parts import NvmeSection
from kvtier.tiers.nvme.set_disk import FROZEN_S
from kvtier.tiers.seam import Opening
from tests.child_process import wait_for
from tests.clock import Clock
from tests.mounts import silent
from tests.nvme_place import LAYOUT, SLOT, chunk_folder, fill, flip, holds, room, tried

KEYS = LAYOUT.keys(range(40))
BOTH = room(40)


class FaultyDisks:
    """Stands in for ``os`` in :mod:`kvtier.tiers.nvme.files`: payloads of ``bad`` folders give EIO,
    of ``hung`` ones neither come nor go, and of ``slow`` ones take a second of ``clock``. Records
    fail in ``unwritable`` ones, and stay where they are in ``stuck`` ones."""

    def __init__(self, clock):
        self.bad, self.hung, self.slow = set[Path](), set[Path](), set[Path]()
        self.unwritable, self.stuck = set[Path](), set[Path]()
        self.clock = clock
        self.goes = threading.Event()
        self.waiting = 0

    def __getattr__(self, name):
        return getattr(os, name)

    def _folder(self, fd):
        return Path(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")).parent

    def _wait(self):
        self.waiting += 1
        assert self.goes.wait(60)

    def _meet(self, fd):
        folder = self._folder(fd)
        if folder in self.hung:
            self._wait()
        self.clock.now += 1.0 if folder in self.slow else 0.001
        if folder in self.bad:
            raise OSError(errno.EIO, "simulated")

    def pwritev(self, fd, parts, at):
        self._meet(fd)
        return os.pwritev(fd, parts, at)

    def pwrite(self, fd, data, at):
        if self._folder(fd) in self.stuck:
            self._wait()
        if self._folder(fd) in self.unwritable:
            raise OSError(errno.EIO, "simulated")
        return os.pwrite(fd, data, at)

    def preadv(self, fd, parts, at):
        self._meet(fd)
        return os.preadv(fd, parts, at)


@pytest.fixture
def faulty(clock, monkeypatch):
    faulty = FaultyDisks(clock)
    monkeypatch.setattr(kvtier.tiers.nvme.files, "os", faulty)
    yield faulty
    faulty.goes.set()


@pytest.fixture
def clock():
    return Clock()


def opened(place, clock, slots=20):
    places = [DiskPlace(place / f"disk{at}", room(slots), 2) for at in range(4)]
    return DiskSet(places, SLOT, clock=clock)


def filled(place, clock):
    tier = opened(place, clock)
    assert not tier.recovered()
    fill(tier, KEYS)
    return tier


def of(tier, at):
    return tier.disks[at].chunks.held()


def read(tier, key):
    return tier.read(key, memoryview(bytearray(SLOT)))


def fail(tier, faulty, at):
    """Reads of a disk fail until it is left alone. Returns what it has then."""
    faulty.bad.add(tier.disks[at].folder)
    for key in of(tier, at)[:3]:
        assert tier.may_read(key) and not read(tier, key)
    assert tier.disks[at].away
    return of(tier, at)


def test_a_disk_that_fails_is_left_alone_and_comes_back(tmp_path, faulty, clock, caplog):
    tier = filled(tmp_path, clock)
    left = fail(tier, faulty, 1)
    folder = str(tier.disks[1].folder)
    assert tier.capacity == 60
    assert tier.nodes_away == [
        f"{folder} (its reads or writes fail: look at the kernel's log (dmesg))"
    ]
    assert set(left) == set(tried(tier)[0])
    assert not any(tier.may_read(key) for key in left)
    assert {read(tier, key) for key in left} == {None}
    others = [key for at in (0, 2, 3) for key in of(tier, at)]
    assert all(holds(tier, key) for key in others)
    clock.now += 1
    assert tried(tier) == ([], []), "it was tried, and still fails"
    faulty.bad.clear()
    clock.now += 60
    lost, found = tried(tier)
    assert not lost and set(found) == set(left) and tier.capacity == 80 and not tier.nodes_away
    assert tier.find(left) == len(left)
    assert all(holds(tier, key) for key in left)
    assert "it is back" in caplog.text
    tier.close()


def test_a_write_that_fails_goes_to_another_disk(tmp_path, faulty, clock):
    tier = opened(tmp_path, clock)
    faulty.bad = {tmp_path / "disk0", tmp_path / "disk3"}
    fill(tier, KEYS)
    assert [bool(disk.away) for disk in tier.disks] == [True, False, False, True]
    assert [len(of(tier, at)) for at in (1, 2)] == [20, 20]
    assert tier.capacity == 40 and not tier.write(LAYOUT.keys([99])[0], content(KEYS[0], SLOT))
    tier.close()


def killed(tier):
    for disk in tier.disks:
        disk.lane.close(0.0)
        if disk.chunks.was_open:
            disk.chunks._files.release()


@pytest.mark.parametrize("kills", [0, 2])
def test_what_is_cleared_while_its_disk_is_away_does_not_come_back(tmp_path, faulty, clock, kills):
    tier = opened(tmp_path, clock)
    assert not tier.recovered()
    mine, others = (owner_of(bytes(32), name) for name in ("mine", "others"))
    for at, key in enumerate(KEYS):
        assert tier.write(key, content(key, SLOT), mine if at % 3 else others)
    left = fail(tier, faulty, 1)
    going, whole = tier.held_of(mine)
    assert whole and set(going) <= set(left) and going
    for key in going:
        tier.delete(key)
    assert tier.owed == len(going)
    anew = next(key for key in left if key not in going)
    fill(tier, [anew])
    for _ in range(kills):
        killed(tier)
        tier = opened(tmp_path, clock)
        assert tier.disks[1].away and not set(tier.recovered()) & set(going)
    faulty.bad.clear()
    clock.now += 60
    found = tried(tier)[1]
    assert set(found) == set(left) - {*going, anew} and not tier.owed
    assert {read(tier, key) for key in going} == {False} and holds(tier, anew)
    assert sum(anew in disk.chunks for disk in tier.disks) == 1
    assert not [*tmp_path.glob("*/cleared-*")], "nothing is owed any more"
    tier.close()


def test_a_note_that_cannot_be_read_clears_all_that_its_disk_had(tmp_path, faulty, clock):
    tier = filled(tmp_path, clock)
    assert fail(tier, faulty, 1)
    (tier.disks[0].folder / f"{tier.disks[1].note}~").touch()
    faulty.bad.clear()
    clock.now += 60
    assert not tried(tier)[1]
    assert not tier.disks[1].away and not of(tier, 1)
    tier.close()


def hanging_reads(tier, faulty, keys):
    """The lane whose threads read ``keys`` of the third disk, which hangs with two calls."""
    faulty.hung.add(tier.disks[2].folder)
    lane = Lane("disks", 8, urgent_bound=100, bound=100)
    for key in keys:
        lane.submit(lambda key=key: read(tier, key))  # type: ignore[misc]
    wait_for(lambda: faulty.waiting == 2, "two calls hang")
    return lane


def test_a_disk_that_hangs_holds_its_threads_and_no_others(tmp_path, faulty, clock):
    tier = filled(tmp_path, clock)
    hung = of(tier, 2)
    lane = hanging_reads(tier, faulty, hung[:6])  # four wait for their turn
    assert all(holds(tier, key) for at in (0, 1, 3) for key in of(tier, at)[:3])
    clock.now += FROZEN_S
    assert not any(tier.may_read(key) for key in hung)
    assert read(tier, hung[-1]) is None and faulty.waiting == 2
    wait_for(lambda: tier.disks[2].calls == 2 and lane.queued == (0, 0), "the others gave up")
    clock.now += 60
    tier.delete(hung[-1])
    assert tried(tier)[1] == [] and faulty.waiting == 2, "tried while calls hang in it"
    faulty.hung.clear()
    faulty.goes.set()
    wait_for(lambda: tier.disks[2].calls == 0, "the calls ended")
    assert set(tried(tier)[1]) == set(hung[:-1])
    assert lane.close(5.0)
    tier.close()


def used(place, clock):
    """Disks whose paces are known: a chunk a millisecond."""
    tier = filled(place, clock)
    assert all(holds(tier, key) for key in KEYS)
    assert {disk.late_s for disk in tier.disks} == {0.05}
    return tier


def test_nobody_waits_for_a_disk_that_is_slow_now(tmp_path, faulty, clock):
    tier = used(tmp_path, clock)
    slow, others = of(tier, 2), [key for at in (0, 1, 3) for key in of(tier, at)]
    faulty.hung.add(tier.disks[2].folder)
    lane, got = Lane("disks", 8, urgent_bound=100, bound=100), list[bool | None]()
    for key in slow[:8]:
        lane.submit(lambda key=key: got.append(read(tier, key)))  # type: ignore[misc]
    wait_for(lambda: faulty.waiting == 2, "two calls are slow, the others wait for their turn")
    clock.now += 0.2
    wait_for(lambda: got == [None] * 6, "the others gave up")
    for key in others:
        lane.submit(lambda key=key: got.append(read(tier, key)))  # type: ignore[misc]
    wait_for(lambda: got[6:] == [True] * len(others), "all others are read meanwhile")
    assert not any(tier.may_read(key) for key in slow) and not tier.nodes_away
    assert tier.write(KEYS[0], content(KEYS[0], SLOT)), "it is there"
    fill(tier, LAYOUT.keys([77, 78, 79, 80]))
    assert of(tier, 2) == slow, "written to the others"
    faulty.hung.clear()
    faulty.goes.set()
    wait_for(lambda: lane.is_idle, "the calls ended")
    assert got[-2:] == [True, True] and all(holds(tier, key) for key in slow)
    assert lane.close(5.0)
    tier.close()


def test_a_slow_disk_is_left_alone_until_it_is_fast(tmp_path, faulty, clock, monkeypatch):
    tier = used(tmp_path, clock)
    slow, folder = of(tier, 1), tier.disks[1].folder
    faulty.slow.add(folder)
    assert all(holds(tier, key) for key in slow[:3])
    assert tier.nodes_away == [f"{folder} (it is far slower than the other disks)"]
    assert set(tried(tier)[0]) == set(slow) and tier.capacity == 60
    clock.now += 60
    assert tried(tier) == ([], []), "it was tried, and is as slow"
    monkeypatch.setattr(Path, "glob", Path.samefile)  # OSError: other disks cannot be asked for it
    faulty.slow.clear()
    clock.now += 60
    assert set(tried(tier)[1]) == set(slow) and not tier.nodes_away
    tier.close()


def test_where_all_disks_become_slow_the_last_one_serves_and_has_the_others_back(
    tmp_path, faulty, clock
):
    tier = used(tmp_path, clock)
    faulty.slow.update(disk.folder for disk in tier.disks)
    for _ in range(20):
        for key in KEYS:
            read(tier, key)
    last = [disk for disk in tier.disks if not disk.away]
    assert last, "slow as it is, it is the fastest"
    clock.now += 60
    tried(tier)
    assert not tier.nodes_away
    tier.close()


@pytest.mark.parametrize("fate", ["removed", "replaced", "moved away and back", "restored"])
def test_a_folder_that_vanishes_and_comes_back(tmp_path, clock, fate):
    tier = filled(tmp_path, clock)
    folder, aside = tier.disks[3].folder, tmp_path / "aside"
    left = of(tier, 3)
    folder.rename(aside)
    if fate == "replaced":
        chunk_folder(folder, room(20)).close()
    read(tier, left[0])
    assert tier.capacity == 60 and tier.nodes_away == [
        f"{folder} (its folder was removed or replaced)"
    ]
    tier.delete(left[1])
    clock.now += 60
    if fate == "removed":
        tried(tier)
        assert not folder.exists(), "made on a disk that may not be there"
        shutil.rmtree(aside)
        folder.mkdir(mode=0o700)
    elif fate == "restored":
        shutil.copytree(aside, folder)
    elif fate != "replaced":
        aside.rename(folder)
    clock.now += 60
    held = tried(tier)[1]
    assert tier.capacity == 80 and not tier.nodes_away and not tier.owed
    is_back = fate in {"moved away and back", "restored"}
    assert set(held) == (set(left) - {left[1]} if is_back else set())
    assert tier.find(held) == len(held)
    tier.close()


def test_a_disk_that_cannot_be_opened_costs_itself(tmp_path, clock, caplog):
    tier = filled(tmp_path, clock)
    first = of(tier, 0)
    tier.close(KEYS)
    aside = (tmp_path / "disk0").rename(tmp_path / "aside")
    (tmp_path / "disk0").write_bytes(b"")
    tier = opened(tmp_path, clock)
    assert set(tier.recovered()) == set(KEYS) - set(first) and tier.capacity == 60
    assert "disk0" in caplog.text and "the other disks serve without it" in caplog.text
    (tmp_path / "disk0").unlink()
    aside.rename(tmp_path / "disk0")
    clock.now += 60
    assert set(tried(tier)[1]) == set(first) and tier.capacity == 80
    tier.close()
    for at in range(4):
        shutil.rmtree(tmp_path / f"disk{at}")
        (tmp_path / f"disk{at}").write_bytes(b"")
    with pytest.raises(TierError, match=r"disk0.*disk3"):
        opened(tmp_path, clock)


def test_a_start_does_not_wait_for_a_disk_that_hangs(tmp_path, clock, monkeypatch):
    tier = filled(tmp_path, clock)
    first = of(tier, 0)
    tier.close(KEYS)
    monkeypatch.setattr(disk_set, "START_S", 0.5)
    monkeypatch.setattr("kvtier.tiers.nvme.folder.ANSWER_S", 0.1)
    with silent(tmp_path / "disk0"):
        tier = opened(tmp_path, clock)
        assert tier.nodes_away == [f"{tmp_path / 'disk0'} (it has not answered since the start)"]
        assert set(tier.recovered()) == set(KEYS) - set(first) and tier.capacity == 60
        clock.now += 60
        assert tier.find(KEYS) == 0 and tier.disks[0].calls == 1, "tried while a call hangs in it"
    wait_for(lambda: tier.disks[0].calls == 0, "the call failed")
    clock.now += 60
    assert set(tried(tier)[1]) == set(first) and tier.capacity == 80
    assert all(holds(tier, key) for key in KEYS)
    tier.close()


@pytest.mark.parametrize("folders", [1, 2])
def test_a_folder_that_is_silent_at_the_start_is_used_when_it_answers(
    tmp_path, monkeypatch, folders
):
    places = [tmp_path / f"disk{at}" for at in range(folders)]
    section, around = NvmeSection(path=",".join(map(str, places)), bytes_=BOTH), Opening(SLOT, b"")
    before = parts.open(section, around).tier
    fill(before, KEYS[:20])
    before.close(KEYS[:20])
    with silent(places[0]), monkeypatch.context() as patch:
        patch.setattr("kvtier.tiers.nvme.folder.ANSWER_S", 2.0)
        looked = parts.findings(section, None)
        assert [found.state for found in looked if "does not answer" in found.seen] == ["fail"]
        assert "disk0: its file system does not answer" in parts.away(section)
        tier = parts.open(section, around).tier
        assert tier.nodes_away == [f"{places[0]} (it has not answered since the start)"]
        first = set(KEYS[:20]) - set(tier.recovered())
        assert len(first) == 20 if folders == 1 else first
        stored = tier.write(KEYS[30], content(KEYS[30], SLOT))
        assert stored == (folders == 2), "where there is none, RAM serves alone"

    def is_back():
        tier.find([])
        return not tier.nodes_away

    wait_for(is_back, "without a restart")
    assert set(tier.lost_and_found()[1]) == first and not parts.away(section)
    assert all(holds(tier, key) for key in KEYS[:20])
    tier.close()


def test_what_is_written_while_its_disk_is_given_up_is_not_told_as_there(tmp_path, faulty, clock):
    tier = filled(tmp_path, clock)
    faulty.hung.update(disk.folder for disk in tier.disks)
    lane, got = Lane("disks", 1, urgent_bound=1, bound=1), list[bool]()
    (new,) = LAYOUT.keys([99])
    lane.submit(lambda: got.append(tier.write(new, content(new, SLOT))))
    wait_for(lambda: faulty.waiting == 1, "it hangs")
    clock.now += FROZEN_S
    assert len(tier.nodes_away) == 0 and len(tried(tier)[0]) >= 9 and len(tier.nodes_away) == 1
    faulty.hung.clear()
    faulty.goes.set()
    wait_for(lambda: bool(got), "the call ended")
    assert got == [False] and not tier.find([new])
    clock.now += 60
    assert new not in tried(tier)[1] and not tier.nodes_away and not tier.owed
    assert lane.close(5.0)
    tier.close()


def test_a_close_does_not_wait_for_a_disk_that_hangs(tmp_path, faulty, clock, monkeypatch, caplog):
    tier = filled(tmp_path, clock)
    monkeypatch.setattr(disk_set, "CLOSE_S", 0.5)
    faulty.stuck.add(tmp_path / "disk1")
    tier.close(KEYS)
    assert "disk1: it hangs, so it is not closed" in caplog.text
    faulty.stuck.clear()
    faulty.goes.set()


def test_nobody_waits_to_delete_on_a_disk_that_is_slow_now(tmp_path, faulty, clock):
    tier = used(tmp_path, clock)
    slow = of(tier, 2)
    lane = hanging_reads(tier, faulty, slow[:2])
    clock.now += 0.2
    for key in slow[2:]:
        tier.delete(key)
    assert tier.owed == len(slow) - 2 and {read(tier, key) for key in slow[2:]} == {False}
    store = Store(Pool(1, SLOT), [TierSpec(tier, Lane("nvme", 1, urgent_bound=9, bound=9))])
    assert store.lower[0].purge_unseen(None).result(10) == (0, True)
    assert len([*tmp_path.glob("*/cleared-*")]) == 3, "the others know it, should it not be done"
    fill(tier, slow[-1:])
    assert tier.find(slow[-1:]) == 1, "it is on another disk"
    faulty.hung.clear()
    faulty.goes.set()
    wait_for(lambda: not tier.owed, "deleted")
    assert set(of(tier, 2)) == set(slow[:2]) and holds(tier, slow[-1])
    assert lane.close(5.0) and store.close(5.0)


def test_a_record_that_cannot_be_erased_now_is_erased_later(tmp_path, faulty, clock):
    tier = filled(tmp_path, clock)
    gone = of(tier, 1)
    faulty.unwritable.add(tmp_path / "disk1")
    for key in gone:
        tier.delete(key)
    assert tier.disks[1].away and tier.owed == len(gone) and not tier.find(gone)
    faulty.unwritable.clear()
    clock.now += 60
    assert tried(tier) == (gone[3:], []) and not tier.owed
    tier.close()
    alone = chunk_folder(tmp_path / "disk1", room(20))
    assert not alone.held()
    alone.close()


def test_a_damaged_index_costs_its_own_disk(tmp_path, clock):
    tier = filled(tmp_path, clock)
    first = set(of(tier, 0))
    tier.close(KEYS)
    index = tmp_path / "disk0/index.kvtier"
    for at in range(index.stat().st_size):
        if not at % 64:
            flip(index, at)
    tier = opened(tmp_path, clock)
    assert set(tier.recovered()) == set(KEYS) - first and tier.capacity == 80
    assert all(holds(tier, key) for key in KEYS if key not in first)
    fill(tier, KEYS)
    tier.close()


def test_folders_that_cannot_be_one_tier_are_named_before_any_is_opened(tmp_path):
    around = Opening(SLOT, b"")

    def section(*folders, size=BOTH):
        return NvmeSection(path=",".join(map(str, folders)), bytes_=size)

    one, other, link = tmp_path / "one", tmp_path / "other", tmp_path / "link"
    other.mkdir(mode=0o700)
    link.symlink_to(other)
    for folders in ((one, one), (one, one / "below"), (other, link)):
        with pytest.raises(ConfigError, match=f"{folders[0]} and {folders[1]}, which are one"):
            parts.away(section(*folders))
    with pytest.raises(ConfigError, match="2 sizes for 3 folders"):
        parts.away(section(one, other, tmp_path / "third", size="1B,2B"))
    other.chmod(0o777)
    with pytest.raises(TierError, match=f"{other}.*mode 0777"):
        parts.open(section(one, other), around)
    assert not one.exists()
    other.chmod(0o700)
    used = chunk_folder(other, room(4))
    with pytest.raises(TierError, match=f"{other}: in use by"):
        parts.open(section(one, other), around)
    used.close()
    both = parts.open(section(one, other), around)
    assert "lie on one device" in both.said and both.threads >= 2
    assert sum((each / "slots.kvtier").stat().st_size for each in (one, other)) <= BOTH
    both.tier.close()


class Stored:
    """A Store over four disks of five chunks, whose second disk fails."""

    def __init__(self, tmp_path, clock, slots=4, threads=3):
        self.tier, self.pool = opened(tmp_path, clock, slots=5), Pool(slots, SLOT)
        self.lane = Lane("nvme", threads, urgent_bound=100, bound=100)
        self.store = Store(self.pool, [TierSpec(self.tier, self.lane)])
        self.lower, self.clock = self.store.lower[0], clock

    def save(self, keys):
        for key in keys:
            lease = self.store.save([key])
            for slot in lease.slots:
                self.pool.view(slot)[:] = content(key, SLOT)
            lease.commit()
            wait_for(lambda: self.lane.is_idle, "written")

    @property
    def held(self):
        return set(self.lower.chunks.order)

    def fail(self, faulty):
        faulty.bad.add(self.tier.disks[1].folder)
        for key in of(self.tier, 1)[:3]:
            assert self.lower.try_read(key) is None
        return set(of(self.tier, 1))

    def mend(self, faulty):
        faulty.bad.clear()
        self.clock.now += 60
        self.tier.find([])
        wait_for(lambda: not self.tier.nodes_away and not self.tier.owed, "it is back")
        self.lower.sweep()


def test_one_load_reads_from_all_disks_at_once(tmp_path, faulty, clock):
    before = opened(tmp_path, clock, slots=5)
    fill(before, KEYS[:20])
    before.close(KEYS[19::-1])
    stored = Stored(tmp_path, clock, slots=20, threads=8)
    faulty.hung.update(disk.folder for disk in stored.tier.disks)
    with stored.store.load(KEYS[:20]) as lease:
        wait_for(lambda: [disk.calls for disk in stored.tier.disks] == [2] * 4, "as many as may be")
        faulty.goes.set()
        wait_for(lambda: lease.poll().ready == 20, "all are there")
        assert lease.sources == ["nvme"] * 20
        assert lease.views() == [content(key, SLOT) for key in KEYS[:20]]
    assert stored.store.close(5.0)


def test_a_store_writes_on_when_a_disk_is_gone_and_has_its_chunks_again(tmp_path, faulty, clock):
    stored = Stored(tmp_path, clock)
    store, tier = stored.store, stored.tier
    stored.save(KEYS[:20])
    left = stored.fail(faulty)
    stored.save(KEYS[20:40])
    assert store.capacities == [15] and len(stored.held) == 15
    assert all(holds(tier, key) for key in stored.held)
    assert store.stats()["nvme_store_failed"] == 0
    stored.mend(faulty)
    assert store.capacities == [20] and stored.held & left
    assert all(holds(tier, key) for key in stored.held)
    assert store.close(5.0)


def test_a_clear_reaches_what_a_disk_that_is_left_alone_has(tmp_path, faulty, clock):
    stored = Stored(tmp_path, clock)
    stored.save(KEYS[:20])
    left = stored.fail(faulty)
    stored.lower.sweep()
    assert left and not stored.held & left
    assert stored.lower.purge_unseen(None).result(10) == (len(left), True)
    assert stored.tier.owed == len(left)
    stored.mend(faulty)
    assert not stored.held & left and {read(stored.tier, key) for key in left} == {False}
    assert stored.store.close(5.0)


def test_a_clear_reaches_what_a_disk_that_has_just_come_back_has(tmp_path, faulty, clock):
    stored = Stored(tmp_path, clock)
    stored.save(KEYS[:20])
    left = stored.fail(faulty)
    stored.lower.sweep()
    faulty.bad.clear()
    clock.now += 60
    stored.tier.find([])
    wait_for(lambda: not stored.tier.nodes_away, "it is back")
    assert not stored.held & left
    assert stored.lower.purge_unseen(None).result(10) == (0, True)
    assert stored.held > left, "the clear finds them"
    assert stored.store.close(5.0)


def test_a_deletion_that_hangs_holds_up_no_other_one(tmp_path, faulty, clock):
    stored = Stored(tmp_path, clock)
    stored.save(KEYS[:20])
    faulty.stuck.add(tmp_path / "disk2")
    for hanging in (1, 2):
        stored.store.invalidate(KEYS[:20])
        wait_for(lambda hanging=hanging: faulty.waiting == hanging, "it hangs")
    clock.now += FROZEN_S
    stored.store.invalidate(KEYS[:20])
    wait_for(lambda: not any(of(stored.tier, at) for at in (0, 1, 3)), "the others are empty")
    wait_for(lambda: len(stored.lower.chunks.leaving) == 2, "the others of that disk are owed")
    assert stored.tier.owed == 3
    faulty.stuck.clear()
    faulty.goes.set()
    wait_for(lambda: stored.tier.disks[2].calls == 0, "they are done")
    stored.mend(faulty)
    assert not of(stored.tier, 2) and not stored.lower.chunks.leaving
    assert stored.store.close(5.0)
