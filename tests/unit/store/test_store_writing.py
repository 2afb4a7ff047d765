"""When the Store writes below: at the save or before an eviction, and within a budget."""

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.admin import prometheus, status
from kvtier.assemble import assemble
from kvtier.config.load import load
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import Progress
from kvtier.core.pool import Pool
from kvtier.core.tenant import UNOWNED
from kvtier.eviction.adaptive import Exclusive
from kvtier.eviction.order import SETTINGS, Segments
from kvtier.server.registry import SizeClass
from kvtier.started import Started
from kvtier.store.lower.lower_tier import TierSpec
from kvtier.store.lower.write_budget import WriteBudget
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.clock import Clock
from tests.nvme_place import ON_SETS, opened, section
from tests.stores import LAYOUT, SLOT, assembled, keys, over, save, shown
from tests.trust.clients import opened as of_setting

DAY = 86_400


def late(tier, slots, **more):
    """A store that writes to its tier on eviction only."""
    lane = ManualLane()
    return Store(Pool(slots, SLOT), [TierSpec(tier, lane, on_evict=True)], **more), lane


def budgeted(tier, budget, clock):
    lane = ManualLane()
    return Store(Pool(8, SLOT), [TierSpec(tier, lane, budget)], clock=clock), lane


# ---- runs longer than RAM --------------------------------------------------------------------


def test_of_a_run_longer_than_ram_what_is_written_leaves_for_what_is_not():
    tier, run = DictTier(64), keys(*range(12))
    store, (lane,) = over(tier)
    for end in (4, 6, 8, 10, 12):
        save(store, run[:end], lane)
    assert tier.held.keys() == set(run)
    with store.save(run) as again:
        assert not again.keys, "what lies below is not brought back for it"
    store.check(idle=True)


def test_of_a_run_longer_than_ram_nothing_leaves_that_is_not_written():
    run = keys(*range(12))
    store, _ = over(DictTier(64))
    save(store, run[:4])
    with store.save(run) as rest:
        assert not rest.keys
    assert store.lookup(run).ready == 4


# ---- write on evict ------------------------------------------------------------------------------


def test_what_ram_has_room_for_is_not_written():
    tier = DictTier(8)
    store, lane = late(tier, slots=4)
    save(store, keys(1, 2), lane)
    assert not tier.held, "half of RAM is free"


class CountingTier(DictTier):
    writes = 0

    def write(self, key, data, owner=UNOWNED):
        self.writes += 1
        return super().write(key, data, owner)


def test_what_leaves_next_is_written_before_it_leaves_and_comes_back():
    tier = CountingTier(8)
    store, lane = late(tier, slots=4)
    first, second = keys(1, 2), keys(3, 4)
    for run in (first, second):
        save(store, run, lane)
    assert set(tier.held) == set(first), "the colder half"
    save(store, keys(5, 6), lane)
    assert store.lookup(first).progress == Progress(0, 2)
    with store.load(first) as lease:
        lane.run()
        found = [lease.poll(), [bytes(view[:40]) for view in lease.views()]]
        assert found == [Progress(2, 0), first]
    tier.writes = 0
    save(store, keys(7, 8), lane)
    assert tier.writes == 0, "what leaves next came from below"
    assert (store.stats()["dict_stored"], store.stats()["dict_spill_late"]) == (6, 0)
    store.check(idle=True)


def test_when_saves_outrun_the_tier_the_coldest_leaves_unwritten_and_is_counted():
    tier = DictTier(8)
    store, lane = late(tier, slots=2)
    save(store, keys(1, 2))
    save(store, keys(3, 4))
    assert store.lookup(keys(3, 4)).progress == Progress(2, 0), (
        "a save never waits and is not refused"
    )
    assert store.stats()["dict_spill_late"] == 2
    lane.run()
    assert store.lookup(keys(1, 2)).progress == Progress(0, 0)


def test_a_clean_close_writes_what_is_in_ram_so_that_a_restart_is_warm():
    class Closing(DictTier):
        order: list[ChunkKey]

        def close(self, coldest_first=()):
            self.order = list(coldest_first)

    tier = Closing(8)
    store, _ = late(tier, slots=4)
    cold, hot = keys(1, 2), keys(3, 4)
    save(store, cold)
    save(store, hot)
    assert store.close()
    assert tier.order == [*cold[::-1], *hot[::-1]], (
        "the coldest first, leaves before their beginnings"
    )


def test_a_close_writes_the_hottest_where_not_all_find_room():
    tier = DictTier(1)
    store, _ = late(tier, slots=4)
    save(store, keys(1, 2, 3))
    store.close()
    assert set(tier.held) == set(keys(1))


def test_an_owner_whose_quota_is_used_up_has_its_own_coldest_written_first():
    tier = DictTier(8)
    store, lane = late(tier, slots=8, share=0.5)
    for token in (1, 2, 3, 4):
        save(store, keys(token), lane, owner=1)
    assert set(tier.held) == {*keys(1), *keys(2)}, "half of its quota, though half of RAM is free"
    save(store, keys(5), owner=1)
    assert store.lookup(keys(1)).progress == Progress(0, 1)
    assert store.stats()["dict_spill_late"] == 0


@ON_SETS
def test_copies_of_what_ram_keeps_leave_the_disks_early_and_are_written_again(tmp_path, disks):
    lane, tier = ManualLane(), opened(tmp_path, disks, SLOT)
    place = TierSpec(tier, lane, on_evict=True)
    store, early = of_setting(Pool(16, SLOT), [place], SETTINGS[-1], Clock()), set[ChunkKey]()
    for turn in range(100):
        run = keys(turn % 3 if turn % 2 else 100 + turn, *range(4))
        with store.load(run) as lease:
            lane.run()
            ready = lease.poll().ready
            assert shown(lease)[:ready] == run[:ready]
        save(store, run, lane)
        early.update(store.lower[0].chunks.order._all._alone)
        store.check(idle=True)
    assert any(tier.find([key]) for key in early)
    assert store.close()


@ON_SETS
def test_a_restart_of_real_files_is_warm(tmp_path, disks):
    place = section(tmp_path, disks, SLOT) | {"nvme_write_limit": 1 << 40}
    run = keys(1, 2, 3)
    for match in (Progress(0, 0), Progress(0, 3)):
        store = assembled(ram_bytes=8 * SLOT, **place)
        assert store.lookup(run).progress == match
        save(store, run)
        assert store.close()


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ("ram:\n  policy: auto\nnvme:\n  write_limit: 2TiB\n", Exclusive),
        ("nvme:\n  write_limit: 2TiB\n", Exclusive),
        ("ram:\n  policy: auto\n", Segments),
        ("ram:\n  policy: lru\nnvme:\n  write_limit: 2TiB\n", Segments),
    ],
)
def test_by_the_words_of_the_page_only_auto_with_a_limit_lets_copies_leave_early(
    tmp_path, words, order
):
    file = tmp_path / "kvtier.yaml"
    file.write_text(words)
    flags = {"ram_bytes": 8 * SLOT, "nvme_path": str(tmp_path / "t"), "nvme_bytes": 1 << 20}
    store = assemble(Started(load(file, {}, flags)), LAYOUT)
    assert isinstance(store, Store)
    assert type(store.lower[0].chunks.order._all) is order
    store.close()


# ---- the budget ----------------------------------------------------------------------------------


@given(
    writes=st.lists(st.tuples(st.floats(0, DAY / 20), st.integers(1, 100)), max_size=200),
    a_day=st.integers(100, 1_000_000),
)
def test_no_day_sees_more_than_the_limit_and_one_burst(writes, a_day):
    budget, now = WriteBudget(a_day, least=100), 0.0
    burst = max(100.0, a_day * 600 / DAY)
    done: list[tuple[float, int]] = []
    for pause, size in writes:
        now += pause
        if budget.allows(size, now):
            budget.spend(size)
            done.append((now, size))
    for begin, _ in done:
        assert sum(size for at, size in done if begin <= at < begin + DAY) <= a_day + burst + 1e-6


def test_a_budget_fills_again_with_time_and_not_beyond_its_burst():
    budget = WriteBudget(DAY, least=1)  # a byte a second, a burst of 600
    assert budget.allows(600, 0.0)
    budget.spend(600)
    assert not budget.allows(1, 0.5)
    assert budget.allows(10, 10.5) and not budget.allows(12, 10.5)
    assert budget.allows(600, 1e9) and not budget.allows(601, 2e9)
    assert not budget.allows(601, 0.0), "a clock that went back gives nothing"


def test_one_budget_of_two_stores_lets_both_together_write_so_much():
    clock, budget = Clock(), WriteBudget(4 * SLOT, 0, threading.Lock())
    tiers = [DictTier(8), DictTier(8)]
    stores = [budgeted(tier, budget, clock) for tier in tiers]
    for number, (store, lane) in enumerate(stores):
        save(store, keys(*range(number * 10, number * 10 + 4)), lane)
    assert sum(len(tier.held) for tier in tiers) == 1, "a burst of one chunk"
    clock.now += DAY / 4
    for number, (store, lane) in enumerate(stores):
        save(store, keys(100 + number), lane)
    assert sum(len(tier.held) for tier in tiers) == 2
    budget.fit(3 * SLOT)
    assert budget.allows(2 * SLOT, clock.now) and not budget.allows(3 * SLOT, clock.now)


def test_over_its_budget_a_tier_refuses_and_gives_up_nothing_for_it():
    clock, tier = Clock(), DictTier(2)
    store, lane = budgeted(tier, WriteBudget(2 * SLOT, least=2 * SLOT), clock)
    run = keys(1, 2, 3, 4)
    save(store, run, lane)
    assert len(tier.held) == 2
    held, stats = set(tier.held), store.stats()
    assert (stats["dict_stored"], stats["dict_write_over_budget"]) == (2, 2)
    save(store, keys(9), lane)
    assert set(tier.held) == held, "what is there is not evicted for what is not written"
    clock.now += DAY / 2
    save(store, keys(8), lane)
    assert set(keys(8)) < set(tier.held)
    store.check(idle=True)


def test_what_a_tier_has_costs_no_budget_and_is_not_counted_as_refused():
    clock, tier = Clock(), DictTier(4)
    store, lane = budgeted(tier, WriteBudget(SLOT, least=SLOT), clock)
    for token in (1, *range(10, 17)):
        save(store, keys(token), lane)
    assert store.stats()["dict_stored"] == 1
    save(store, keys(20))
    lane.queues[False].clear()
    refused = store.stats()["dict_write_over_budget"]
    assert store.lookup(keys(1)).progress == Progress(0, 1), "RAM has given it up"
    save(store, keys(1), lane)
    assert store.stats()["dict_write_over_budget"] == refused


# ---- NVMe and the configuration ------------------------------------------------------------------


@ON_SETS
def test_chunks_that_leave_nvme_unread_are_counted(tmp_path, disks):
    tier = opened(tmp_path, disks, SLOT)
    read, unread, left = keys(1)[0], keys(2)[0], keys(3)[0]
    into = memoryview(bytearray(SLOT))
    for key in (read, unread, left):
        assert tier.write(key, memoryview(bytes(SLOT)))
    assert tier.read(read, into)
    tier.delete(read)
    assert tier.counts["evicted_unread"] == 0
    tier.delete(unread)
    tier.delete(unread)
    assert tier.counts["evicted_unread"] == 1
    tier.close()
    tier = opened(tmp_path, disks, SLOT)
    tier.delete(left)
    assert tier.counts["evicted_unread"] == 0, "it may have been read before the restart"
    tier.close()


@ON_SETS
def test_a_server_tells_what_wears_its_disk(tmp_path, disks):
    lane, tier = ManualLane(), opened(tmp_path, disks, SLOT)
    store = Store(Pool(8, SLOT), [TierSpec(tier, lane, WriteBudget(1, 0))])
    save(store, keys(1, 2, 3), lane)
    tier.delete(keys(1)[0])
    served: Any = SimpleNamespace(
        trouble={},
        size_classes=SimpleNamespace(open={SLOT: SizeClass(store, lambda call: call())}),
        connections=[],
        lingering=[],
        counts=Counter(),
        ready=True,
        started=0.0,
    )
    told = prometheus.exposition(status.read(served)).decode()
    labels = f'{{slot_bytes="{SLOT}",tier="nvme"}}'
    assert f"kvtier_over_budget_total{labels} 2.0" in told
    assert f"kvtier_evicted_unread_total{labels} 1.0" in told
    assert f"kvtier_written_bytes_total{labels} {float(SLOT)}" in told
    store.close()


@ON_SETS
@pytest.mark.parametrize(("limit", "written_at_once"), [(None, 3), (1 << 40, 0)])
def test_with_a_limit_chunks_are_written_when_ram_drops_them(
    tmp_path, disks, limit, written_at_once
):
    place = section(tmp_path, disks, SLOT) | {"nvme_write_limit": limit}
    store = assembled(ram_bytes=8 * SLOT, **place)
    save(store, keys(1, 2, 3))
    assert store.lanes[0].close(60.0)
    stats = store.stats()
    found = (stats.get("nvme_stored", 0), store.tiers[0].counts["writes"])
    assert found == (written_at_once, written_at_once)
    store.close()
