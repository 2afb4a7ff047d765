"""A tier that is written when RAM drops a chunk: copies of what RAM keeps give their room to other
chunks, are written again in time, and stay where that goes wrong."""

import random

import pytest

from kvtier.bench.queue.traffic import traffic
from kvtier.bench.traces.mooncake import BLOCK_TOKENS
from kvtier.bench.traces.simulate import Cache, simulate, unique
from kvtier.core.chunk import ChunkKey
from kvtier.eviction.adaptive import Adaptive, Exclusive
from kvtier.eviction.order import LRU_SETTING, Segments, Setting
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.store.directory import Directory

RAM, BELOW, OLD = 64, 200, 12
KEYS = [ChunkKey(number.to_bytes(40)) for number in range(3000)]
A, B, C, *_ = KEYS
HALF = Setting(0.5, 4.0)


class Two:
    """RAM's order and that of the tier below, without chunks. RAM keeps some that the tier has
    too. The tier has older ones that RAM does not have."""

    def __init__(self, kept=0, ram=RAM):
        self.ram = Segments(ram)
        self.ram.settle(HALF)
        self.below = Exclusive(BELOW, self.ram)
        self.kept = KEYS[:kept]
        self.written = 0
        self.write(OLD)
        for order in (self.ram, self.below):
            order.add(self.kept)
            order.used(self.kept)
            order.ordered(self.kept)

    def write(self, count):
        """So many chunks that come once are written below."""
        first = 100 + self.written
        self.below.add(KEYS[first : first + count])
        self.written += count

    def leaving(self):
        """Those that leave early now, until one would leave because it is the coldest."""
        found = list[ChunkKey]()
        while (key := self.below.coldest()) != next(iter(self.below)) and key is not None:
            self.below.evicted((key,))
            found.append(key)
        return found


def plain(self, room):
    return self(room)


def both(kind, policy, ram, nvme):
    trace = traffic(8.0, 0, kind=kind)[:1500]
    every = unique(trace)
    cache = Cache(int(ram * every), int(nvme * every), policy, compute=SavedCompute(BLOCK_TOKENS))
    return simulate(trace, cache)


@pytest.mark.parametrize(("kind", "more"), [("questions", 1.5), ("mixed", 2.0)])
def test_more_is_hit_in_both_places_and_the_same_in_ram(kind, more, monkeypatch):
    lru, auto = (both(kind, policy, 0.2, 0.4) for policy in ("lru", "auto"))
    monkeypatch.setattr(Adaptive, "on_evict", plain)
    before = both(kind, "auto", 0.2, 0.4)
    assert auto.percent(auto.hits) > before.percent(before.hits) + more
    assert auto.hits > lru.hits
    assert abs(auto.percent(auto.ram) - before.percent(before.ram)) < 0.5
    assert auto.writes < 1.3 * before.writes


def test_where_chunks_never_come_back_to_ram_it_is_the_order_that_it_was(monkeypatch):
    auto = both("chats", "auto", 0.2, 0.4)
    monkeypatch.setattr(Adaptive, "on_evict", plain)
    assert auto == both("chats", "auto", 0.2, 0.4)


def test_the_hottest_of_ram_leave_first_one_for_every_four_that_are_written():
    two = Two(kept=20, ram=400)
    assert two.leaving() == KEYS[: (OLD + 20) // 4]  # a run's beginning is its hottest
    two.write(12)
    assert two.leaving() == KEYS[8:11]
    assert two.below.coldest() == KEYS[100]  # then the coldest, as in any tier


def test_at_first_one_of_eight_in_ram_may_be_alone():
    two = Two(kept=30)
    two.write(200)
    assert two.leaving() == KEYS[: RAM // 8]


def test_what_ram_keeps_no_longer_or_not_for_long_stays_below():
    two = Two(kept=12)
    two.write(200)
    two.ram.discard(A)
    two.ram.cool([C])
    assert two.leaving() == [B, *KEYS[3:10]]


def test_each_that_comes_down_again_lets_one_more_be_alone():
    two = Two(kept=30)
    two.write(200)
    given = two.leaving()
    two.below.add(given[:3])
    assert len(two.leaving()) == 3 + 3
    two.below.add(KEYS[500:503])  # these were not alone
    assert two.leaving() == []


def test_after_a_loss_half_as_many_may_be_alone_and_for_a_while_none_leaves():
    two = Two(kept=30)
    two.write(200)
    given = two.leaving()
    two.ram.evicted(given[:1])
    two.below.add(given[1:])  # now as many may be alone as there are others
    may = RAM // 8 // 2 + len(given[1:])
    for _ in range(3):
        two.write(200)
        assert two.leaving() == []
    two.write(1000 - 600)
    two.write(4 * may + 4 * 400 - 1000)
    assert len(two.leaving()) == may


def test_many_losses_stop_it_for_no_longer_than_32_000_writes():
    two = Two(kept=60, ram=400)
    two.write(200)
    lost = two.leaving()
    two.ram.evicted(lost)
    assert len(lost) == 50
    for _ in range(320):
        two.below.add(KEYS[2000:2100])
    assert two.leaving() == []
    two.write(4)
    assert len(two.leaving()) == 1


def test_what_is_over_is_not_lost_when_it_leaves_and_what_was_forgotten_is_not_waited_for():
    two = Two(kept=30)
    two.write(200)
    given = two.leaving()
    two.below.cool(given[:4])
    two.ram.evicted(given[:4])
    for key in given[4:]:  # a purge
        two.ram.discard(key)
    assert two.leaving() == KEYS[8:12]  # in the room of those that are over
    assert [key for _ in range(8) for key in two.leaving()] == KEYS[12:16]


def test_what_is_remembered_is_as_much_as_ram_has_room_for():
    two = Two(kept=30)
    two.write(200)
    two.leaving()
    two.ram.resize(4)
    two.below.ordered(KEYS[8:30])
    assert len(two.below._twice) == 4
    two.below.evicted(KEYS[8:9])
    assert len(two.below._alone) == 4 and KEYS[8] in two.below._alone


class Place:
    """A Directory with both, in which writes may fail or be refused, as hints, readers and
    purges come and go."""

    def __init__(self, seed):
        self.adaptive, self.draw = Adaptive(), random.Random(seed)
        self.directory = Directory(16, (40,), self.adaptive, lower=(self.adaptive.on_evict,))
        self.adaptive.places[0][0].settle(HALF)
        self.refused = self.draw.choice((0.0, 0.0, 0.1))
        self.writes = self.early = 0
        tier = self.adaptive.places[1][0]
        assert isinstance(tier, Exclusive)
        self.below = tier

    def ask(self):
        first = self.draw.choice((0, 0, 0, 6, 6, self.draw.randrange(12, 300)))
        run = KEYS[first : first + self.draw.randint(2, 6)]
        directory = self.directory
        directory.used(run)
        held = directory.pin_ready(run)
        for key in run[len(held) :]:
            tier = next(directory.holders(key), None)
            if tier is None or directory.get(key) is not None:
                break
            entry = directory.reserve(key, (), tier)
            if entry is None:
                break
            directory.filled((entry,), tier)
        directory.unpin(held)
        directory.ordered(run)
        directory.filled(directory.reserve_run(directory.absent(run), frozenset(run)))
        directory.ordered(run)
        self.write()

    def write(self):
        directory = self.directory
        for entry in directory.next_out():
            if self.draw.random() < self.refused:
                continue
            coldest = next(iter(self.below), None)
            victims = directory.spill_begun(entry, 0)
            if victims is None:
                continue
            self.writes += 1
            self.early += any(key != coldest for key in victims)
            directory.tiers[0].deleted(victims)
            directory.spill_ended(entry, 0, stored=self.draw.random() >= self.refused)

    def step(self):
        run = KEYS[self.draw.randrange(12) :][:3]
        self.draw.choice(
            (
                *12 * (self.ask,),
                lambda: self.directory.over(run),
                lambda: self.directory.keep(run, 9.0),
                lambda: self.directory.tick(float(self.writes)),
                lambda: self.forget(run[0]),
                lambda: self.adaptive.places[0][0].settle(
                    self.draw.choice((HALF, HALF, LRU_SETTING))
                ),
            )
        )()

    def forget(self, key):
        for index in self.directory.invalidate(key):
            self.directory.tiers[index].deleted((key,))

    def check(self):
        self.directory.check(idle=True)
        below, ram = self.below, self.adaptive.places[0][0]
        assert not below._alone.keys() & set(below), "what is alone is not below"
        assert len(below._twice) <= ram.room and len(below._alone) <= ram.room
        for key in below._alone:
            entry = self.directory.get(key)
            assert entry is None or not entry.offered or self.refused, "written before it leaves"
        coldest = below.coldest()
        assert coldest is None or coldest in below


def test_both_places_hold_what_they_say_through_all_that_can_happen():
    early = 0
    for seed in range(60):
        place = Place(seed)
        for _ in range(300):
            place.step()
            place.check()
        early += place.early
    assert early > 100


def test_without_refusals_nothing_that_ram_keeps_is_lost():
    lost = list[ChunkKey]()
    for seed in range(20):
        place = Place(seed)
        place.refused, directory = 0.0, place.directory

        def left(run, directory=directory):
            lost.extend(key for key in run if key not in directory.tiers[0].order)

        place.adaptive.places[0][0].evicts.append(left)
        for _ in range(300):
            place.ask()
        assert 0 < place.early <= 0.25 * place.writes
    assert not lost
