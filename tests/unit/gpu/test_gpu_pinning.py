"""Page-locking of a pool, against a stand-in for the driver."""

import enum
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier.core.chunk import PAGE_BYTES
from kvtier.core.pool import Pool
from kvtier.gpu import Pinning, slot_tensor
from kvtier.gpu.pinning import _PIECE_BYTES, cut_of
from kvtier.testing import ManualLane
from tests.child_process import DEADLINE_S

SLOT = 2 * 4096


class Code(enum.Enum):
    """torch's binding gives an enumeration."""

    SUCCESS = 0
    OUT_OF_MEMORY = 2


class Driver:
    """Stands for ``torch.cuda.cudart()``: remembers what is registered. Refuses from the
    ``limit``-th piece on."""

    def __init__(self, limit=math.inf):
        self.held: dict[int, int] = {}
        self.limit = limit
        self.threads: set[str] = set()

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        assert flags == 0
        self.threads.add(threading.current_thread().name)
        if len(self.held) >= self.limit:
            return Code.OUT_OF_MEMORY
        self.held[address] = size
        return Code.SUCCESS

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.held[address]
        return Code.SUCCESS


def covers(pinning, part):
    return pinning.cuts(part) is not None


def covered(pinning, pool):
    return [covers(pinning, slot_tensor(pool.view(slot))) for slot in range(pool.slots)]


def started(pool, driver, piece=5 * 4096, span=None, *, is_lent=False, **more):
    lane = ManualLane()
    given = {"capturing": lambda: False, "rest": lambda _: None} | more
    pinning = Pinning(None, runtime=driver, lane=lane, piece_bytes=piece, **given)
    pinning.begin(pool.buffer, pool.slot_bytes, *([span] if span else []), is_lent=is_lent)
    return pinning, lane


def test_a_region_is_locked_piece_by_piece_and_pieces_end_between_slots():
    pool, driver = Pool(5, SLOT), Driver()
    base = slot_tensor(pool.buffer).data_ptr()
    pinning, lane = started(pool, driver)

    assert covered(pinning, pool) == [False] * 5, "nothing is locked on the caller's time"
    lane.turn()
    assert covered(pinning, pool) == [True, True, False, False, False]
    lane.run()
    assert covered(pinning, pool) == [True] * 5
    assert driver.held == {
        base + start * SLOT: size * SLOT for start, size in ((0, 2), (2, 2), (4, 1))
    }
    pinning.end(pool.buffer)
    assert not driver.held
    assert covered(pinning, pool) == [False] * 5
    pool.close()


def test_a_slot_larger_than_a_piece_is_locked_in_several_and_no_dma_crosses_two():
    pool, driver = Pool(2, 5 * PAGE_BYTES), Driver()
    pinning, lane = started(pool, driver, piece=2 * PAGE_BYTES + 7)
    for _ in range(5):
        lane.turn()
    second = slot_tensor(pool.view(1))
    assert not covers(pinning, second)
    assert pinning.cuts(second[PAGE_BYTES : 4 * PAGE_BYTES]) == (PAGE_BYTES,)
    lane.run()
    assert [size // PAGE_BYTES for size in driver.held.values()] == [2, 2, 1, 2, 2, 1]
    assert pinning.cuts(second) == (2 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert pinning.cuts(second[2 * PAGE_BYTES : 4 * PAGE_BYTES]) == ()


def test_no_call_locks_more_than_64_mib():
    cuts = [cut_of(size << 20, (0, size << 20), _PIECE_BYTES) for size in (7, 64, 80, 200)]
    assert [cut.piece >> 20 for cut in cuts] == [63, 64, 64, 64]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("span", "locked"),
    [
        ((0, 8 * MIB), [(0, 8 * MIB), (8 * MIB, 8 * MIB)]),
        ((2 * MIB + 5, 4 * MIB + 7), [(2 * MIB, 2 * MIB + 4096), (10 * MIB, 2 * MIB + 4096)]),
        ((4 * MIB, 8 * MIB), [(4 * MIB, 4 * MIB), (12 * MIB, 4 * MIB)]),
        ((3 * MIB, 8 * MIB), [(0, 8 * MIB), (8 * MIB, 8 * MIB)]),
        ((5000, 9000), [(0, 8 * MIB), (8 * MIB, 8 * MIB)]),
    ],
    ids=[
        "the whole slot",
        "whole pages of its part",
        "half of the slot",
        "more than half",
        "a small part",
    ],
)
def test_a_rank_locks_its_own_part_of_each_slot_unless_it_is_small_or_most_of_it(span, locked):
    pool, driver = Pool(2, 8 * MIB), Driver()
    base = slot_tensor(pool.buffer).data_ptr()
    pinning, lane = started(pool, driver, 8 * MIB, span)
    for slot in range(2):
        assert not covers(pinning, slot_tensor(pool.view(slot)[slice(*span)]))
        lane.turn()
        assert pinning.cuts(slot_tensor(pool.view(slot)[slice(*span)])) == ()
    lane.run()
    assert [(address - base, size) for address, size in driver.held.items()] == locked
    assert covers(pinning, slot_tensor(pool.view(1))) is (locked[0][1] == 8 * MIB), (
        "others' parts are not locked"
    )
    pinning.end(pool.buffer)
    assert not driver.held


def test_the_lane_rests_between_pieces_as_long_as_the_driver_took():
    rests: list[tuple[float, int]] = []
    lane: Any
    _, lane = started(
        Pool(3, SLOT), SlowDriver(), SLOT, rest=lambda seconds: rests.append((seconds, len(lane)))
    )
    lane.run()
    assert len(rests) == 2, "nothing rests after the last"
    assert all(0.09 <= seconds < 10 and queued == 0 for seconds, queued in rests)


def test_nothing_is_locked_while_a_graph_is_captured():
    pool, driver, capturing = Pool(3, SLOT), Driver(), [False]
    pinning, lane = started(pool, driver, SLOT, capturing=lambda: capturing[0])
    lane.turn()
    capturing[0] = True
    pinning.look()
    lane.run()
    pinning.look()
    lane.run()
    assert covered(pinning, pool) == [True, False, False]
    capturing[0] = False
    pinning.look()
    pinning.look()
    lane.run()
    assert covered(pinning, pool) == [True, True, True]
    assert len(driver.held) == 3


class SlowDriver(Driver):
    """A driver that takes its time."""

    def __init__(self):
        super().__init__()
        self.entered = threading.Event()

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.entered.set()
        threading.Event().wait(0.1)
        return super().cudaHostRegister(address, size, flags)


def test_holding_waits_for_the_piece_that_is_being_locked():
    pool, driver = Pool(3, SLOT), SlowDriver()
    pinning = Pinning(None, runtime=driver, piece_bytes=SLOT)
    pinning.begin(pool.buffer, SLOT)
    assert driver.entered.wait(DEADLINE_S)
    pinning.hold()
    locked = len(driver.held)
    assert locked >= 1
    pinning.close()
    assert len(driver.held) == locked
    pinning.end(pool.buffer)


def test_only_whole_slots_of_the_region_are_covered():
    pool = Pool(4, SLOT)
    pinning, lane = started(pool, Driver(), piece=2 * SLOT)
    lane.turn()
    memory = slot_tensor(pool.buffer)
    assert pinning.cuts(memory[SLOT + 7 : 2 * SLOT]) == ()
    assert not covers(pinning, memory[SLOT : 2 * SLOT + 1])
    assert not covers(pinning, torch.zeros(4, dtype=torch.uint8))


def test_a_refusal_keeps_what_is_locked_and_is_logged_once(caplog):
    pool, driver = Pool(6, SLOT), Driver(limit=1)
    with caplog.at_level(logging.WARNING):
        pinning, lane = started(pool, driver, piece=2 * SLOT)
        lane.run()

    assert covered(pinning, pool) == [True, True, False, False, False, False]
    (record,) = caplog.records
    assert (
        "refused 16384 bytes (error 2) after 1 pieces of up to 16384 in a mapping of 49152"
        in record.message
    )
    pinning.end(pool.buffer)
    assert not driver.held


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_ending_while_pieces_are_still_to_come_leaves_nothing_locked(turns):
    pool, driver = Pool(6, SLOT), Driver()
    pinning, lane = started(pool, driver, piece=2 * SLOT)
    for _ in range(turns):
        lane.turn()
    pinning.end(pool.buffer)
    assert not driver.held
    lane.run()
    assert not driver.held


def test_an_end_waits_for_the_piece_that_is_being_locked():
    pool, driver = Pool(2, SLOT), SlowDriver()
    pinning = Pinning(None, runtime=driver, piece_bytes=SLOT)
    pinning.begin(pool.buffer, SLOT)
    assert driver.entered.wait(DEADLINE_S)
    pinning.end(pool.buffer)
    pinning.close()
    assert not driver.held
    assert driver.threads == {"kvtier-pinning-0"}, "off the caller's thread"


def test_two_regions_are_told_apart():
    first, second, driver = Pool(2, SLOT), Pool(2, SLOT), Driver()
    pinning, lane = started(first, driver, piece=2 * SLOT)
    pinning.begin(second.buffer, SLOT)
    lane.run()
    assert covered(pinning, first) == [True, True]
    pinning.end(first.buffer)
    assert covered(pinning, second) == [True, True]
    assert covered(pinning, first) == [False, False]
    pinning.end(first.buffer)


def test_a_lane_that_refuses_leaves_slots_unlocked(caplog):
    pool, lane = Pool(2, SLOT), ManualLane()
    lane.close(0)
    pinning = Pinning(None, runtime=Driver(), lane=lane)
    with caplog.at_level(logging.WARNING):
        pinning.begin(pool.buffer, SLOT)
    assert covered(pinning, pool) == [False, False]
    assert "of 16384 bytes stopped after 0 pieces" in caplog.text


def test_locking_holds_no_view_of_the_region():
    """A view that is still held would keep a server's pool mapped after it was let go."""
    pool, driver = Pool(2, SLOT), Driver()
    pinning, lane = started(pool, driver)
    lane.run()
    pinning.end(pool.buffer)
    pool.buffer.release()  # raises BufferError while anything still looks at it


@pytest.fixture
def two_ahead(monkeypatch):
    monkeypatch.setattr("kvtier.gpu.pinning._AHEAD_BYTES", 2 * SLOT)


@pytest.mark.usefixtures("two_ahead")
def test_of_a_lent_pool_only_what_copies_need_is_locked_and_a_little_ahead():
    pool, driver = Pool(9, SLOT), Driver()
    pinning, lane = started(pool, driver, is_lent=True)
    lane.run()
    assert not driver.held

    assert not covers(pinning, slot_tensor(pool.view(3))), "this copy goes through the buffer"
    assert not driver.held, "nothing is locked on the caller's time"
    lane.run()
    assert [covers(pinning, slot_tensor(pool.view(slot))) for slot in (3, 4, 5)] == [True] * 3
    assert sum(driver.held.values()) == 3 * SLOT
    assert not covers(pinning, slot_tensor(pool.view(8)))
    lane.run()
    assert sum(driver.held.values()) == 4 * SLOT, "no slot is behind the last one"
    pinning.end(pool.buffer)
    assert not driver.held


class Pages(Driver):
    """Remembers which pages the device has: for each piece, how often its memory was replaced
    before the piece was locked."""

    def __init__(self):
        super().__init__()
        self.replaced = 0
        self.has: dict[int, int] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        assert address not in self.held, "the driver refuses what is locked"
        self.has[address] = self.replaced
        self.meanwhile()
        return super().cudaHostRegister(address, size, flags)


@pytest.mark.usefixtures("two_ahead")
def test_a_slot_that_has_other_memory_is_locked_once_more_before_a_device_copies_it():
    pool, driver = Pool(2, SLOT), Pages()
    pinning, lane = started(pool, driver, is_lent=True)
    first, second = (slot_tensor(pool.view(slot)) for slot in range(2))
    covers(pinning, first)
    lane.run()
    assert covered(pinning, pool) == [True, True]

    driver.replaced = 1
    pinning.renew(first)
    assert covered(pinning, pool) == [False, True], "its copies go through the buffer"
    lane.run()
    assert covered(pinning, pool) == [True, True]
    assert (driver.has[first.data_ptr()], driver.has[second.data_ptr()]) == (1, 0)


@pytest.mark.usefixtures("two_ahead")
def test_memory_that_is_replaced_while_it_is_locked_is_locked_once_more():
    pool, driver = Pool(1, SLOT), Pages()
    pinning, lane = started(pool, driver, is_lent=True)
    slot = slot_tensor(pool.view(0))

    def replace():
        driver.meanwhile = lambda: None
        driver.replaced = 1
        pinning.renew(slot)

    driver.meanwhile = replace
    assert not covers(pinning, slot)
    lane.turn()
    assert not covers(pinning, slot)
    lane.run()
    assert covers(pinning, slot)
    assert driver.has[slot.data_ptr()] == 1
