"""Size classes: several chunk sizes out of one budget, and what is kept of those who came."""

import errno
import os
import threading
from contextlib import suppress

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError, RefusedSize, TierError
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.core.steps import whole
from kvtier.core.tenant import owner_of
from kvtier.server import registry as registry_module
from kvtier.server.registry import SizeClass, SizeClasses
from kvtier.store.store import Store
from kvtier.testing import content
from tests.child_process import DEADLINE_S
from tests.clock import Clock
from tests.nvme_place import opened, room
from tests.server_process import at_rest, load, save

BUDGET = 64 * 4096
IDLE_S = 600.0


class Bench:
    """Size classes over a budget of 64 pages of RAM and, with ``nvme``, of 64 pages on disks."""

    def __init__(self, nvme=None, disks=(), share=None):
        self.clock = Clock()
        self.nvme, self.disks, self.share = nvme, disks, share
        self.budget = BUDGET
        self.discarded: list[int] = []
        self.opened: list[tuple[int, bool]] = []
        self.size_classes = SizeClasses(
            self._store, lambda call: call(), self.clock, self.discarded.append
        )

    def _store(self, slot_bytes, lent=False):
        self.opened.append((slot_bytes, lent))
        if slot_bytes > self.budget:
            raise ConfigError("ram_bytes is less than one chunk")
        pool = Pool(self.budget // slot_bytes, slot_bytes)
        tiers = []
        if self.nvme is not None:
            own = {"below": f"slots-{slot_bytes}", "of_bytes": 4096, "lent": lent}
            tier = opened(self.nvme, self.disks, slot_bytes, **own)
            tiers.append((tier, Lane("nvme", 1, urgent_bound=99, bound=99)))
        store = Store(pool, tiers, share=self.share)
        if lent:
            store.sharing.lend()
        return store

    def get(self, slot_bytes, users=0):
        size_class = self.size_classes.get(slot_bytes).result(DEADLINE_S)
        for _ in range(users):
            assert self.size_classes.enter(size_class)
        return size_class

    def settle(self):
        self.size_classes.settle()
        self.size_classes.on_lane(lambda: None).result(DEADLINE_S)

    def stays_within_each_disk(self):
        """But for superblocks of the other size's index, of which the records are counted."""
        return all(
            blocks(self.nvme / f"disk{at}") <= room(pages, 4096) + 2 * 4096
            for at, pages in enumerate(self.disks)
        )

    @property
    def pages(self):
        """Of the disks, without both sizes' indexes."""
        stores = [one.store for one in self.size_classes.open.values()]
        fixed = sum(store.tiers[0].fixed_room for store in stores)
        return (sum(room(pages, 4096) for pages in self.disks) - fixed) // 4096

    @property
    def bytes_in_use(self):
        return sum(
            size_class.store.sharing.occupied * size
            for size, size_class in self.size_classes.open.items()
        )


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    assert bench.size_classes.close(10.0)


ON_SETS = pytest.mark.parametrize("disks", [(64,), (48, 16), (24, 4, 10, 20, 6)])
"""Pages of each disk."""


def layout(slot_bytes):
    return ChunkLayout(bytes(32), 1, 1, (slot_bytes,))


def test_the_first_size_has_all_and_the_second_gets_what_it_does_not_use(bench):
    first = bench.get(4096, users=1)
    keys = layout(4096).keys(range(40))
    save(first.store, keys)
    assert (first.store.most_held, bench.bytes_in_use) == (64, BUDGET)
    second = bench.get(8192, users=1)
    assert bench.opened == [(4096, False), (8192, True)]
    assert (first.store.most_held, second.store.most_held, bench.bytes_in_use) == (40, 12, BUDGET)
    assert load(first.store, keys) == ["ram"] * 40
    for size_class in (first, second):
        size_class.store.check(idle=True)


def test_two_sizes_that_hold_nothing_have_a_half_each_and_one_that_is_full_gives_the_least(bench):
    first, second = bench.get(4096, users=1), bench.get(8192, users=1)
    assert (first.store.most_held, second.store.most_held) == (32, 16)
    assert bench.size_classes.close(10.0)
    full = Bench()
    first = full.get(4096, users=1)
    keys = save_all(first)
    second = full.get(8192, users=1)
    assert (first.store.most_held, second.store.most_held) == (62, 1)
    assert load(first.store, layout(4096).keys(range(64))) == ["ram"] * 62, "the coldest left"
    assert len(keys) == 64 and full.size_classes.close(10.0)


def test_memory_of_slots_that_were_given_up_goes_back_to_the_host():
    bench = Bench()
    first = bench.get(4096, users=1)
    for slot in range(64):
        first.store.pool.view(slot)[:] = b"\xff" * 4096
    bench.get(8192, users=1)  # which gets a half
    given = [slot for slot in range(64) if first.store.pool.view(slot) == bytes(4096)]
    assert len(given) == 32, "it reads as zeros"
    assert bench.size_classes.close(10.0)


def test_what_somebody_holds_is_taken_when_he_lets_go(bench):
    first = bench.get(4096, users=1)
    keys = layout(4096).keys(range(64))
    filling = first.store.save(keys)
    second = bench.get(8192, users=1)
    found = (first.store.most_held, first.store.sharing.occupied, second.store.most_held)
    assert found == (62, 64, 0)
    for key, view in zip(filling.keys, filling.views(), strict=True):
        view[:] = content(key, 4096)
    filling.commit()
    bench.settle()
    found = (first.store.sharing.occupied, second.store.most_held, bench.bytes_in_use)
    assert found == (62, 1, BUDGET)
    assert len(load(first.store, keys)) == 62
    first.store.check(idle=True)


def test_a_size_that_rests_keeps_its_chunks_and_others_get_its_ram_as_they_need_it(bench):
    first, second = bench.get(4096, users=1), bench.get(8192, users=1)
    keys = layout(8192).keys(range(16))
    save(second.store, keys)
    bench.size_classes.leave(second)
    bench.clock.now += 10 * IDLE_S
    bench.settle()
    assert load(second.store, keys) == ["ram"] * 16, "nobody needs the room"
    for number in range(40):
        save(first.store, layout(4096).keys([number, *range(9)]))
        bench.settle()
    assert (first.store.most_held, second.store.most_held) == (62, 1)
    assert set(bench.size_classes.open) == {4096, 8192} and bench.discarded == []
    assert bench.size_classes.enter(second), "its engine may come back at any time"


@ON_SETS
def test_a_folder_that_rests_is_warm_until_another_size_needs_the_room_and_that_is_said(
    tmp_path, disks, caplog
):
    bench = Bench(tmp_path, disks)
    first, second = bench.get(4096, users=1), bench.get(8192, users=1)
    second.owner(bytes(32), "tenant", "llama, process 7")
    keys = layout(8192).keys(range(12))
    save_all_of(second, keys)
    bench.size_classes.leave(second)
    bench.clock.now += 100 * IDLE_S
    for number in range(10):
        save(first.store, layout(4096).keys([number]))
        at_rest(first.store)
        bench.settle()
    assert second.store.stats()["nvme_held"] == 12 and "no engine" not in caplog.text
    for _ in range(30):
        save_all_of(first, layout(4096).keys(range(1, 64)))
        bench.settle()
    assert second.store.stats()["nvme_held"] < 12 and bench.discarded == []
    (said,) = [one for one in caplog.records if "no engine" in one.message]
    assert said.levelname == "WARNING"
    found = "8192 bytes: no engine for 10 minutes or more, the last was 'llama, process 7'; they "
    assert found in said.message
    assert bench.size_classes.close(10.0)


def save_all(size_class):
    keys = layout(4096).keys(range(64))
    save(size_class.store, keys)
    return load(size_class.store, keys)


def test_the_configured_size_is_closed_for_no_other(bench):
    bench.budget = 6 * BUDGET
    for future in bench.size_classes.prepare(4096).values():
        future.result(DEADLINE_S)
    for number in range(2, 25):
        bench.get(4096 * number)
        bench.clock.now += 1
    bench.clock.now += 2 * IDLE_S
    bench.settle()
    assert len(bench.size_classes.open) == 24 and bench.discarded == []
    bench.get(4096 * 25)
    assert bench.discarded == [8192], "the strangers go, the longest first, and one is enough"


def test_a_size_that_rests_is_closed_only_where_that_makes_room(bench, caplog):
    bench.get(4096, users=1)
    rests = bench.get(32 * 4096)
    bench.clock.now += IDLE_S
    with pytest.raises(TierError, match="cannot hold a chunk of"):
        bench.get(BUDGET)
    assert bench.discarded == []
    bench.get(40 * 4096)
    assert bench.discarded == [32 * 4096]
    (said,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "all of them are dropped, from disks too" in said.message
    assert not bench.size_classes.enter(rests), "who was about to come asks again"


def test_sizes_from_before_are_opened_together_with_their_parts(bench):
    for future in bench.size_classes.prepare(None, [4096, 8192]).values():
        future.result(DEADLINE_S)
    assert bench.opened == [(4096, True), (8192, True)]
    found = [size_class.store.most_held for size_class in bench.size_classes.open.values()]
    assert found == [32, 16]


def test_there_are_24_sizes_and_none_that_had_engines_lately_goes_for_one_more(bench):
    bench.budget = 6 * BUDGET
    size_classes = [bench.get(4096 * number, users=1) for number in range(1, 25)]
    assert bench.bytes_in_use <= bench.budget
    assert all(size_class.store.most_held >= 1 for size_class in size_classes)
    bench.size_classes.leave(size_classes[2])
    bench.clock.now += 1
    bench.size_classes.leave(size_classes[5])
    bench.clock.now += IDLE_S - 2
    with pytest.raises(TierError, match="had some in the last 10 minutes"):
        bench.get(4096 * 25)
    assert bench.discarded == []
    bench.clock.now += 1
    bench.get(4096 * 25)
    assert bench.discarded == [4096 * 3], "who left first"


def test_sizes_from_before_stay_until_their_engines_had_time_to_come_back(bench):
    bench.budget = 6 * BUDGET
    for future in bench.size_classes.prepare(None, [4096, 8192]).values():
        future.result(DEADLINE_S)
    for number in range(3, 28):
        with suppress(TierError):
            bench.get(4096 * number)
    assert bench.discarded == [] and {4096, 8192} <= bench.size_classes.open.keys()
    bench.clock.now += IDLE_S
    bench.get(4096 * 28)
    assert bench.discarded == [4096]


def test_one_client_brings_at_most_16_sizes_and_others_find_room(bench):
    bench.budget = 6 * BUDGET
    for number in range(1, 17):
        bench.size_classes.get(4096 * number, "greedy").result(DEADLINE_S)
    with pytest.raises(TierError, match=r"this client \(greedy\) has asked .* of 16 sizes"):
        bench.size_classes.get(4096 * 17, "greedy").result(DEADLINE_S)
    bench.size_classes.get(4096, "greedy").result(DEADLINE_S)
    bench.size_classes.get(4096 * 17, "honest").result(DEADLINE_S)
    bench.size_classes.get(4096 * 17, "greedy").result(DEADLINE_S)
    bench.clock.now += IDLE_S
    bench.size_classes.get(4096 * 18, "greedy").result(DEADLINE_S)


def test_a_chunk_larger_than_any_tier_keeps_opens_no_store(bench):
    first = bench.get(4096, users=1)
    for size in (1 << 40, (1 << 30) + 4096):
        with pytest.raises(RefusedSize, match=f"no chunk may have {size:,} bytes") as refused:
            bench.size_classes.get(size).result(DEADLINE_S)
        assert refused.value.kept == [4096]
    assert bench.opened == [(4096, False)] and first.store.most_held == 64


@ON_SETS
def test_a_disk_is_shared_as_ram_is(tmp_path, disks):
    bench = Bench(tmp_path, disks)
    first = bench.get(4096, users=1)
    keys = layout(4096).keys(range(60))
    save(first.store, keys)
    while first.store.stats().get("nvme_stored", 0) < 60:
        first.store.wait(0.01)
    second = bench.get(8192, users=1)
    others = layout(8192).keys(range(40))
    for _ in range(60):
        save_all_of(second, others)
        bench.settle()
        assert bench.stays_within_each_disk()
        assert bench.bytes_in_use <= BUDGET
    assert second.store.capacities[0] * 2 >= 0.9 * bench.pages
    assert first.store.stats()["nvme_held"] == first.store.capacities[0] <= 3
    assert load(first.store, keys)[:1] == ["ram"], "its beginning is the hottest"
    bench.size_classes.leave(second)
    bench.clock.now += IDLE_S
    for number in range(30):
        save_all_of(first, layout(4096).keys([number, *range(40)]))
        bench.settle()
        assert bench.stays_within_each_disk()
    assert first.store.capacities[0] >= bench.pages - 4
    assert blocks(tmp_path, "slots-4096/*") >= (bench.pages - 4) * 4096, "reserved again"
    assert bench.size_classes.close(10.0)


def test_pages_that_are_just_being_made_present_go_back_too(monkeypatch):
    pool, begun, given = Pool(16, 4096), threading.Event(), threading.Event()
    populate, give_back = pool.populate, pool.give_back

    def populating(first, count):
        begun.set()
        given.wait(0.3)
        populate(first, count)

    def giving(slot):
        give_back(slot)
        given.set()

    monkeypatch.setattr(pool, "populate", populating)
    monkeypatch.setattr(pool, "give_back", giving)
    store = Store(pool, spare=Lane("pool", 1, urgent_bound=1, bound=1))
    assert begun.wait(DEADLINE_S)
    whole(store.sharing.limit({"ram": 4}))
    store.touched.result(DEADLINE_S)
    assert os.fstat(pool.fd).st_blocks * 512 == 4 * 4096
    assert store.close()


def test_pages_of_slots_that_a_size_is_given_are_there_before_they_are_used():
    pool = Pool(16, 4096)
    store = Store(pool)
    store.sharing.lend(Lane("pool", 1, urgent_bound=1, bound=1))
    assert (store.most_held, store.sharing.occupied, os.fstat(pool.fd).st_blocks) == (0, 0, 0)
    whole(store.sharing.limit({"ram": 5}))
    found = (store.most_held, store.sharing.occupied, os.fstat(pool.fd).st_blocks * 512)
    assert found == (5, 5, 5 * 4096)
    assert store.close()


def save_all_of(size_class, keys):
    for number in range(len(keys)):
        save(size_class.store, keys[number : number + 1])
    at_rest(size_class.store)


def blocks(folder, files="*.kvtier"):
    return sum(file.stat().st_blocks * 512 for file in folder.rglob(files))


def test_a_load_that_goes_from_one_size_to_another_and_back_takes_the_room_along(bench):
    sizes = {4096: bench.get(4096, users=1), 12288: bench.get(12288, users=1)}
    for turn, busy in enumerate([4096, 12288, 4096]):
        for number in range(40):
            save(sizes[busy].store, layout(busy).keys([turn, number, *range(10)]))
            bench.settle()
            assert bench.bytes_in_use <= BUDGET
        held = sizes[busy].store.stats()["ram_ready"] * busy
        assert held >= 0.9 * BUDGET, f"{held / BUDGET:.0%} after shift {turn}"
        for size_class in sizes.values():
            assert size_class.store.most_held >= 1
            size_class.store.check(idle=True)


@ON_SETS
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_size_with_one_busy_tenant_gets_the_room_that_its_quota_allows(tmp_path, disks, share):
    bench = Bench(tmp_path, disks, share)
    small, large = bench.get(4096, users=1), bench.get(8192, users=1)
    owner = small.owner(bytes(32), "busy")
    for number in range(100):
        with small.store.save(layout(4096).keys([number]), owner) as lease:
            lease.commit()
        at_rest(small.store)
        bench.settle()
        at_rest(small.store)
        at_rest(large.store)
    stats = small.store.stats()
    assert stats["ram_ready"] == int(64 * share)
    assert min(int(64 * share), bench.pages) - 2 <= stats["nvme_held"] <= int(64 * share)
    assert bench.size_classes.close(10.0)


def test_what_is_hot_stays_when_another_size_has_a_flood_of_new_chunks(bench):
    first, second = bench.get(4096, users=1), bench.get(8192, users=1)
    hot = layout(4096).keys(range(30))
    save(first.store, hot)
    for number in range(40):
        assert load(first.store, hot) == ["ram"] * 30
        save(second.store, layout(8192).keys([number, *range(3)]))
        bench.settle()
    assert second.store.stats()["ram_ready"] >= 16, "what was free"
    for size_class in (first, second):
        size_class.store.check(idle=True)


def test_slots_that_an_engine_holds_are_not_counted_twice_while_the_room_goes_to_another(bench):
    first, second = bench.get(4096, users=1), bench.get(8192, users=1)
    keys = layout(4096).keys(range(32))
    save(first.store, keys)
    reading = first.store.load(keys)
    assert reading.poll().ready == 32
    for number in range(30):
        save(second.store, layout(8192).keys([number, *range(8)]))
        bench.settle()
        assert bench.bytes_in_use <= BUDGET
        assert first.store.sharing.occupied == 32, "all of it is being read"
    for key, view in zip(reading.keys, reading.views(), strict=True):
        assert view == content(key, 4096)
    reading.close()
    for number in range(30):
        save(second.store, layout(8192).keys([number, *range(9)]))
        bench.settle()
        assert bench.bytes_in_use <= BUDGET
    assert second.store.most_held * 8192 >= 0.9 * BUDGET
    first.store.check(idle=True)


@ON_SETS
def test_what_one_size_borrowed_on_a_disk_is_warm_after_a_restart(tmp_path, disks):
    bench = Bench(tmp_path, disks)
    bench.get(4096, users=1)
    second = bench.get(8192, users=1)
    keys = layout(8192).keys(range(40))
    for _ in range(40):
        save_all_of(second, keys)
        bench.settle()
    held = second.store.stats()["nvme_held"]
    assert held * 2 >= 0.85 * bench.pages
    assert bench.size_classes.close(10.0)
    again = Bench(tmp_path, disks)
    for future in again.size_classes.prepare(None, [4096, 8192]).values():
        future.result(DEADLINE_S)
    assert again.size_classes.open[8192].store.stats()["nvme_held"] == held
    assert bench.stays_within_each_disk()
    assert again.size_classes.close(10.0)


def test_a_disk_that_is_full_leaves_a_size_with_what_it_has(tmp_path, monkeypatch):
    bench = Bench(tmp_path, (64,))
    bench.get(4096, users=1)
    monkeypatch.setattr(
        "kvtier.tiers.nvme.files.os.posix_fallocate", full_for_payloads(os.posix_fallocate)
    )
    second = bench.get(8192, users=1)
    assert second.store.capacities == [15]
    for _ in range(10):
        save_all_of(second, layout(8192).keys(range(30)))
        bench.settle()
    assert second.store.capacities == [15] and second.store.stats()["nvme_held"] == 15
    assert (tmp_path / "disk0/slots-8192/slots.kvtier").stat().st_blocks * 512 <= 15 * 8192 + 4096
    at_rest(second.store)
    monkeypatch.undo()
    for _ in range(10):
        save_all_of(second, layout(8192).keys(range(30)))
        bench.settle()
    assert second.store.capacities[0] > 20, "there is room again"
    assert bench.size_classes.close(10.0)


def full_for_payloads(allocate):
    calls = 0

    def fallocate(fd, offset, size):
        nonlocal calls
        payloads = os.readlink(f"/proc/self/fd/{fd}").endswith("slots.kvtier")
        calls += payloads
        if payloads and calls > 1:
            allocate(fd, offset, size - 4096)  # as far as it gets
            raise OSError(errno.ENOSPC, "no space left on device")
        allocate(fd, offset, size)

    return fallocate


# ---- who came ------------------------------------------------------------------------------------


@pytest.fixture
def one():
    return SizeClass(Store(Pool(1, 4096)), lambda call: None, Clock())


def test_names_are_bounded_and_nobody_is_locked_out(one):
    first = one.owner(bytes(32), "first")
    one.owner(bytes(32), "honest")
    for number in range(registry_module._MAX_OWNERS + 100):
        one.owner(bytes(32), f"tenant {number}")
        if number == registry_module._MAX_OWNERS - 100:
            one.owner(bytes(32), "honest")
    assert len(one.owners) == registry_module._MAX_OWNERS
    assert (bytes(32), "first") not in one.owners and (bytes(32), "honest") in one.owners
    assert one.owner(bytes(32), "first") == first == owner_of(bytes(32), "first")


def test_a_namespace_has_the_name_of_the_engine_that_came_last(one):
    for called in ("a, process 1", "b, process 2"):
        one.owner(bytes(32), "tenant", called)
        assert one.owners[bytes(32), "tenant"].engine == called


@pytest.mark.parametrize(
    "make", [lambda: Store(Pool(4, 4096), share=0.5), lambda: Store(Pool(4, 4096))]
)
def test_owners_that_have_nothing_take_no_memory(make):
    store = make()
    for number in range(20_000):
        with store.save(layout(4096).keys([number]), owner_of(bytes(32), str(number))) as lease:
            lease.commit()
    directory = store._directory
    assert len(directory._used) <= 4
    assert len(directory.order._parts or ()) <= 4
    assert len(directory.order._once) <= 8193
    store.check(idle=True)


def test_a_model_whose_chunks_have_two_sizes_is_told_and_its_misses_have_a_reason(bench, caplog):
    first, second = bench.get(4096, users=1), bench.get(8192, users=1)
    owner = first.owner(bytes(32), "", "one")
    with first.store.save(layout(4096).keys([1]), owner) as lease:
        lease.commit()
    keys = layout(8192).keys([1, 2])
    assert second.store.lookup(keys, owner).why == "other_chunk_size"
    assert second.store.lookup(keys, owner_of(b"other" * 8, "")).why == "cold"
    second.store.load(keys, owner=owner).close()
    second.store.load(keys).close()
    stats = second.store.stats()
    assert (stats["missed_other_chunk_size"], stats["missed_cold"]) == (2, 2)
    bench.size_classes.warn_if_apart(first, (bytes(32), ""))
    assert not caplog.records, "the other size has no chunk of it, and no engine"
    for _ in range(2):
        second.owner(bytes(32), "", "two")
        bench.size_classes.warn_if_apart(second, (bytes(32), ""))
    (said,) = caplog.records
    assert said.levelname == "WARNING" and "engine 'two' has chunks of 8192 bytes" in said.message
    assert "4096 bytes here (engine 'one')" in said.message
