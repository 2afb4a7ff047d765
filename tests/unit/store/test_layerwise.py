"""Chunks that come up part by part: in which order, what waits are told, and that nothing bad is ever confirmed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunk import PAGE_BYTES, ChunkKey
from kvtier.core.errors import TierError
from kvtier.core.pool import Pool
from kvtier.store.layerwise import BROKEN, CONFIRMED, MOST_PARTS, await_parts, cut, told
from kvtier.store.lease import LoadLease
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from kvtier.testing.check_tier import content
from kvtier.tiers.nvme.tier import NvmeTier
from tests.clock import Clock
from tests.nvme_place import flip, room

PARTS, CHUNKS = 4, 3
SLOT = PARTS * PAGE_BYTES
CUTS = tuple(PAGE_BYTES * part for part in range(1, PARTS + 1))
KEYS = [ChunkKey(bytes([number]) * 16) for number in range(1, CHUNKS + 1)]


class Watched(NvmeTier):
    """Tells the order of its reads."""

    def __init__(self, path: Path, bytes_: int, slot_bytes: int) -> None:
        super().__init__(path, bytes_, slot_bytes)
        self.parts: list[tuple[int, int]] = []
        self.during: Callable[[], None] = lambda: None

    def read_part(self, key: ChunkKey, into: memoryview, begin: int, end: int) -> bool:
        self.parts.append((KEYS.index(key), begin // PAGE_BYTES))
        self.during()
        return super().read_part(key, into, begin, end)


class Bench:
    """A store whose NVMe tier holds three chunks, and whose lane the test turns."""

    def __init__(self, path: Path, slots: int = CHUNKS + 2) -> None:
        self.path = path
        self.tier = Watched(path, room(16, SLOT), SLOT)
        for key in KEYS:
            assert self.tier.write(key, content(key, SLOT))
        self.lane, self.pool = ManualLane(), Pool(slots, SLOT)
        self.store = Store(self.pool, [(self.tier, self.lane)], clock=Clock(1.0))
        self.store._directory.found(0, KEYS[::-1])

    def load(self) -> LoadLease:
        return self.store.load(KEYS, cuts=CUTS)

    def states(self, lease: LoadLease) -> list[int]:
        found = [told(self.pool, slot) for slot in lease.slots]
        assert [number for number, _ in found] == lease.fillings
        return [parts for _, parts in found]

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.lane.turn()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "nvme")
    yield bench
    bench.store.check()
    bench.store.close()


def test_all_first_parts_come_before_any_second_one_and_are_told_as_they_come(bench: Bench) -> None:
    lease = bench.load()
    assert bench.states(lease) == [0, 0, 0]
    bench.turn(2)
    assert bench.states(lease) == [1, 1, 0]
    assert bench.pool.view(lease.slots[1])[:PAGE_BYTES] == content(KEYS[1], SLOT)[:PAGE_BYTES]
    bench.turn(CHUNKS * (PARTS - 1))
    assert bench.states(lease) == [CONFIRMED, CONFIRMED, 3]
    assert lease.poll() == (2, 1)
    bench.turn(1)
    assert bench.states(lease) == [CONFIRMED] * CHUNKS
    assert lease.poll() == (3, 0)
    assert lease.views() == [content(key, SLOT) for key in KEYS]
    assert bench.tier.parts == [(chunk, part) for part in range(PARTS) for chunk in range(CHUNKS)]
    assert bench.store.stats()["nvme_loaded"] == CHUNKS
    lease.close()


def test_parts_that_end_out_of_order_are_told_only_without_a_gap(bench: Bench) -> None:
    lease = bench.load()
    bench.lane.turn(CHUNKS)  # the second part of the first chunk
    assert bench.states(lease)[0] == 0
    bench.lane.turn(0)
    assert bench.states(lease)[0] == 2
    bench.lane.run()
    assert bench.states(lease) == [CONFIRMED] * CHUNKS
    lease.close()


@pytest.mark.parametrize("part", range(PARTS))
def test_one_bad_byte_in_any_part_is_never_confirmed(bench: Bench, part: int) -> None:
    at = bench.tier._places[KEYS[1]] % bench.tier.capacity * SLOT + part * PAGE_BYTES + 17
    flip(bench.path / "slots.kvtier", at)
    lease = bench.load()
    slot = lease.slots[1]
    bench.lane.run()
    assert [told(bench.pool, each)[1] for each in lease.slots] == [CONFIRMED, BROKEN, CONFIRMED]
    with pytest.raises(TierError, match="bad, or was given up"):
        await_parts(bench.pool, slot, lease.fillings[1], 1, until=0.0)
    assert lease.poll() == (1, 0)
    assert bench.tier.counts["corrupt"] == 1
    assert bench.store.match(KEYS) == (1, 0)
    lease.close()
    bench.store.check(idle=True)


def test_a_slot_that_has_gone_to_another_filling_is_not_taken_for_the_first(bench: Bench) -> None:
    lease = bench.load()
    slot, filling = lease.slots[0], lease.fillings[0]
    lease.close()
    bench.lane.run()  # nobody waits: not read, given back
    assert bench.tier.parts == []
    bench.store.check(idle=True)
    other = bench.load()
    assert slot in other.slots
    bench.lane.run()
    with pytest.raises(TierError, match="given up"):
        await_parts(bench.pool, slot, filling, 1, until=0.0)
    with pytest.raises(TierError, match="in time"):
        await_parts(bench.pool, slot, max(other.fillings) + 1, 1, until=0.0)
    other.close()


def test_a_slot_that_is_read_into_is_kept_until_that_ends_and_what_nobody_waits_for_is_free_at_once(
    bench: Bench,
) -> None:
    lease = bench.load()
    bench.turn(1)
    free: list[int] = []
    slots, fillings = lease.slots, lease.fillings

    def leave() -> None:
        lease.close()
        free.append(bench.store.stats()["ram_free"])

    bench.tier.during = leave
    bench.turn(1)
    assert free == [CHUNKS + 1], "all but the one that a read writes into"
    read = len(bench.tier.parts)
    bench.lane.run()
    assert len(bench.tier.parts) == read, "what nobody waits for is not read"
    assert bench.store.stats()["ram_free"] == CHUNKS + 2
    assert [told(bench.pool, slot) for slot in slots] == [(filling, BROKEN) for filling in fillings]
    bench.store.check(idle=True)


def test_a_part_that_fails_keeps_the_slot_until_the_last_read_has_ended(bench: Bench) -> None:
    lease = bench.load()
    free: list[int] = []

    def meanwhile() -> None:
        bench.tier.during = lambda: None
        bench.tier.delete(KEYS[0])
        bench.lane.run()
        lease.close()
        free.append(bench.store.stats()["ram_free"])

    bench.tier.during = meanwhile
    bench.turn(1)
    assert free == [2], "the read of its first part still writes into the slot"
    assert bench.store.stats()["ram_free"] == 3
    assert bench.store.stats()["ram_ready"] == CHUNKS - 1


def test_a_tier_that_cannot_be_asked_keeps_its_chunks_and_the_wait_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "read_part", lambda *_: None)
    lease = bench.load()
    slots, fillings = lease.slots, lease.fillings
    bench.lane.run()
    assert [told(bench.pool, slot) for slot in slots] == [(filling, BROKEN) for filling in fillings]
    assert lease.poll() == (0, 0)
    lease.close()
    assert bench.store.match(KEYS) == (0, CHUNKS), "not now is not never"
    bench.store.check(idle=True)


def test_nothing_is_begun_in_hope_of_a_tier_that_has_just_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as away:
        away.setattr(Watched, "read_part", lambda *_: None)
        with bench.store.load(KEYS[:1], cuts=CUTS):
            bench.lane.run()
    lease = bench.load()
    assert not lease.fillings
    bench.lane.run()
    assert lease.poll() == (CHUNKS, 0)
    lease.close()
    bench.store.clear()
    bench.lane.run()


def test_what_a_full_lane_refuses_is_given_up_and_said_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "nvme")
    bench.lane._bounds[True] = CHUNKS + 1
    lease = bench.load()
    slots, fillings = lease.slots, lease.fillings
    bench.lane.run()
    for slot, filling in zip(slots, fillings, strict=True):
        assert told(bench.pool, slot) == (filling, BROKEN)
    assert lease.poll() == (0, 0)
    lease.close()
    assert bench.store.stats()["promotion_refused"] == CHUNKS
    bench.store.check(idle=True)
    bench.store.close()


def test_a_lease_that_waits_for_anything_else_comes_chunk_by_chunk(bench: Bench) -> None:
    first = bench.store.load(KEYS[:1])
    second = bench.load()
    assert not second.fillings
    assert second.slots == []
    bench.lane.run()
    assert second.poll() == (3, 0)
    first.close()
    second.close()


def test_chunks_in_ram_have_no_filling(bench: Bench) -> None:
    with bench.store.load(KEYS[:1]):
        bench.lane.run()
    lease = bench.load()
    assert lease.fillings[0] == 0 < min(lease.fillings[1:])
    assert lease.sources == ["ram", "nvme", "nvme"]
    lease.close()
    bench.lane.run()


def test_waiting_ends_when_the_part_comes_or_the_time_is_up(bench: Bench) -> None:
    lease = bench.load()
    slot, filling = lease.slots[0], lease.fillings[0]
    with pytest.raises(TierError, match="in time"):
        await_parts(bench.pool, slot, filling, 1, until=0.0)
    ended = threading.Event()

    def wait() -> None:
        await_parts(bench.pool, slot, filling, CONFIRMED, until=float("inf"))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    bench.turn(CHUNKS * PARTS - 3)
    assert not ended.is_set()
    bench.lane.run()
    thread.join(timeout=60)
    assert ended.is_set()
    lease.close()


@given(
    st.lists(st.integers(1, 3 << 20), min_size=1, max_size=100),
)
def test_cuts_cover_the_slot_in_whole_pages_and_every_layer_lies_in_its_part(sizes: list[int]) -> None:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    whole = -(-ends[-1] // PAGE_BYTES) * PAGE_BYTES
    cuts, layers = cut(ends, PAGE_BYTES, whole)
    assert len(cuts) == len(layers) <= MOST_PARTS
    assert cuts[-1] == whole
    assert layers[-1] == len(ends)
    assert all(one % PAGE_BYTES == 0 for one in cuts)
    assert list(cuts) == sorted(set(cuts))
    assert list(layers) == sorted(set(layers))
    assert all(ends[count - 1] <= at for at, count in zip(cuts, layers, strict=True))
