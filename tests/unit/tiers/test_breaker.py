"""Breaker: opens after faults in a row, lets one call try, waits longer each time it fails, closes
at a success."""

from kvtier.tiers.breaker import Breaker
from tests.clock import Clock


def test_faults_in_a_row_open_it_and_a_success_between_does_not():
    breaker = Breaker(Clock(), 3, 1.0, 8.0)
    assert [breaker.fault(), breaker.fault()] == [False, False]
    assert not breaker.ok(), "it was closed all the time"
    assert [breaker.fault(), breaker.fault(), breaker.fault()] == [False, False, True]
    assert breaker.open
    assert not breaker.allows()


def test_after_the_wait_one_call_tries_and_its_success_closes_it():
    clock = Clock()
    breaker = Breaker(clock, 1, 1.0, 8.0)
    breaker.fault()
    clock.now = 1.0
    assert [breaker.allows(), breaker.allows()] == [True, False]
    assert breaker.ok()
    assert not breaker.open
    assert [breaker.allows(), breaker.allows()] == [True, True]


def test_each_failed_trial_doubles_the_wait_up_to_the_longest():
    clock = Clock()
    breaker = Breaker(clock, 1, 1.0, 5.0)
    breaker.fault()
    waits = []
    for _ in range(5):
        waits.append(breaker.wait_s)
        clock.now += breaker.wait_s - 0.01
        assert not breaker.allows()
        clock.now += 0.01
        assert breaker.allows()
        assert not breaker.fault(), "it was open already"
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    clock.now += 5.0
    assert breaker.allows()
    assert breaker.ok()


def test_a_place_that_comes_and_goes_is_left_alone_longer_each_time_until_it_has_stayed():
    clock = Clock()
    breaker = Breaker(clock, 2, 1.0, 5.0)
    waits = []
    for _ in range(4):
        breaker.fault()
        assert breaker.fault()
        waits.append(breaker.wait_s)
        clock.now += breaker.wait_s
        assert breaker.allows()
        assert breaker.ok()
        clock.now += 4.9
        assert not breaker.ok(), "closed, and well for a while"
    assert waits == [1.0, 2.0, 4.0, 5.0]
    clock.now += 0.1
    breaker.fault()
    assert breaker.fault()
    assert breaker.wait_s == 1.0, "it had stayed"


def test_calls_that_began_before_it_opened_do_not_lengthen_the_wait():
    clock = Clock()
    breaker = Breaker(clock, 1, 1.0, 8.0)
    for _ in range(4):
        breaker.fault()
    assert breaker.wait_s == 1.0
    clock.now = 1.0
    assert breaker.allows()


def test_a_trial_that_never_reports_is_given_up():
    clock = Clock()
    breaker = Breaker(clock, 1, 1.0, 8.0)
    breaker.fault()
    clock.now = 1.0
    assert breaker.allows()
    clock.now = 1.9
    assert not breaker.allows()
    clock.now = 2.0
    assert breaker.allows()


def test_a_trial_is_reserved_for_one_call_and_no_other_caller_prepares_one():
    clock = Clock()
    breaker = Breaker(clock, 1, 1.0, 8.0)
    assert breaker.reserves()
    breaker.fault()
    assert not breaker.reserves()
    clock.now = 1.0
    assert [breaker.reserves(), breaker.reserves()] == [True, False]
    assert [breaker.allows(), breaker.allows()] == [True, False]
    assert breaker.ok()
    assert [breaker.reserves(), breaker.reserves()] == [True, True]


def test_a_trial_that_was_reserved_and_never_begun_is_given_up():
    clock = Clock()
    breaker = Breaker(clock, 1, 1.0, 8.0)
    breaker.fault()
    clock.now = 1.0
    assert breaker.reserves()
    clock.now = 1.9
    assert not breaker.reserves()
    clock.now = 2.0
    assert breaker.reserves()
