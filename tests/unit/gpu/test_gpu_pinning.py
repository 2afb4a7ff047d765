"""Page-locking of a pool, against a stand-in for the driver."""

from __future__ import annotations

import enum
import logging
import math
import threading
from typing import Any

import pytest
import torch

from kvtier.core.pool import Pool
from kvtier.gpu import Pinning, slot_tensor
from kvtier.testing import ManualLane

SLOT = 2 * 4096


class Code(enum.Enum):
    """torch's binding gives an enumeration."""

    SUCCESS = 0
    OUT_OF_MEMORY = 2


class Driver:
    """Stands for ``torch.cuda.cudart()``: remembers what is registered; refuses from the ``limit``-th piece on."""

    def __init__(self, limit: float = math.inf) -> None:
        self.held: dict[int, int] = {}
        self.limit = limit
        self.threads: set[str] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Code:  # noqa: N802
        assert flags == 0
        self.threads.add(threading.current_thread().name)
        if len(self.held) >= self.limit:
            return Code.OUT_OF_MEMORY
        self.held[address] = size
        return Code.SUCCESS

    def cudaHostUnregister(self, address: int) -> Code:  # noqa: N802
        del self.held[address]
        return Code.SUCCESS


def covered(pinning: Pinning, pool: Pool) -> list[bool]:
    return [pinning.covers(slot_tensor(pool.view(slot))) for slot in range(pool.slots)]


def started(pool: Pool, driver: Any, piece: int = 5 * 4096) -> tuple[Pinning, ManualLane]:
    lane = ManualLane()
    pinning = Pinning(None, runtime=driver, lane=lane, piece_bytes=piece)
    pinning.begin(pool.buffer, pool.slot_bytes)
    return pinning, lane


def test_a_region_is_locked_piece_by_piece_and_pieces_end_between_slots() -> None:
    pool, driver = Pool(5, SLOT), Driver()
    base = slot_tensor(pool.buffer).data_ptr()
    pinning, lane = started(pool, driver)

    assert covered(pinning, pool) == [False] * 5, "nothing is locked on the caller's time"
    lane.turn()
    assert covered(pinning, pool) == [True, True, False, False, False]
    lane.run()
    assert covered(pinning, pool) == [True] * 5
    assert driver.held == {base + start * SLOT: size * SLOT for start, size in ((0, 2), (2, 2), (4, 1))}
    pinning.end(pool.buffer)
    assert not driver.held
    assert covered(pinning, pool) == [False] * 5
    pool.close()


def test_a_slot_larger_than_a_piece_is_locked_whole() -> None:
    pool, driver = Pool(2, SLOT), Driver()
    _, lane = started(pool, driver, piece=1)
    lane.run()
    assert list(driver.held.values()) == [SLOT, SLOT]


def test_only_whole_slots_of_the_region_are_covered() -> None:
    pool = Pool(4, SLOT)
    pinning, lane = started(pool, Driver(), piece=2 * SLOT)
    lane.turn()
    memory = slot_tensor(pool.buffer)
    assert pinning.covers(memory[SLOT + 7 : 2 * SLOT])
    assert not pinning.covers(memory[SLOT : 2 * SLOT + 1])
    assert not pinning.covers(torch.zeros(4, dtype=torch.uint8))


def test_a_refusal_keeps_what_is_locked_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    pool, driver = Pool(6, SLOT), Driver(limit=1)
    with caplog.at_level(logging.WARNING):
        pinning, lane = started(pool, driver, piece=2 * SLOT)
        lane.run()

    assert covered(pinning, pool) == [True, True, False, False, False, False]
    (record,) = caplog.records
    assert "refused 16384 bytes (error 2) after 16384 of 49152" in record.message
    pinning.end(pool.buffer)
    assert not driver.held


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_ending_while_pieces_are_still_to_come_leaves_nothing_locked(turns: int) -> None:
    pool, driver = Pool(6, SLOT), Driver()
    pinning, lane = started(pool, driver, piece=2 * SLOT)
    for _ in range(turns):
        lane.turn()
    pinning.end(pool.buffer)
    assert not driver.held
    lane.run()
    assert not driver.held


def test_an_end_waits_for_the_piece_that_is_being_locked() -> None:
    pool, in_driver = Pool(2, SLOT), threading.Event()

    class Slow(Driver):
        def cudaHostRegister(self, address: int, size: int, flags: int) -> Code:  # noqa: N802
            in_driver.set()
            threading.Event().wait(0.1)  # a driver takes its time
            return super().cudaHostRegister(address, size, flags)

    driver = Slow()
    pinning = Pinning(None, runtime=driver, piece_bytes=SLOT)
    pinning.begin(pool.buffer, SLOT)
    assert in_driver.wait(10)
    pinning.end(pool.buffer)
    pinning.close()
    assert not driver.held
    assert driver.threads == {"kvtier-pinning-0"}, "off the caller's thread"


def test_two_regions_are_told_apart() -> None:
    first, second, driver = Pool(2, SLOT), Pool(2, SLOT), Driver()
    pinning, lane = started(first, driver, piece=2 * SLOT)
    pinning.begin(second.buffer, SLOT)
    lane.run()
    pinning.end(first.buffer)
    assert covered(pinning, second) == [True, True]
    assert covered(pinning, first) == [False, False]
    pinning.end(first.buffer)


def test_a_lane_that_refuses_leaves_slots_unlocked(caplog: pytest.LogCaptureFixture) -> None:
    pool, lane = Pool(2, SLOT), ManualLane()
    lane.close(0)
    pinning = Pinning(None, runtime=Driver(), lane=lane)
    with caplog.at_level(logging.WARNING):
        pinning.begin(pool.buffer, SLOT)
    assert covered(pinning, pool) == [False, False]
    assert "0 of 16384 bytes" in caplog.text


def test_locking_holds_no_view_of_the_region() -> None:
    """A view that is still held would keep a server's pool mapped after it was let go."""
    pool, driver = Pool(2, SLOT), Driver()
    pinning, lane = started(pool, driver)
    lane.run()
    pinning.end(pool.buffer)
    pool.buffer.release()  # raises BufferError while anything still looks at it
