"""Realms: several chunk sizes out of one budget, and what is kept of those who came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.lanes import Lane
from kvtier.core.pool import Pool
from kvtier.core.tenant import owner_of
from kvtier.server import registry as realm_module
from kvtier.server.registry import Realm, Realms
from kvtier.store.store import Store
from kvtier.testing.check_tier import content
from kvtier.tiers.nvme.tier import NvmeTier
from tests.clock import Clock
from tests.nvme_place import room
from tests.server_process import load, save

BUDGET = 64 * 4096
IDLE_S = 600.0


class Bench:
    """Realms over a budget of 64 pages of RAM and, with ``nvme``, a folder of 64 pages."""

    def __init__(self, nvme: Path | None = None) -> None:
        self.clock = Clock()
        self.nvme = nvme
        self.budget = BUDGET
        self.discarded: list[int] = []
        self.opened: list[tuple[int, int]] = []
        self.realms = Realms(self._store, lambda call: call(), self.clock, self.discarded.append)

    def _store(self, slot_bytes: int, parts: int = 1) -> Store:
        self.opened.append((slot_bytes, parts))
        if slot_bytes > self.budget // parts:
            raise ConfigError("ram_bytes is less than one chunk")
        pool = Pool(self.budget // parts // slot_bytes, slot_bytes)
        if self.nvme is None:
            return Store(pool)
        bytes_ = room(self.budget // parts // slot_bytes, slot_bytes)
        tier = NvmeTier(self.nvme / str(slot_bytes), bytes_, slot_bytes)
        return Store(pool, [(tier, Lane("nvme", 1, urgent_bound=99, bound=99))])

    def get(self, slot_bytes: int, users: int = 0) -> Realm:
        realm = self.realms.get(slot_bytes).result(10.0)
        for _ in range(users):
            assert self.realms.enter(realm)
        return realm

    def settle(self) -> None:
        self.realms.settle()
        self.realms.aside(lambda: None).result(10.0)

    @property
    def bytes_in_use(self) -> int:
        return sum(realm.store.occupied * size for size, realm in self.realms.open.items())


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.realms.close(10.0)


def layout(slot_bytes: int) -> ChunkLayout:
    return ChunkLayout(bytes(32), 1, 1, (slot_bytes,))


def test_the_first_size_has_all_and_the_second_gets_half_of_it(bench: Bench) -> None:
    first = bench.get(4096, users=1)
    keys = layout(4096).keys(range(40))
    save(first.store, keys)
    assert (first.store.slots, bench.bytes_in_use) == (64, BUDGET)
    second = bench.get(8192, users=1)
    assert bench.opened == [(4096, 1), (8192, 2)]
    assert (first.store.slots, second.store.slots, bench.bytes_in_use) == (32, 16, BUDGET)
    assert load(first.store, keys) == ["ram"] * 32, "the coldest left, the others are as they were"
    for realm in (first, second):
        realm.store.check(idle=True)


def test_memory_of_slots_that_were_given_up_goes_back_to_the_host() -> None:
    bench = Bench()
    first = bench.get(4096, users=1)
    for slot in range(64):
        first.store.pool.view(slot)[:] = b"\xff" * 4096
    bench.get(8192, users=1)
    given = [slot for slot in range(64) if first.store.pool.view(slot) == bytes(4096)]
    assert len(given) == 32, "it reads as zeros"
    assert bench.realms.close(10.0)


def test_what_somebody_holds_is_taken_when_he_lets_go(bench: Bench) -> None:
    first = bench.get(4096, users=1)
    filling = first.store.save(layout(4096).keys(range(48)))
    second = bench.get(8192, users=1)
    assert (first.store.occupied, second.store.slots, bench.bytes_in_use) == (48, 8, BUDGET)
    for key, view in zip(filling.keys, filling.views(), strict=True):
        view[:] = content(key, 4096)
    filling.commit()
    bench.settle()
    assert (first.store.occupied, second.store.slots, bench.bytes_in_use) == (32, 16, BUDGET)
    assert len(load(first.store, layout(4096).keys(range(48)))) == 32
    first.store.check(idle=True)


def test_a_size_without_engines_gives_its_room_back_after_a_while(bench: Bench) -> None:
    first, second = bench.get(4096, users=1), bench.get(8192, users=1)
    bench.clock.now += 10 * IDLE_S
    bench.realms.leave(second)
    bench.clock.now += IDLE_S - 1
    bench.settle()
    assert second in bench.realms.open.values()
    bench.clock.now += 1
    bench.settle()
    assert (list(bench.realms.open), bench.discarded) == ([4096], [8192])
    assert (first.store.slots, first.store.occupied) == (64, 64)
    assert not bench.realms.enter(second), "ask again"
    assert len(save_all(first)) == 64


def save_all(realm: Realm) -> list[object]:
    keys = layout(4096).keys(range(64))
    save(realm.store, keys)
    return load(realm.store, keys)  # type: ignore[return-value]


def test_the_last_size_and_the_configured_one_stay(bench: Bench) -> None:
    for future in bench.realms.prepare(16384).values():
        future.result(10.0)
    bench.clock.now += 2 * IDLE_S
    bench.settle()
    assert list(bench.realms.open) == [16384]
    bench.get(4096)
    bench.clock.now += 2 * IDLE_S
    bench.settle()
    assert list(bench.realms.open) == [16384], "the stranger went"
    bench.clock.now += 2 * IDLE_S
    bench.get(8192)
    assert set(bench.realms.open) == {16384, 8192}


def test_sizes_from_before_are_opened_together_with_their_parts(bench: Bench) -> None:
    for future in bench.realms.prepare(None, [4096, 8192]).values():
        future.result(10.0)
    assert bench.opened == [(4096, 2), (8192, 2)]
    assert [realm.store.slots for realm in bench.realms.open.values()] == [32, 16]


def test_there_are_eight_sizes_and_one_more_takes_the_room_of_one_without_engines(bench: Bench) -> None:
    bench.budget = 2 * BUDGET
    realms = [bench.get(4096 * number, users=1) for number in range(1, 9)]
    assert bench.bytes_in_use <= bench.budget
    assert all(realm.store.slots >= 1 for realm in realms)
    with pytest.raises(TierError, match="all with engines"):
        bench.realms.get(4096 * 9).result(10.0)
    bench.realms.leave(realms[2])
    bench.clock.now += 1
    bench.realms.leave(realms[5])
    bench.get(4096 * 9)
    assert 4096 * 3 not in bench.realms.open and 4096 * 6 in bench.realms.open, "who left first"
    assert bench.discarded == [4096 * 3]


def test_a_size_that_cannot_be_had_costs_nobody_anything(bench: Bench) -> None:
    first = bench.get(4096, users=1)
    save_all(first)
    with pytest.raises(TierError, match="holds no chunk of"):
        bench.realms.get(BUDGET).result(10.0)
    assert list(bench.realms.open) == [4096]
    assert load(first.store, layout(4096).keys(range(64))) == ["ram"] * 64, "not one chunk left for it"


def test_a_disk_is_shared_as_ram_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.get(4096, users=1)
    keys = layout(4096).keys(range(60))
    save(first.store, keys)
    while first.store.stats().get("nvme_stored", 0) < 60:
        first.store.wait(0.01)
    second = bench.get(8192, users=1)
    assert (first.store.capacities, second.store.capacities) == ([32], [16])
    assert first.store.stats()["nvme_held"] == 32
    payload = (tmp_path / "4096" / "slots.kvtier").stat()
    assert payload.st_blocks * 512 <= 33 * 4096, "its blocks are the file system's again"
    assert load(first.store, keys)[:32] == ["ram"] * 32
    bench.realms.leave(second)
    bench.clock.now += IDLE_S
    bench.settle()
    assert first.store.capacities == [64]
    assert (tmp_path / "4096" / "slots.kvtier").stat().st_blocks * 512 >= 64 * 4096, "reserved again"
    assert len(load(first.store, keys)) >= 32
    assert bench.realms.close(10.0)


# ---- who came ------------------------------------------------------------------------------------------------------


@pytest.fixture
def one() -> Realm:
    return Realm(Store(Pool(1, 4096)), lambda call: None, Clock())


def test_names_are_bounded_and_nobody_is_locked_out(one: Realm) -> None:
    """Those that came longest ago are forgotten; their chunks are theirs still, because the number is in the name."""
    first = one.owner(bytes(32), "first")
    one.owner(bytes(32), "honest")
    for number in range(realm_module._MAX_OWNERS + 100):
        one.owner(bytes(32), f"tenant {number}")
        if number == realm_module._MAX_OWNERS - 100:
            one.owner(bytes(32), "honest")
    assert len(one.owners) == realm_module._MAX_OWNERS
    assert (bytes(32), "first") not in one.owners and (bytes(32), "honest") in one.owners
    assert one.owner(bytes(32), "first") == first == owner_of(bytes(32), "first")


@pytest.mark.parametrize("make", [lambda: Store(Pool(4, 4096), share=0.5), lambda: Store(Pool(4, 4096))])
def test_owners_that_have_nothing_take_no_memory(make: Callable[[], Store]) -> None:
    """Each self-test of an engine is another one."""
    store = make()
    for number in range(20_000):
        with store.save(layout(4096).keys([number]), owner_of(bytes(32), str(number))) as lease:
            lease.commit()
    directory = store._directory
    assert len(directory._used) <= 4
    assert len(directory._order._parts or ()) <= 4
    assert len(directory._order._once) <= 8193
    store.check(idle=True)
