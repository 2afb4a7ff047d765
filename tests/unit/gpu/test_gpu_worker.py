"""The connector's worker half: what is confirmed when, what failures spoil, how long copies make a
step."""

import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from kvtier.client.attachment import SharedPool
from kvtier.connectors.vllm.groups import Geometry, Group, Kind
from kvtier.connectors.vllm.metadata import (
    Job,
    LoadEnd,
    Move,
    PoolAddress,
    StepMetadata,
    StepReport,
)
from kvtier.connectors.vllm.scheduler_side.jobs import Jobs
from kvtier.connectors.vllm.tables import NULL_BLOCK
from kvtier.connectors.vllm.worker_side.worker import GroupLayers, WorkerHalf
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import LayoutError
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, Pinning, regions_of
from kvtier.load_policy.decide import LoadPolicy
from kvtier.load_policy.prefill import Prefill, PrefillTime
from kvtier.store.store import Store
from kvtier.testing import ManualLane
from tests.clock import Clock
from tests.unit.gpu.test_gpu_pinning import Driver
from tests.unit.paged_streams import Held
from tests.unit.scheduler_half import scheduler_half
from tests.unit.still_model import StillModel
from tests.unit.vllm_request import planned, vllm_request

pytestmark = pytest.mark.vllm

BLOCKS, PER_CHUNK, ROW = 8, 2, 2048
SLOT = PER_CHUNK * ROW
BLOCK_TOKENS, CHUNK_TOKENS = 16, 32


def _layers():
    return GroupLayers(frozenset({"layer.0"}), PER_CHUNK, BLOCKS)


class Rank:
    """A worker half with its device, and steps of vLLM in short. ``Held`` replaces the host copier
    of CPU tensors. ``clock``: what a step's copies are timed by, which end it after milliseconds.
    It stands still unless a test gives another."""

    def __init__(self, *, held=True, clock=lambda: 0.0, slot_bytes=SLOT, parts=(((0, True),),)):
        self.pool = Pool(4, slot_bytes)
        self.address = PoolAddress(self.pool.path, None, 4, slot_bytes, parts)
        self.cache = torch.zeros(BLOCKS, ROW, dtype=torch.uint8)
        self.streams = Held()
        self.model = StillModel()
        self.half = WorkerHalf(0, [_layers()], {"layer.0": self.cache}, self.model)
        self.half._clock = clock
        regions = regions_of({"layer.0": self.cache}, BLOCKS)
        if held:
            self.half._paged = [
                PagedBlocks(regions, PER_CHUNK, locked=lambda _: (), streams=self.streams)
            ]
            self.streams.run()
        self.number = 0

    def job(self, number, slots, blocks):
        return Job(number, self.address, [Move(0, slots, blocks)], f"r{number}", len(blocks))

    def step(self, loads=(), saves=(), seen=0, forward=None, renewed=()):
        """vLLM's calls of one step, in its order; the report."""
        self.number += 1
        computes = forward is not None
        loads, known = list(loads), Counter({0: seen})
        saves = [replace(job, request_id=None) for job in saves]
        metadata = StepMetadata(
            self.address,
            self.number,
            computes,
            loads=loads,
            saves=saves,
            replacements_seen=known,
        )
        metadata.renewed = dict(renewed)
        return self.planned(metadata, forward)

    def planned(self, metadata, forward=None):
        self.half.begin(metadata)
        if forward is not None:
            self.streams.do(self.streams.engine, forward)
        self.half.load(metadata)
        self.half.save(metadata)
        self.ended, self.failed = self.half.transfers()
        self.bad, self.left = self.half.ends.take_blocks()
        return self.half.ends.take_report()

    def fill(self, block, value):
        def forward():
            self.cache[block : block + PER_CHUNK] = value

        return forward

    def held(self, slot):
        return set(bytes(self.pool.view(slot)))

    def mend(self):
        for stream in self.streams.all:
            stream.error = None


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.streams.run()
    rank.half.close()
    rank.pool.close()


def test_on_cpu_tensors_every_copy_is_confirmed_by_its_own_step():
    rank = Rank(held=False, clock=time.perf_counter)
    rank.fill(2, 7)()
    saved = rank.step(saves=[rank.job(1, [0], [2, 3])])
    assert dict(saved.done) == {1: 1}
    assert rank.held(0) == {7}
    loaded = rank.step([rank.job(2, [0], [6, 7])])
    assert dict(loaded.done) == {2: 1}
    assert loaded.loaded_tokens == 2
    assert loaded.load_s > 0
    assert (rank.ended, rank.failed) == ({"r2"}, set())
    assert bool((rank.cache[6:8] == 7).all())
    rank.half.close()


LAST = (((0, True),),)
BEFORE_ANOTHER = (((0, True),), ((SLOT, True),))
BEFORE_A_COPY = (((0, True),), ((0, False),), ((SLOT, False),))
ON_TWO_HOSTS = (((0, True),), ((0, True),), ((SLOT, True),))
SILENT = (((0, False),),)


@pytest.mark.parametrize(
    ("parts", "cleared"),
    [(LAST, True), (BEFORE_ANOTHER, False), (BEFORE_A_COPY, True), (ON_TWO_HOSTS, True)],
)
@pytest.mark.parametrize("held", [True, False])
def test_what_no_rank_writes_of_a_slot_is_cleared_by_the_last_that_writes(parts, cleared, held):
    """A piece of a smaller group ends megabytes before its slot does. The slot held another
    tenant's chunk, and a client by TCP gets whole slots."""
    rank = Rank(held=held, slot_bytes=2 * SLOT, parts=parts)
    for slot in range(4):
        rank.pool.view(slot)[:] = b"\xff" * 2 * SLOT
    rank.step(saves=[rank.job(1, [0, 2], [2, 3, 4, 5])])
    rank.streams.run()
    ends = [set(rank.pool.view(slot)[SLOT:]) for slot in range(4)]
    assert ends == [{0 if cleared and slot in (0, 2) else 0xFF} for slot in range(4)]
    assert set(rank.pool.view(0)[:SLOT]) == {0}, "its own part is as the blocks are"
    rank.half.close()


def test_a_rank_that_writes_nothing_and_a_load_clear_nothing():
    rank = Rank(held=False, slot_bytes=2 * SLOT, parts=SILENT)
    rank.pool.view(0)[:] = b"\xff" * 2 * SLOT
    rank.step(saves=[rank.job(1, [0], [2, 3])])
    rank.step([rank.job(2, [0], [4, 5])])
    assert rank.held(0) == {0xFF}
    rank.half.close()


def test_a_slots_pages_are_mapped_when_it_is_first_used_and_only_then(monkeypatch):
    rank, touched, touch = Rank(held=False), list[tuple[int, int, int]](), Pool.touch

    def noted(pool, slot, begin, end):
        touched.append((slot, begin, end))
        touch(pool, slot, begin, end)

    monkeypatch.setattr(Pool, "touch", noted)
    for number, slots in enumerate(([0], [1, 0], [1])):
        rank.step(saves=[rank.job(number, slots, [2, 3, 4, 5][: 2 * len(slots)])])
    rank.step([rank.job(9, [3], [6, 7])])
    assert touched == [(0, 0, SLOT), (1, 0, SLOT), (3, 0, SLOT)]
    rank.half.close()


def test_a_save_is_confirmed_by_the_first_step_that_finds_its_dma_through(rank):
    assert not rank.step(saves=[rank.job(1, [0], [2, 3])], forward=rank.fill(2, 7)).done
    assert not rank.step(forward=rank.fill(2, 9)).done
    rank.streams.run()

    report = rank.step()
    assert dict(report.done) == {1: 1}
    assert report.step == 3
    assert rank.held(0) == {7}
    assert not rank.step().done


def test_a_load_is_told_once_when_it_is_through_and_counts_at_the_rate_of_the_last_one(rank):
    rank.pool.view(1)[:] = b"\5" * SLOT
    first = rank.step([rank.job(1, [1], [4, 5])])
    assert not first.done
    assert not rank.ended
    assert (first.loaded_tokens, first.load_s) == (0, 0.0), "nothing is known of this device yet"
    rank.streams.run()
    assert bool((rank.cache[4:6] == 5).all())

    (copy,) = rank.half._running[0].copies
    second = rank.step([rank.job(2, [1, 2], [1, 2, 3, 6])])
    assert dict(second.done) == {1: 1}
    assert (rank.ended, rank.failed) == ({"r1"}, set())
    assert second.loaded_tokens == 0, "step 2 was loaded for before the first was confirmed"
    third = rank.step([rank.job(3, [1, 2], [1, 2, 3, 6])])
    assert not rank.ended
    assert third.loaded_tokens == 4
    assert copy.seconds
    assert third.load_s == pytest.approx(copy.seconds * 2)


@pytest.mark.parametrize(("slot", "blocks"), [(99, [4, 5]), (1, [4, NULL_BLOCK])])
def test_a_load_that_the_host_can_see_to_be_wrong_fails_in_its_step_and_spoils_no_save(
    rank, slot, blocks
):
    report = rank.step([rank.job(1, [slot], blocks)], saves=[rank.job(2, [0], [6, 7])])
    assert (rank.ended, rank.failed, rank.bad) == ({"r1"}, {"r1"}, {*blocks})
    assert dict(report.failed) == {1: 1}
    rank.streams.run()
    assert dict(rank.step().done) == {2: 1}
    assert not rank.ended


def test_a_load_that_fails_on_the_device_is_told_when_it_is_found_and_spoils_no_save(rank):
    rank.step([rank.job(2, [1], [4, 5])], saves=[rank.job(3, [2], [1, 2])])
    rank.streams.all[4].error = RuntimeError("CUDA error: injected")  # the stream that scatters
    rank.streams.run()
    report = rank.step()
    assert (rank.ended, rank.failed, rank.bad) == ({"r2"}, {"r2"}, {4, 5})
    assert dict(report.failed) == {2: 1}
    assert dict(report.done) == {3: 1}


class SlowCopies:
    """A clock that stands still but for copies, each of which takes ``copy_s``, and for what a test
    adds."""

    def __init__(self, rank, copy_s):
        self.now, self.copy_s, self.copied = 0.0, copy_s, 0
        self._load = rank.half._paged[0].load
        rank.half._clock = lambda: self.now
        rank.half._paged[0].load = self.load

    def load(self, jobs):
        self.now += self.copy_s * len(jobs)
        self.copied += len(jobs)
        return self._load(jobs)


@pytest.mark.parametrize(
    ("forward_s", "a_step"),
    [(0.0, 3), (0.04, 3), (0.2, 5), (None, 25)],
    ids=["no time", "decoding", "a long prefill", "nothing computed"],
)
def test_copies_make_a_step_that_computes_longer_by_5_ms_or_a_twentieth(forward_s, a_step):
    rank = Rank(held=False)
    clock = SlowCopies(rank, 0.002)

    def forward():
        clock.now += forward_s or 0.0

    computes = None if forward_s is None else forward
    rank.streams.do = lambda _, work: work()  # type: ignore[method-assign]
    rank.step(forward=computes)  # shows how long a forward pass takes
    loads = [rank.job(number, [0, 1], [4, 5, 6, 7]) for number in range(16)]
    report = rank.step(loads, forward=computes)
    assert clock.copied == a_step
    assert report.load_s == pytest.approx(a_step * 0.002)
    assert rank.ended == {f"r{number}" for number in range(a_step // 2)}
    told = Counter(rank.ended)
    for _ in range(16):
        rank.step(forward=computes)
        told.update(rank.ended)
    assert told == Counter(f"r{number}" for number in range(16)), "each is told once"
    rank.half.close()


def test_a_load_that_fails_half_way_fails_whole_and_the_next_one_goes_on():
    rank = Rank(held=False)
    clock = SlowCopies(rank, 0.002)
    sound = clock.load

    def failing(jobs):
        if clock.copied == 1:
            clock.copied += 1
            raise OSError("injected")
        return sound(jobs)

    rank.half._paged[0].load = failing  # type: ignore[method-assign]
    report = rank.step([rank.job(1, [0, 1], [1, 2, 3, 6]), rank.job(2, [2], [4, 5])])
    assert (rank.ended, rank.failed) == ({"r1", "r2"}, {"r1"})
    assert (dict(report.failed), dict(report.done)) == ({1: 1}, {2: 1})
    rank.half.close()


def test_loads_that_wait_for_their_turn_fail_when_the_weights_are_replaced():
    rank = Rank(held=False)
    SlowCopies(rank, 0.06)
    rank.step([rank.job(1, [0, 1], [1, 2, 3, 6])])
    assert not rank.ended
    rank.model.other = True
    report = rank.step()
    assert (rank.ended, rank.failed) == ({"r1"}, {"r1"})
    assert report.replacements == {0: 1}
    rank.step()
    assert not rank.ended
    rank.half.close()


def two_parts(rank, *slots):
    """Of a load of six blocks, of which its end keeps the first four."""
    blocks, end = ([1, 2], [4, 5]), LoadEnd(9, "one", [1, 2, 4, 5, 6, 7], 4)
    return [
        replace(
            rank.job(3 + at, [slot], blocks[at]), request_id=None, part_of=9, end=(None, end)[at]
        )
        for at, slot in enumerate(slots)
    ]


def test_a_load_in_parts_has_ended_with_the_part_that_says_so(rank):
    first, last = two_parts(rank, 0, 1)
    rank.step([first])
    rank.streams.run()
    report = rank.step([last])
    assert dict(report.done) == {3: 1}
    assert not rank.ended and not rank.left
    rank.streams.run()
    report = rank.step()
    assert dict(report.done) == {4: 1, 9: 1}
    assert (rank.ended, rank.failed, rank.bad, rank.left) == ({"one"}, set(), set(), {6, 7})
    rank.step()
    assert not rank.ended and not rank.left, "it is told once"


@pytest.mark.parametrize(
    ("slots", "left"), [((99, 1), {1, 2, 6, 7}), ((0, 99), {4, 5, 6, 7})], ids=["first", "last"]
)
def test_a_rank_leaves_what_it_could_not_copy_of_a_load_when_its_other_copies_are_through(
    rank, slots, left
):
    report = rank.step(two_parts(rank, *slots))
    assert dict(report.failed) == {3 if slots[0] == 99 else 4: 1}
    assert not rank.ended and not rank.left, "a part is being copied"
    rank.streams.run()
    assert dict(rank.step().done) == {4 if slots[0] == 99 else 3: 1, 9: 1}
    assert (rank.ended, rank.left) == ({"one"}, left)


def test_nothing_stays_of_a_load_in_parts_when_the_weights_are_replaced_before_its_last_part():
    rank = Rank(held=False)
    SlowCopies(rank, 0.06)
    first, last = two_parts(rank, 0, 1)
    assert dict(rank.step([first]).done) == {3: 1}
    rank.model.other = True
    report = rank.step([last])
    assert (dict(report.failed), dict(report.done)) == ({4: 1}, {9: 1})
    assert (rank.ended, rank.left) == ({"one"}, {1, 2, 4, 5, 6, 7})
    rank.half.close()


def test_nothing_is_loaded_or_saved_after_the_weights_were_replaced_until_the_scheduler_knows(rank):
    rank.step(saves=[rank.job(1, [0], [1, 2])], forward=rank.fill(1, 3))
    rank.streams.run()
    rank.model.other = True
    report = rank.step([rank.job(2, [0], [4, 5])], saves=[rank.job(3, [2], [4, 5])])
    rank.streams.run()
    assert report.replacements == {0: 1}
    assert (rank.failed, rank.bad) == ({"r2"}, {4, 5})
    assert dict(report.failed) == {2: 1, 3: 1} and dict(report.done) == {1: 1}
    assert not rank.cache[4:6].any(), "old KV is in the blocks"
    late = rank.step(saves=[rank.job(4, [3], [6, 7])])
    assert dict(late.failed) == {4: 1} and not late.replacements, (
        "planned before the scheduler knew"
    )
    rank.step(saves=[rank.job(5, [3], [6, 7])], seen=1)
    rank.streams.run()
    assert dict(rank.step(seen=9).done) == {5: 1}


def test_what_new_weights_computed_is_not_saved_under_the_old_ones_keys(rank):
    rank.model.other = True
    report = rank.step(saves=[rank.job(1, [0], [1, 2])], forward=rank.fill(1, 3))
    rank.streams.run()
    assert dict(report.failed) == {1: 1} and report.replacements == {0: 1}
    assert not dict(rank.step().done)


def test_a_load_that_begins_inside_a_chunk_takes_the_next_one_from_its_beginning():
    rank = Rank(held=False)
    for block, value in enumerate((11, 12, 21, 22), start=1):
        rank.cache[block] = value
    rank.step(saves=[rank.job(1, [0, 1], [1, 2, 3, 4])])
    rank.step([Job(2, rank.address, [Move(0, [0, 1], [5, 6, 7], 1)])])
    assert [int(rank.cache[block][0]) for block in (5, 6, 7)] == [12, 21, 22]
    rank.half.close()
    rank.pool.close()


def test_every_rank_s_word_on_a_job_counts():
    one = StepReport(done=Counter({1: 1, 2: 1}), failed=Counter({3: 1}))
    one.replacements[0] = 1
    other = StepReport(
        done=Counter({1: 1}), failed=Counter({2: 1, 3: 1}), replacements=Counter({0: 2, 1: 1})
    )
    merged = one.aggregate(other)
    assert (merged.done, merged.failed) == (Counter({1: 2, 2: 1}), Counter({2: 1, 3: 2}))
    assert merged.replacements == {0: 2, 1: 1}


def test_a_worker_tells_what_its_model_resolved_to(rank):
    told = rank.half.layout()
    assert told is not None
    assert (told.model, told.weights) == ({}, None)
    assert told.description["backends"] == ["test"]


def test_a_save_that_failed_on_the_device_spoils_no_other(rank):
    rank.step(saves=[rank.job(1, [0], [1, 2])])
    rank.streams.all[2].error = RuntimeError("CUDA error: injected")  # the stream of DMAs to slots
    rank.streams.run()
    rank.mend()
    rank.step(saves=[rank.job(2, [1], [2, 3])], forward=rank.fill(2, 8))
    rank.streams.run()
    report = rank.step()
    assert dict(report.failed) | dict(report.done) == {2: 1}
    assert rank.held(1) == {8}


def test_a_pool_stays_mapped_and_locked_while_copies_are_under_way(rank):
    driver, lane = Driver(), ManualLane()
    rank.half._pools._pinning = Pinning(None, runtime=driver, lane=lane, capturing=lambda: False)
    rank.step(saves=[rank.job(1, [0], [2, 3])], forward=rank.fill(2, 7))
    lane.run()
    gone, rank.address = rank.address, None
    rank.step()
    assert set(rank.half._pools.mapped) == {gone}
    assert driver.held
    rank.streams.run()
    assert dict(rank.step().done) == {1: 1}
    rank.step()
    assert not rank.half._pools.mapped
    assert not driver.held
    assert rank.held(0) == {7}
    other = Pool(4, SLOT)
    rank.address = replace(gone, path=other.path)
    rank.step()
    assert set(rank.half._pools.mapped) == {rank.address}, "before it has a job there"
    other.close()


def test_a_pool_that_cannot_be_mapped_is_told_in_the_first_step():
    rank = Rank(held=False)
    gone, rank.address = rank.address, replace(rank.address, path="/proc/1/fd/99999")
    first = rank.step([rank.job(1, [0], [2, 3])])
    assert "cannot map the shared pool /proc/1/fd/99999" in first.unmapped
    assert rank.failed == {"r1"}
    rank.address = gone
    assert not rank.step().unmapped
    server = replace(rank.address, path="/proc/1/fd/99999", witness_path="/proc/1/fd/99998")
    rank.address = server
    assert not rank.step().unmapped, "a server may come back"
    rank.half.close()


def test_a_rank_locks_its_own_part_of_the_pool(rank):
    begun = list[Any]()
    rank.half._pools._pinning = pinning = create_autospec(Pinning, instance=True)
    pinning.begin.side_effect = lambda *given, is_lent: begun.append((*given[1:], is_lent))
    rank.address = replace(rank.address, slot_bytes=2 * SLOT, slots=2, parts=(((SLOT, True),),))
    rank.step()
    assert begun == [(2 * SLOT, (SLOT, 2 * SLOT), False)]


def test_slots_that_a_server_took_new_memory_for_are_locked_anew_before_they_are_copied(
    rank, tmp_path
):
    driver, lane, locked = Driver(), ManualLane(), list[bool]()
    rank.half._pools._pinning = pinning = Pinning(
        None, runtime=driver, lane=lane, capturing=lambda: False, rest=lambda _: None
    )
    witness = tmp_path / "witness"
    witness.touch()
    inode = os.stat(rank.pool.path).st_ino
    rank.address = replace(rank.address, witness_path=str(witness), inode=inode)
    rank.step()
    mapped = rank.half._pools.mapped[rank.address]
    pinning.cuts(mapped.part(1, 0))
    lane.run()
    assert pinning.cuts(mapped.part(1, 0)) == ()
    assert sum(driver.held.values()) == 3 * SLOT, "nothing before what a copy needs"

    rank.half._paged = [
        PagedBlocks(
            regions_of({"layer.0": rank.cache}, BLOCKS),
            PER_CHUNK,
            locked=lambda part: locked.append(pinning.cuts(part) is not None),
            streams=rank.streams,
        )
    ]
    rank.step(saves=[rank.job(1, [1], [2, 3])], renewed={rank.address: [1]})
    assert locked == [False], "it goes through the buffer, since the device has the old pages"
    rank.streams.run()
    lane.run()
    rank.step(saves=[rank.job(2, [1], [2, 3])])
    assert locked == [False, True]


def test_a_servers_pool_is_mapped_early_once_and_may_be_away(rank, monkeypatch):
    tried, join = list[str](), SharedPool.join

    def noted(path, *given):
        tried.append(path)
        return join(path, *given)

    monkeypatch.setattr(SharedPool, "join", noted)
    rank.half._pools._pinning = Pinning(
        None, runtime=Driver(), lane=ManualLane(), capturing=lambda: False
    )
    sound, away = rank.address, "/proc/1/fd/99999"
    rank.address = replace(rank.address, path=away, witness_path="/proc/1/fd/99998")
    assert not rank.step().unmapped
    assert not rank.step().unmapped
    assert tried == [away], "each step would be late otherwise"
    rank.step([rank.job(1, [0], [2, 3])])
    assert (rank.ended, rank.failed) == ({"r1"}, {"r1"})
    rank.address = sound
    rank.step()
    assert set(rank.half._pools.mapped) == {sound}


def test_the_pool_of_a_restarted_server_is_mapped_anew_though_it_lies_where_the_last_one_did():
    """No step may have come in between. What a worker copied from the pool of before would be the
    KV of other tokens."""
    rank = Rank(held=False, clock=time.perf_counter)
    jobs = Jobs(rank.address.parts, time.monotonic)
    server, restarted = Pool(4, SLOT), Pool(4, SLOT)
    for value, region in enumerate((server, restarted), 1):
        region.view(0)[:] = bytes([value]) * SLOT
    _, witness = os.pipe()
    before = SharedPool(4, SLOT, os.dup(server.fd), os.dup(witness))
    rank.address = old = jobs.address(before)
    rank.step([rank.job(1, [0], [2, 3])])
    places = [int(Path(path).name) for path in (old.path, str(old.witness_path))]
    before.close()
    fds = [os.dup2(fd, at) for fd, at in zip((restarted.fd, witness), places, strict=True)]
    after = SharedPool(4, SLOT, *fds)
    rank.address = new = jobs.address(after)
    assert (new.path, new.witness_path) == (old.path, old.witness_path)
    rank.step([rank.job(2, [0], [4, 5])])
    assert (set(rank.cache[2].tolist()), set(rank.cache[4].tolist())) == ({1}, {2})
    rank.address = old
    rank.step([rank.job(3, [0], [6, 7])])
    assert rank.failed == {"r3"}, "a job of before finds another pool there"
    rank.half.close()
    after.close()


@pytest.mark.parametrize("kind", ["xpu", "meta"])
def test_a_device_that_is_neither_cpu_nor_cuda_is_refused_by_name(kind):
    cache = torch.zeros(BLOCKS, ROW, dtype=torch.uint8, device="meta")
    if kind == "xpu":  # there is none here: tensors of the kind cannot be made
        with pytest.MonkeyPatch.context() as patched:
            region = SimpleNamespace(
                rows=SimpleNamespace(shape=(BLOCKS, ROW), device=torch.device("xpu", 0))
            )
            region.rows.is_cuda = False
            patched.setattr(
                "kvtier.connectors.vllm.worker_side.worker.regions_of", lambda *_: [region]
            )
            with pytest.raises(LayoutError, match=r"lies on xpu:0.*CPUs and of CUDA devices"):
                WorkerHalf(0, [_layers()], {"layer.0": cache}, StillModel())
        return
    with pytest.raises(LayoutError, match="lies on meta"):
        WorkerHalf(0, [_layers()], {"layer.0": cache}, StillModel())


def test_closing_waits_for_copies_under_way(rank):
    rank.step(saves=[rank.job(1, [0], [2, 3])], forward=rank.fill(2, 7))
    rank.half.close()
    assert not rank.half._pools.mapped
    assert rank.held(0) == {7}


def output(request=None, blocks=None):
    """vLLM's plan of a step: all of a new request, or nothing."""
    if request is None:
        return planned()
    name = request.request_id
    new = SimpleNamespace(req_id=name, block_ids=[blocks], num_computed_tokens=0)
    return planned([new], {name: request.num_tokens})


LAYOUT = ChunkLayout(fingerprint({"model": "t"}), CHUNK_TOKENS, BLOCK_TOKENS, (SLOT,))


def scheduling(store, clock):
    """The scheduler's half for one rank."""
    load_policy = LoadPolicy(60.0, prefill=Prefill(PrefillTime(1 / 64)), clock=clock)
    geometry = Geometry((Group(0, Kind.FULL, BLOCK_TOKENS),), CHUNK_TOKENS)
    return scheduler_half(store, LAYOUT, geometry, (((0, True),),), load_policy)


def test_an_engine_that_nobody_asks_takes_one_step_that_begins_to_lock_its_pool(rank):
    """vLLM calls it when its graphs are captured. If one were captured then, locking would wait."""
    driver, lane, capturing = Driver(), ManualLane(), [True]
    rank.half._pools._pinning = Pinning(
        None, runtime=driver, lane=lane, capturing=lambda: capturing[0]
    )
    scheduler = scheduling(Store(rank.pool, []), Clock(100.0))
    assert scheduler.expects_reports(), "the workers do not know the pool yet"
    scheduler.report(rank.planned(scheduler.step(output())))
    assert not scheduler.expects_reports()
    lane.run()
    assert not driver.held
    capturing[0] = False
    scheduler.report(rank.planned(scheduler.step(output())))
    lane.run()
    assert sum(driver.held.values()) == 4 * SLOT


def test_no_step_is_taken_for_a_pool_that_is_not_there_and_one_for_each_that_comes(rank):
    store: Any = Store(rank.pool, [])
    scheduler = scheduling(store, Clock(100.0))
    store.pool = None
    assert not scheduler.expects_reports(), "the server is away"
    for pool in (rank.pool, Pool(4, SLOT)):
        store.pool = pool
        assert scheduler.expects_reports()
        assert scheduler.step(output()).pool.path == pool.path
        assert not scheduler.expects_reports()
    pool.close()


@pytest.mark.parametrize("through", [True, False])
def test_an_idle_engine_takes_steps_until_its_chunks_are_ready_and_not_for_ever(rank, through):
    clock = Clock(100.0)
    store = Store(rank.pool, [], clock=clock)
    scheduler = scheduling(store, clock)
    request, keys = vllm_request(range(CHUNK_TOKENS + 1)), LAYOUT.keys([*range(CHUNK_TOKENS)])
    assert scheduler.matched(request, 0) == (0, False)

    scheduler.report(rank.planned(scheduler.step(output(request, [4, 5, 6])), rank.fill(4, 6)))
    scheduler.finished(request)
    assert scheduler.expects_reports()
    assert store.lookup(keys).ready == 0
    if through:
        rank.streams.run()
        scheduler.report(rank.planned(scheduler.step(output())))
        assert store.lookup(keys).ready == 1
        store.check(idle=True)
    else:
        clock.now += 60
        scheduler.report(rank.planned(scheduler.step(output())))
        assert store.lookup(keys).ready == 0
    assert not scheduler.expects_reports()


def test_a_step_computes_while_saves_of_blocks_that_stay_are_read_and_none_that_may_write_them(
    rank,
):
    def step(number, value, saves=(), **says):
        metadata = StepMetadata(rank.address, number, computes=True, saves=list(saves), **says)
        rank.planned(metadata, rank.fill(2, value))

    job = replace(rank.job(1, [0], [2, 3]), request_id=None)
    step(1, 7, [job], reads_on=True)
    rank.streams.run(rank.streams.engine)
    step(2, 8, may_reuse=False)
    rank.streams.run(rank.streams.engine)
    assert bool((rank.cache[2:4] == 8).all()), "the second step waits"
    rank.streams.run()

    for number, reads_on, may_reuse in ((3, True, True), (5, False, False)):
        step(number, number, [replace(job, number=number)], reads_on=reads_on)
        step(number + 1, number + 1, may_reuse=may_reuse)
        rank.streams.run(rank.streams.engine)
        assert bool((rank.cache[2:4] == number).all()), f"step {number + 1} does not wait"
        rank.streams.run()
        assert rank.held(0) == {number}
        assert bool((rank.cache[2:4] == number + 1).all())


@pytest.mark.parametrize("is_opened", [True, False])
def test_what_ended_requests_had_left_is_read_before_the_step_writes(rank, is_opened):
    """With the hook that vLLM calls first from 0.32 on, and without it."""
    rank.streams.do(rank.streams.engine, rank.fill(2, 7))
    job = replace(rank.job(1, [0], [2, 3]), request_id=None)
    step = StepMetadata(rank.address, 1, computes=True, may_reuse=False, ended_saves=[job])
    if is_opened:
        rank.half.open(step)
    rank.planned(step, rank.fill(2, 9))
    rank.streams.run(rank.streams.engine)
    rank.streams.run()
    assert (rank.held(0), bool((rank.cache[2:4] == 9).all())) == ({7}, True)
    assert dict(rank.planned(StepMetadata(rank.address, 2)).done) == {1: 1}
