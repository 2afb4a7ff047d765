"""Staged copies on streams that hold their work back: who waits for whom, and what is done when."""

import random
from contextlib import nullcontext
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from kvtier.gpu import Copy, PagedBlocks, regions_of
from kvtier.gpu.staged import StagedCopier
from kvtier.gpu.staging import CudaStreams
from tests.unit.paged_streams import Held

BLOCKS, PER_CHUNK, LAYERS, ROW = 9, 3, 2, 8
CHUNK = PER_CHUNK * LAYERS * ROW
Model = dict[int, int]


class Machine:
    """An engine of a few blocks that hold one value each, its streams, and slots. ``locked``: slots
    are page-locked."""

    def __init__(self, *, room=1 << 20, locked=True, dice=None):
        self.streams = Held(room, dice)
        self.caches = [torch.zeros(BLOCKS, ROW, dtype=torch.uint8) for _ in range(LAYERS)]
        regions = regions_of(
            {f"layer.{index}": cache for index, cache in enumerate(self.caches)}, BLOCKS
        )
        self.paged = PagedBlocks(
            regions, PER_CHUNK, locked=lambda _: () if locked else None, streams=self.streams
        )
        self.streams.run()

    @property
    def copier(self):
        assert isinstance(self.paged._copier, StagedCopier)
        return self.paged._copier

    def write(self, values):
        """Queue the forward pass's writes of whole blocks."""

        def forward():
            for block, value in values.items():
                for cache in self.caches:
                    cache[block] = value

        self.streams.do(self.streams.engine, forward)

    def read(self, blocks, into):
        """Queue the forward pass's look at blocks."""
        self.streams.do(self.streams.engine, lambda: into.append(self.blocks(blocks)))

    def blocks(self, blocks):
        """What they hold now. -1 where a block is torn."""
        return [value_of(torch.stack([cache[block] for cache in self.caches])) for block in blocks]

    def save(self, part, blocks):
        """The engine may overwrite the blocks afterwards."""
        copy = self.paged.save([(part, 0, blocks)])
        self.paged.settle()
        return copy

    def load(self, part, blocks, first=0):
        return self.paged.load([(part, first, blocks)])


def value_of(values):
    first = int(values.flatten()[0])
    return first if bool((values == first).all()) else -1


def slot(values=None):
    part = torch.zeros(CHUNK, dtype=torch.uint8)
    if values is not None:
        part.view(LAYERS, PER_CHUNK, ROW)[:] = torch.tensor(values, dtype=torch.uint8).view(
            1, PER_CHUNK, 1
        )
    return part


def held(part):
    rows = part.view(LAYERS, PER_CHUNK, ROW)
    return [value_of(rows[:, index]) for index in range(PER_CHUNK)]


def test_a_save_returns_before_anything_ran_and_is_done_after_its_dma():
    machine, part = Machine(), slot()
    before = machine.streams.turns
    machine.write({0: 1, 1: 2, 2: 3})
    copy = machine.save(part, [0, 1, 2])

    assert machine.streams.turns == before, "the host waited for the device"
    machine.streams.run(machine.streams.engine, machine.copier._gathering)
    assert not copy.done()
    assert held(part) == [0, 0, 0]
    machine.streams.run()
    assert copy.done()
    assert held(part) == [1, 2, 3]


def test_the_engine_overwrites_saved_blocks_after_the_gather_and_before_the_dma():
    machine, part = Machine(), slot()
    machine.write({0: 1, 1: 1, 2: 1})
    copy = machine.save(part, [0, 1, 2])
    machine.write({0: 9, 1: 9, 2: 9})

    machine.streams.run(machine.streams.engine)
    assert machine.blocks([0, 1, 2]) == [1, 1, 1], "before the gather has read them"
    machine.streams.run(machine.streams.engine, machine.copier._gathering)
    assert machine.blocks([0, 1, 2]) == [9, 9, 9], "the engine waits for the DMA"
    machine.streams.run()
    assert copy.done()
    assert held(part) == [1, 1, 1]


@pytest.mark.parametrize(
    ("room", "goes_on"), [(6 * CHUNK, True), (4 * CHUNK, False), (CHUNK, False)]
)
def test_the_engine_waits_for_a_dma_only_when_staging_memory_is_full(room, goes_on):
    machine, parts = Machine(room=room), [slot() for _ in range(3)]
    machine.write({block: block + 1 for block in range(BLOCKS)})
    copy = machine.paged.save(
        [(part, 0, range(3 * at, 3 * at + 3)) for at, part in enumerate(parts)]
    )
    machine.paged.settle()
    machine.write(dict.fromkeys(range(BLOCKS), 99))

    machine.streams.run(machine.streams.engine, machine.copier._gathering)
    assert (machine.blocks([0]) == [99]) is goes_on
    machine.streams.run()
    assert copy.done()
    assert [held(part) for part in parts] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_launch_takes_no_place_that_is_in_use():
    machine = Machine(room=6 * CHUNK)  # three places each way, two a launch
    machine.write({block: block + 1 for block in range(BLOCKS)})
    parts, ids = [slot() for _ in range(4)], [[0, 1, 2], [3, 4, 5], [6, 7, 8], [1, 3, 5]]
    machine.paged.save([(part, 0, blocks) for part, blocks in zip(parts, ids, strict=True)])
    machine.streams.run(machine.streams.engine, machine.copier._gathering)
    machine.streams.run()
    assert [held(part) for part in parts] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 4, 6]]

    machine.paged.load([(part, 0, [2 * at, 2 * at + 1]) for at, part in enumerate(parts)])
    machine.streams.run(machine.copier._coming)
    machine.streams.run()
    assert machine.blocks(range(8)) == [1, 2, 4, 5, 7, 8, 2, 4]


def test_an_engine_whose_blocks_stay_as_they_are_waits_for_no_dma_until_they_may_change():
    machine, parts = Machine(room=CHUNK), [slot(), slot()]
    machine.write({block: block + 1 for block in range(6)})
    copies = [
        machine.paged.save([(part, 0, range(3 * at, 3 * at + 3))]) for at, part in enumerate(parts)
    ]
    machine.write({6: 7, 7: 8, 8: 9})
    machine.streams.run(machine.streams.engine, machine.copier._gathering)
    assert machine.blocks([6, 7, 8]) == [7, 8, 9], "the next step waits for a DMA"

    machine.paged.settle()
    machine.write(dict.fromkeys(range(BLOCKS), 99))
    machine.streams.run(machine.streams.engine, machine.copier._gathering)
    assert machine.blocks([0, 3]) == [1, 4], "they are not read yet"
    machine.streams.run()
    assert all(copy.done() for copy in copies)
    assert [held(part) for part in parts] == [[1, 2, 3], [4, 5, 6]]
    assert machine.blocks([0, 3]) == [99, 99]


def test_neither_the_forward_pass_nor_the_host_waits_for_a_load():
    machine, seen = Machine(), list[list[int]]()
    before = machine.streams.turns
    copy = machine.load(slot([4, 5, 6]), [8, 0, 3])
    machine.read([1, 2], seen)

    assert machine.streams.turns == before
    assert not copy.done()
    machine.streams.run(machine.streams.engine)
    assert seen == [[0, 0]]
    assert not copy.done()
    machine.streams.run()
    assert copy.done()
    assert machine.blocks([8, 0, 3]) == [4, 5, 6]


def test_a_loads_dma_runs_ahead_but_no_block_changes_while_the_engine_still_reads_it():
    machine, seen = Machine(), list[list[int]]()
    machine.write({0: 1, 1: 1, 2: 1})
    machine.read([0, 1, 2], seen)
    machine.load(slot([7, 7, 7]), [0, 1, 2])

    machine.streams.run(machine.copier._coming, machine.copier._scattering)
    assert not machine.copier._coming.queue, "the DMA waits for the forward pass before"
    assert machine.blocks([0, 1, 2]) == [0, 0, 0]
    machine.streams.run()
    assert seen == [[1, 1, 1]]
    assert machine.blocks([0, 1, 2]) == [7, 7, 7]


def test_a_load_tells_how_long_the_device_took_for_it():
    machine = Machine()
    copy = machine.load(slot([1, 2, 3]), [0, 1, 2])
    assert not copy.seconds
    machine.streams.run()
    assert copy.done()
    assert copy.seconds


def test_an_unlocked_slot_is_written_by_the_host_once_the_dma_into_a_buffer_is_through():
    machine, part = Machine(locked=False), slot()
    machine.write({0: 1, 1: 2, 2: 3})
    copy = machine.save(part, [0, 1, 2])

    machine.streams.run()
    assert held(part) == [0, 0, 0], "a device cannot reach it by itself"
    assert copy.done()
    assert held(part) == [1, 2, 3]


def test_two_buffers_serve_any_number_of_unlocked_slots():
    machine, parts = Machine(locked=False), [slot() for _ in range(6)]
    machine.write({block: block + 1 for block in range(BLOCKS)})
    copy = machine.paged.save([(part, 0, range(at, at + 3)) for at, part in enumerate(parts)])
    machine.write(dict.fromkeys(range(BLOCKS), 0))
    copy.wait()
    assert [held(part) for part in parts] == [[at + 1, at + 2, at + 3] for at in range(6)]

    machine.paged.load(
        [(parts[5], 0, [0, 1, 2]), (parts[2], 0, [3, 4, 5]), (parts[3], 1, [7, 6])]
    ).wait()
    assert machine.blocks(range(8)) == [6, 7, 8, 3, 4, 5, 6, 5]
    assert machine.streams.host_buffers == 2


def test_buffers_are_not_written_while_their_memory_may_still_be_used_by_the_engine():
    streams, seen = Held(), list[str]()
    streams.do(streams.engine, lambda: seen.append("what had the memory before"))
    regions = regions_of({"layer": torch.zeros(BLOCKS, ROW * LAYERS, dtype=torch.uint8)}, BLOCKS)
    paged = PagedBlocks(regions, PER_CHUNK, locked=lambda _: (), streams=streams)
    paged.load([(slot(), 0, [0, 1, 2])])

    streams.run(*(stream for stream in streams.all if stream is not streams.engine))
    assert all(stream.queue for stream in streams.all)
    streams.run()
    assert seen
    assert not any(stream.queue for stream in streams.all)


def test_locked_slots_need_no_buffer_at_all():
    machine = Machine()
    machine.save(slot(), [0, 1, 2]).wait()
    machine.load(slot(), [0, 1, 2]).wait()
    assert machine.streams.host_buffers == 0


def fail_at(machine, call):
    """The ``call``-th thing queued is refused."""
    do, calls = machine.streams.do, [0]

    def refusing(stream, work):
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("CUDA error: injected")
        do(stream, work)

    machine.streams.do = refusing


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(
    ("room", "call"), [*((2 * CHUNK, call) for call in range(1, 13)), (1 << 20, 1), (1 << 20, 2)]
)
@pytest.mark.parametrize("way", ["save", "load"])
def test_a_call_that_fails_half_way_leaves_nothing_under_way(way, room, call, locked):
    machine, parts = Machine(room=room, locked=locked), [slot([1, 2, 3]) for _ in range(3)]
    jobs = [(part, 0, [3 * at, 3 * at + 1, 3 * at + 2]) for at, part in enumerate(parts)]
    earlier, waiting = slot(), machine.streams
    machine.write({0: 5, 1: 5, 2: 5})
    copy = machine.save(earlier, [0, 1, 2])
    fail_at(machine, call)

    with pytest.raises(RuntimeError, match="injected"):
        getattr(machine.paged, way)(jobs)

    for part in parts:
        part.fill_(77)  # the slots are others' now
    blocks = machine.blocks(range(BLOCKS))
    waiting.run()
    assert all(not stream.queue for stream in waiting.all)
    assert machine.blocks(range(BLOCKS)) == blocks
    assert copy.done()
    assert held(earlier) == [5, 5, 5], "a copy from before is not harmed"
    later = [slot(), slot(), slot()]
    machine.paged.save([(part, 0, [0, 1, 2]) for part in later]).wait()
    assert [held(part) for part in later] == [machine.blocks([0, 1, 2])] * 3
    assert [held(part) for part in parts] == [[77] * 3] * 3


@pytest.mark.parametrize("locked", [True, False])
def test_a_copy_that_failed_on_the_device_is_never_done(locked):
    machine = Machine(locked=locked)

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    machine.streams.do(machine.streams.engine, broken)
    copies = [machine.save(slot(), [0, 1, 2]), machine.load(slot(), [0, 1, 2])]
    machine.streams.run()
    for copy in copies:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            copy.done()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            copy.wait()


class Walk:
    """A random run of an engine against a plain model, over streams that go on in a random order.
    Some saves go on reading until their blocks are to change."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        room, locked = (
            self.dice.choice([CHUNK, 2 * CHUNK, 4 * CHUNK, 7 * CHUNK, 1 << 20]),
            self.dice.random() < 0.7,
        )
        self.machine = Machine(room=room, locked=locked, dice=self.dice)
        self.blocks: Model = dict.fromkeys(range(BLOCKS), 0)
        self.slots = [slot() for _ in range(4)]
        self.holds: list[list[int] | None] = [None] * len(self.slots)
        self.saves: dict[int, tuple[Copy, list[int]]] = {}
        self.loads: dict[int, tuple[Copy, Model]] = {}
        self.seen, self.expected = list[list[int]](), list[list[int]]()
        self.reading: set[int] = set()
        """Blocks for whose readers the engine does not wait yet."""
        self.value = 0

    def step(self):
        self.dice.choice([self.write, self.save, self.load, self.read])()
        for _ in range(self.dice.randrange(8)):
            self.machine.streams.turn()
        self.settle()

    def usable(self):
        """Blocks that no load is under way to: the engine uses no others."""
        loading = {block for _, fresh in self.loads.values() for block in fresh}
        return [block for block in range(BLOCKS) if block not in loading]

    def sample(self, count):
        usable = self.usable()
        return self.dice.sample(usable, count) if len(usable) >= count else []

    def write(self):
        self.value = self.value % 250 + 1
        fresh = dict.fromkeys(self.sample(2), self.value)
        self.blocks |= fresh
        self.reuse(fresh)
        self.machine.write(fresh)

    def read(self):
        usable = self.usable()
        self.expected.append([self.blocks[block] for block in usable])
        self.machine.read(usable, self.seen)

    def save(self):
        free = [index for index in range(len(self.slots)) if index not in self.saves | self.loads]
        blocks = self.sample(PER_CHUNK)
        if free and blocks:
            index = self.dice.choice(free)
            self.holds[index] = None
            wanted = [self.blocks[block] for block in blocks]
            copy = self.machine.paged.save([(self.slots[index], 0, blocks)])
            self.saves[index] = copy, wanted
            self.reading.update(blocks)
            if self.dice.random() < 0.5:
                self.reuse(self.reading)

    def reuse(self, blocks):
        """These are to be overwritten."""
        if not self.reading.isdisjoint(blocks):
            self.machine.paged.settle()
            self.reading.clear()

    def load(self):
        whole = [
            index
            for index, values in enumerate(self.holds)
            if values is not None and index not in self.loads
        ]
        if whole:
            index, first = self.dice.choice(whole), self.dice.randrange(PER_CHUNK)
            values = self.holds[index]
            assert values is not None
            blocks = self.sample(PER_CHUNK - first)
            if blocks:
                fresh = dict(zip(blocks, values[first:], strict=True))
                self.reuse(fresh)
                self.loads[index] = self.machine.load(self.slots[index], blocks, first), fresh

    def settle(self):
        for index, (copy, wanted) in list(self.saves.items()):
            if copy.done():
                assert held(self.slots[index]) == wanted
                self.holds[index] = wanted
                del self.saves[index]
        for index, (load, fresh) in list(self.loads.items()):
            if load.done():
                self.blocks |= fresh
                self.slots[index].fill_(255)  # others' now
                self.holds[index] = None
                del self.loads[index]

    def end(self):
        self.machine.streams.run()
        self.settle()
        self.read()
        self.machine.streams.run()
        assert not self.saves
        assert not self.loads
        assert self.seen == self.expected


@pytest.mark.parametrize("seed", range(150))
def test_no_order_that_a_device_could_choose_gives_a_wrong_byte(seed):
    walk = Walk(seed)
    for _ in range(40):
        walk.step()
    walk.end()


def test_cuda_streams_are_torchs_own(monkeypatch):
    """All that can be said of them without a device: they call what torch has, with what it
    takes."""
    stream, event = (
        create_autospec(torch.cuda.Stream, instance=True),
        create_autospec(torch.cuda.Event, instance=True),
    )
    stream.record_event.side_effect = lambda given: given
    made = create_autospec(torch.cuda.Event, return_value=event)
    welcomed = list[Any]()

    def enter(one):
        welcomed.append(one)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Event", made)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream if device.index == 1 else None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: stream if device.index == 1 else None
    )
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "set_stream", welcomed.append)
    streams = CudaStreams(torch.device("cuda", 1))

    assert streams.side() is streams.current() is stream
    assert streams.record(stream, timing=True) is event
    made.assert_called_once_with(enable_timing=True)
    with streams.apart():
        streams.do(stream, lambda: welcomed.append(torch.is_inference_mode_enabled()))
    assert welcomed == [stream, stream, True]
    assert all(hasattr(event, name) for name in ("query", "synchronize", "elapsed_time"))


@pytest.mark.parametrize(
    ("free", "room"), [(80 << 30, 512 << 20), (80 << 20, 10 << 20), (95 << 20, 10 << 20)]
)
def test_staging_takes_a_part_of_what_is_free(monkeypatch, free, room):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 96 << 30))
    assert CudaStreams(torch.device("cuda", 0)).room == room
