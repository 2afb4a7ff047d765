"""Lanes: bounded, reads first, never stopped by a failing work. Steps are ordered by events, not by
sleeping."""

import logging
import threading

from kvtier.core.lanes import Lane, future_of
from tests.child_process import DEADLINE_S


class Gate:
    """A work that holds the lane's thread until it is opened."""

    def __init__(self):
        self.welcomed, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.welcomed.set()
        assert self.opened.wait(DEADLINE_S)


def held_lane(threads=1, bound=2):
    lane, gate = Lane("test", threads, urgent_bound=bound, bound=bound), Gate()
    assert lane.submit(gate)
    assert gate.welcomed.wait(DEADLINE_S)
    return lane, gate


def test_a_full_lane_refuses():
    lane, gate = held_lane()
    done: list[int] = []
    assert [lane.submit(lambda: done.append(1)) for _ in range(3)] == [True, True, False]
    found = [lane.submit(lambda: done.append(2), urgent=True) for _ in range(3)]
    assert found == [True, True, False]
    gate.opened.set()
    assert lane.close(DEADLINE_S)
    assert done == [2, 2, 1, 1], "urgent work goes first"


def test_a_lane_is_idle_when_no_work_waits_or_runs():
    lane, gate = held_lane()
    waiting, last = Gate(), threading.Event()
    assert not lane.is_idle, "one runs"
    assert lane.submit(waiting)
    gate.opened.set()
    assert waiting.welcomed.wait(DEADLINE_S)
    assert lane.queued == (0, 0) and not lane.is_idle, "one was taken from the queue"
    assert lane.submit(last.set)
    waiting.opened.set()
    assert lane.close(DEADLINE_S) and last.is_set()
    assert lane.is_idle


def _fail():
    raise ValueError("injected")


def test_a_failing_work_is_counted_and_the_lane_goes_on(caplog):
    lane = Lane("test", 1, urgent_bound=9, bound=9)
    done = threading.Event()
    with caplog.at_level(logging.ERROR, "kvtier.lanes"):
        lane.submit(_fail)
        lane.submit(done.set)
        assert done.wait(DEADLINE_S)
    assert lane.close(DEADLINE_S)
    assert lane.failures == 1
    assert "lane test: work failed" in caplog.text


def test_close_does_not_wait_for_a_hung_tier():
    lane, gate = held_lane()
    lane.submit(lambda: None)
    assert lane.close(0.0) is False
    assert not lane.submit(lambda: None)
    gate.opened.set()


def test_threads_run_side_by_side():
    lane, first = held_lane(threads=2)
    second = Gate()
    lane.submit(second)
    assert second.welcomed.wait(DEADLINE_S)
    first.opened.set()
    second.opened.set()
    assert lane.close(DEADLINE_S)


def test_a_future_has_what_its_work_returned_or_raised_and_a_full_lane_gives_none():
    lane, gate = held_lane(bound=3)
    good, bad = future_of(lane, lambda: 7), future_of(lane, _fail)
    unwanted = future_of(lane, _fail)
    assert good and bad and unwanted and unwanted.cancel()
    assert future_of(lane, lambda: 7) is None
    gate.opened.set()
    assert good.result(DEADLINE_S) == 7
    assert isinstance(bad.exception(DEADLINE_S), ValueError)
    assert lane.close(DEADLINE_S) and not lane.failures
