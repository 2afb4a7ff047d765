"""Shares: what engines may hold of a pool at once, and how often anybody may look at everything."""

import pytest

from kvtier.server.shares import ScanLimiter, Shares
from tests.clock import Clock


def taken(share):
    count = share.left
    share.held += count
    return count


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 64, 1000])
def test_one_alone_gets_three_quarters_and_at_least_one(slots):
    share = Shares(lambda: slots).join()
    assert taken(share) == slots - slots // 4
    assert share.left == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("most", "least"), [(1, 41), (4, 8), (20, 1)])
def test_who_holds_nothing_gets_something_however_many_take_all_they_can(most, least, late):
    shares = Shares(lambda: 1000)
    honest = None if late else shares.join()
    greedy = [shares.join() for _ in range(most)]
    for _ in range(3):
        for one in greedy:
            taken(one)
    assert (honest or shares.join()).left >= least


def test_who_leaves_makes_room():
    shares = Shares(lambda: 100)
    greedy, other = shares.join(), shares.join()
    count = taken(greedy)
    assert (count, other.left) == (84, 4)
    greedy.held = 0
    greedy.leave()
    assert other.left == 75


def test_streams_of_one_client_have_one_share_together():
    shares = Shares(lambda: 256)
    honest = shares.join()
    greedy = [shares.join_stream("greedy") for _ in range(300)]
    assert sum(map(taken, greedy)) == 256 - 256 // 6
    other = shares.join_stream("other")
    assert (honest.left, other.left) == (10, 8), "what three may take of the 42 that are left"
    for one in greedy:
        one.held = 0
        one.leave()
    other.leave()
    assert honest.left == 256 - 256 // 4, "nobody else is there"


def test_of_two_streams_of_one_client_none_takes_all_that_it_may_have():
    shares = Shares(lambda: 256)
    finds, puts = shares.join_stream("engine"), shares.join_stream("engine")
    assert (taken(finds), taken(puts)) == (192 - 192 // 6, 192 // 6 // 4)


def test_a_pool_that_shrinks_gives_no_more():
    slots = [100]
    shares = Shares(lambda: slots[0])
    one, other = shares.join(), shares.join()
    one.held = 60
    slots[0] = 50
    assert (one.left, other.left) == (0, 0)


def test_looks_at_everything_take_a_hundredth_of_the_time():
    clock = Clock()
    pace = ScanLimiter(clock)

    def look():
        clock.now = 0.02

    assert list(pace.looking(look)) == []
    waiting = pace.looking(lambda: None)
    assert next(waiting) == pytest.approx(99 * 0.02)
    clock.now += 1.0
    assert next(waiting) == pytest.approx(99 * 0.02 - 1.0)
    clock.now += 1.0
    assert list(waiting) == []
