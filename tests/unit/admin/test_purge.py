"""Erase: what one call reaches: RAM, every lower tier, and what engines save or load while it
runs."""

import asyncio
from collections.abc import Callable

import pytest

from kvtier.admin.purge import purge
from kvtier.core.chunk import ChunkKey
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.core.tenant import may, owner_of
from kvtier.server.registry import SizeClasses
from kvtier.store.store import Store
from kvtier.testing import DictTier
from tests.child_process import DEADLINE_S
from tests.stores import SLOT, held, keys, save

OURS, THEIRS = owner_of(bytes(32), "ours"), owner_of(bytes(32), "theirs")


class SharedDict(DictTier):
    """A shared tier that keeps owners and can be searched. ``before`` runs at the beginning of
    every search."""

    def __init__(self):
        super().__init__(64, shared=True)
        self.whose: dict[ChunkKey, int] = {}
        self.before: Callable[[], None] = lambda: None

    def write(self, key, data, owner=0):
        self.whose[key] = owner
        return super().write(key, data)

    def owners(self, keys):
        return [self.whose.get(key, 0) for key in keys]

    def held_of(self, owner):
        self.before()
        return [key for key in self.held if may(owner, self.whose.get(key, 0))], True


@pytest.fixture
def tier():
    return SharedDict()


@pytest.fixture
def size_class(tier):
    lane = Lane("dict", 2, urgent_bound=64, bound=64)
    size_classes = SizeClasses(
        lambda size: Store(Pool(16, size), [(tier, lane)]), lambda call: call()
    )
    yield size_classes, size_classes.get(SLOT).result(DEADLINE_S)
    assert size_classes.close(10.0)


def purged(size_classes, namespace):
    return asyncio.run(purge(size_classes, namespace, ()))


def spilled(store, count):
    while store.stats().get("dict_stored", 0) < count:
        store.wait(0.01)


def test_clearing_everything_reaches_ram_and_the_tiers_below(size_class, tier):
    size_classes, one = size_class
    save(one.store, keys(1, 2), owner=OURS)
    save(one.store, keys(3), owner=THEIRS)
    spilled(one.store, 3)
    assert len(tier.held) == 3
    told = purged(size_classes, None)
    assert (told.complete, told.chunks) == (True, 3)
    assert (tier.held, set(one.store.every_key())) == ({}, set())


def test_clear_of_a_store_reaches_what_only_a_lower_tier_holds():
    tier, lane = DictTier(64), Lane("dict", 1, urgent_bound=64, bound=64)
    tier.held = held(keys(1, 2, 3))
    store = Store(Pool(2, SLOT), [(tier, lane)])
    store.invalidate_all()
    assert store.close(10.0)
    assert tier.held == {}


def test_of_a_tenant_only_what_is_its_own(size_class):
    size_classes, one = size_class
    save(one.store, keys(1, 2), owner=OURS)
    save(one.store, keys(3), owner=THEIRS)
    spilled(one.store, 3)
    assert purged(size_classes, "ours").chunks == 2
    assert set(one.store.every_key()) == set(keys(3))


def test_what_an_engine_brings_back_into_ram_during_a_purge_goes_too(size_class, tier):
    size_classes, one = size_class
    (key,) = keys(7)
    tier.write(key, memoryview(bytes(SLOT)), OURS)
    came: list[int] = []

    def load():
        with one.store.load([key], owner=OURS) as lease:
            while lease.poll().coming:
                one.store.wait(0.01)
            came.append(lease.poll().ready)

    tier.before = load
    told = purged(size_classes, None)
    assert came == [1], "it was in RAM"
    assert (told.complete, tier.held, set(one.store.every_key())) == (True, {}, set())


def test_what_others_wrote_into_a_shared_tier_goes_too(size_class, tier):
    size_classes, one = size_class
    (key,) = keys(9)
    tier.write(key, memoryview(bytes(SLOT)), OURS)
    assert set(one.store.every_key()) == set(), "nobody here knows of it"
    told = purged(size_classes, "ours")
    assert (told.complete, told.chunks, tier.held) == (True, 1, {})
