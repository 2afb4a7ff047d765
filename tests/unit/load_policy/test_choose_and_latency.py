"""Estimates: they converge, forget, are never negative or NaN, and what is loaded because of them
is the soonest served."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.lookup import Asking
from kvtier.load_policy.choose import HitEnd, LoadPlan, choose
from kvtier.load_policy.decide import LoadPolicy, slowest_token_s
from kvtier.load_policy.latency import Average, Pace
from kvtier.load_policy.prefill import Certainty, Prefill, PrefillTime, StepClock, Work
from tests.clock import Clock

SECONDS = st.floats(0, 1e4)


def paced(threads, read_s=None):
    """A lane whose reads took ``read_s``."""
    pace = Pace(threads)
    if read_s is not None:
        pace.read(pace.begun(0.0), read_s, whole=True)
    return pace


# ---- averages ------------------------------------------------------------------------------------


def test_an_average_converges_in_a_burst_and_gives_in_at_once_after_a_silence():
    average = Average()
    average.add(10.0, 0.0)
    for _ in range(40):
        average.add(1.0, 0.0)
    assert average.value == pytest.approx(1.0, abs=0.1)
    average.add(7.0, 60.0)
    assert average.value == pytest.approx(7.0)


def test_one_outlier_in_a_burst_has_an_eighth_of_the_say():
    average = Average()
    average.add(1.0, 0.0)
    average.add(9.0, 0.0)
    assert average.value == pytest.approx(2.0)


def test_after_two_seconds_of_silence_a_sample_has_as_much_say_as_one_time_constant_gives():
    average = Average()
    average.add(1.0, 10.0)
    average.add(2.0, 12.0)
    assert average.value == pytest.approx(2.0 - 1 / math.e)


@given(st.lists(st.tuples(st.floats(), st.floats(-1e9, 1e9)), max_size=30))
def test_an_average_stays_among_its_samples(samples):
    average = Average()
    for sample, now in samples:
        average.add(sample, now)
    valid = [sample for sample, _ in samples if 0 <= sample < math.inf]
    if valid:
        assert average.value is not None
        assert min(valid) * (1 - 1e-9) <= average.value <= max(valid) * (1 + 1e-9)
    else:
        assert average.value is None


# ---- a tier's lane -------------------------------------------------------------------------------


def test_an_unknown_tier_says_so_and_a_write_stands_in_for_the_first_read():
    pace = Pace(2)
    assert pace.wait(5, 0.0) is None
    pace.wrote(pace.begun(0.0), 0.25, stored=True)
    assert pace.wait(4, 1.0) == pytest.approx(0.5)
    pace.read(pace.begun(1.0), 2.0, whole=True)
    assert pace.chunk_s == pytest.approx(1.0), "a read is known: writes say nothing any more"


def test_what_waits_before_and_how_many_read_at_once_count():
    pace = paced(4, read_s=0.1)
    assert pace.wait(1, 1.0) == pytest.approx(0.1), "one read cannot be divided"
    assert pace.wait(8, 1.0) == pytest.approx(0.2)
    pace.queued = 8
    assert pace.wait(8, 1.0) == pytest.approx(0.4)


def test_threads_that_are_busy_are_waited_for():
    pace = paced(2, read_s=1.0)
    for _ in range(2):
        pace.begun(10.0)
    assert pace.wait(1, 10.25) == pytest.approx(1.75), "one of them is free after 0.75 s"
    assert pace.wait(0, 10.25) == pytest.approx(1.75)
    assert pace.wait(4, 10.25) == pytest.approx(2.75), "two reads on each thread, after 0.75 s"


def test_a_call_that_does_not_end_makes_the_tier_slow_before_it_fails():
    pace = paced(2, read_s=0.01)
    calls = [pace.begun(10.0) for _ in range(2)]
    assert (pace.wait(1, 10.0) or 0) < 0.03
    assert (pace.wait(1, 40.0) or 0) > 30
    for call in calls:
        pace.read(call, 40.0, whole=False)
    assert (pace.wait(1, 40.0) or 0) > 10, "a read that failed late is slow"
    stuck = paced(2, read_s=0.01)
    stuck.begun(10.0)
    assert (stuck.wait(4, 40.0) or 0) == pytest.approx(0.04), "the other thread does the work"


def test_the_first_call_of_all_tells_by_not_ending():
    pace = Pace(1)
    pace.begun(0.0)
    assert (pace.wait(1, 60.0) or 0) >= 60


def test_a_quick_failure_and_a_quick_answer_do_not_make_a_tier_fast():
    pace = paced(1, read_s=1.0)
    pace.read(pace.begun(60.0), 60.0, whole=False)
    pace.asked(pace.begun(60.0), 60.001, found=0.0)
    assert pace.chunk_s == 1.0
    assert pace.odds < 1


def test_what_an_earlier_run_has_read_stands_in_until_there_is_a_read():
    pace = Pace(1)
    pace.remembered_s = 0.5
    pace.wrote(pace.begun(0.0), 9.0, stored=True)
    assert (pace.wait(1, 9.0), pace.read_s) == (0.5, None)
    pace.asked(pace.begun(9.0), 9.001, found=1.0)
    assert pace.wait(1, 9.0) == 0.5, "a quick answer is no read"
    pace.read(pace.begun(9.0), 10.0, whole=True)
    assert pace.wait(1, 10.0) == pace.read_s == 1.0


def test_probes_are_bounded_and_never_two_at_once():
    pace = paced(1, read_s=1.0)
    assert pace.probe_due(10.0)
    assert not pace.probe_due(1000.0), "the first has not ended"
    pace.probed(1000.0)
    assert not pace.probe_due(1005.0)
    assert pace.probe_due(1007.0)


@pytest.mark.parametrize(
    ("chunk_s", "pause_s"), [(None, 2.0), (0.5, 4.0), (1.0, 6.0), (10.0, 30.0)]
)
def test_a_probe_waits_for_two_seconds_and_four_reads_and_half_a_minute_at_most(chunk_s, pause_s):
    pace = paced(1, chunk_s)
    pace.probed(100.0)
    assert not pace.probe_due(100.0 + pause_s - 0.25)
    assert pace.probe_due(100.0 + pause_s)


def test_what_a_shared_tier_holds_of_a_run_moves_its_odds_by_an_eighth():
    pace = Pace(1)
    assert pace.odds == 1.0
    pace.asked(pace.begun(5.0), 5.5, found=0.5)
    assert pace.odds == 1.0 - 1 / 16


def test_a_first_read_that_fails_is_as_slow_as_it_was_and_one_that_took_no_time_says_nothing():
    pace = Pace(1)
    pace.read(pace.begun(5.0), 5.0, whole=False)
    assert pace.chunk_s is None
    pace.read(pace.begun(5.0), 5.5, whole=False)
    assert pace.chunk_s == 0.5


def test_a_write_counts_from_its_begin():
    pace = Pace(1)
    pace.wrote(pace.begun(10.0), 10.25, stored=True)
    assert pace.chunk_s == 0.25


def test_a_lane_has_a_thread_and_a_call_that_is_due_now_makes_it_free_now():
    for threads in (0, 1):
        pace = paced(threads, read_s=1.0)
        assert pace.wait(2, 5.0) == 2.0
        pace.begun(10.0)
        assert pace.wait(1, 11.0) == 1.0
        assert pace.wait(1, 9.5) == 2.0, "a clock that went back"


@given(
    st.integers(1, 8),
    st.integers(0, 5000),
    st.lists(SECONDS, max_size=12),
    st.one_of(st.none(), SECONDS),
    st.integers(0, 5000),
)
def test_a_wait_is_finite_and_grows_with_the_work(threads, queued, begun, read_s, reads):
    pace = paced(threads, read_s)
    pace.queued = queued
    for at in begun:
        pace.begun(at)
    some, more = pace.wait(reads, 1e4), pace.wait(reads + 1, 1e4)
    if some is not None:
        assert more is not None and 0 <= some <= more * (1 + 1e-9) < math.inf


# ---- prefill -------------------------------------------------------------------------------------

FLAT, SLOPE = 40e-6, 2e-9


def truth(tokens, cached):
    return tokens * FLAT + (tokens * cached + tokens * tokens / 2) * SLOPE


def taught(prefill, pace=1.0):
    """Twelve prompts in steps of 2,048 tokens."""
    for _ in range(12):
        for cached in range(0, 16_384, 2048):
            prefill.learn(2048, 2048 * cached + 2048**2 / 2, pace * truth(2048, cached))
    return prefill


@pytest.mark.parametrize(
    ("tokens", "cached"), [(2048, 0), (16_384, 0), (512, 16_384), (30_000, 2000)]
)
def test_prefill_is_learned_from_steps_and_holds_for_other_sizes(tokens, cached):
    assert taught(Prefill()).seconds(tokens, cached) == pytest.approx(
        truth(tokens, cached), rel=0.02
    )


def test_a_wrong_estimate_is_corrected_and_an_engine_that_slows_down_believed():
    prefill = taught(Prefill(PrefillTime(10 * FLAT)))
    assert prefill.seconds(2048, 0) == pytest.approx(truth(2048, 0), rel=0.05)
    assert taught(prefill, pace=3.0).seconds(2048, 0) == pytest.approx(3 * truth(2048, 0), rel=0.15)


def test_nothing_is_known_of_a_new_engine():
    assert Prefill().seconds(100, 0) is None
    assert Prefill(PrefillTime(1e-3)).seconds(100, 0) == pytest.approx(0.1)


def test_short_tails_hardly_change_what_whole_steps_taught():
    prefill = taught(Prefill())
    for _ in range(20):
        prefill.learn(
            130, 130 * 2048, 0.02
        )  # four times what these tokens cost: mostly the step itself
    assert prefill.seconds(2048, 0) == pytest.approx(truth(2048, 0), rel=0.1)


def line_through(steps, planned):
    """Seconds a token, and a token of depth, from all steps at once: ``(tokens, depth, seconds a
    token)``. A plan is a step of 128 tokens before them."""
    first = planned.per_depth if planned is not None else 0.0
    samples = [(128, 0.0, planned.per_token)] if planned is not None and planned.per_token else []
    samples += steps
    after, weights = 0, list[float]()
    for tokens, _, _ in reversed(samples):
        weights.insert(0, tokens**2 * 0.5 ** (after / 32_768))
        after += tokens
    total = sum(weights)
    weighted = list(zip(weights, samples, strict=True))
    x = sum(weight * depth for weight, (_, depth, _) in weighted) / total
    y = sum(weight * each for weight, (_, _, each) in weighted) / total
    xx = sum(weight * depth**2 for weight, (_, depth, _) in weighted) / total
    xy = sum(weight * depth * each for weight, (_, depth, each) in weighted) / total
    slope = max(0.0, (xy - x * y + 256**2 * first) / (xx - x * x + 256**2))
    flat = y - slope * x
    return (flat, slope) if flat > 0 else (0.0, xy / xx)


@pytest.mark.parametrize("planned", [None, PrefillTime(60e-6, 3e-9), PrefillTime(0.0, 3e-9)])
@pytest.mark.parametrize(
    "steps",
    [
        [(512, 256.0, 50e-6)],
        [(2048, 1024.0, 45e-6), (300, 5000.0, 70e-6), (4096, 9000.0, 62e-6)],
        [(1000, 1000.0, 1e-6), (1000, 9000.0, 90e-6)],
    ],
)
def test_what_is_learned_is_the_weighted_line_through_all_steps(planned, steps):
    prefill = Prefill(planned)
    for tokens, depth, each in steps:
        prefill.learn(tokens, depth * tokens, each * tokens)
    flat, slope = line_through(steps, planned)
    for tokens, before in ((1, 0), (700, 300), (50, 20_000)):
        wanted = tokens * flat + (tokens * before + tokens**2 / 2) * slope
        assert prefill.seconds(tokens, before) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_times_that_no_engine_can_take_teach_nothing(seconds):
    prefill = Prefill()
    prefill.learn(10, 50, seconds)
    prefill.at_most(seconds)
    assert prefill.seconds(10, 0) is None
    assert prefill.known is Certainty.NONE
    prefill.learn(1, 0, 0.5)
    assert prefill.seconds(1, 0) == 0.5
    assert PrefillTime(1.0, 1.0).seconds(2) == 4.0


@given(
    st.lists(st.tuples(st.integers(0, 10**5), st.floats(0, 1e6), st.floats()), max_size=40),
    st.integers(1, 10**6),
)
def test_prefill_is_never_negative_nor_nan(steps, tokens):
    prefill = Prefill()
    for new, depth, seconds in steps:
        prefill.learn(new, new * (depth + new / 2), min(seconds, 1e6))
    for cached in (0, 10**6):
        estimate = prefill.seconds(tokens, cached)
        assert estimate is None or 0 <= estimate < math.inf


# ---- which interval is a step's ------------------------------------------------------------------


class Learnt(Prefill):
    def __init__(self):
        super().__init__()
        self.steps: list[tuple[int, float]] = []

    def learn(self, tokens, looks, seconds):
        self.steps.append((tokens, seconds))


@pytest.fixture
def prefill():
    return Learnt()


@pytest.fixture
def clock(prefill):
    """A clock that has seen its first step, from 0 to 1."""
    clock = StepClock(prefill)
    clock.end(clock.plan(0.0, Work.of([(2000, 0)])), 1.0, 0.0)
    return clock


def test_a_steps_time_begins_when_it_is_planned_or_the_one_before_has_ended(clock, prefill):
    first = clock.plan(10.0, Work.of([(2000, 0)]))
    ahead = clock.plan(10.1, Work.of([(1000, 2000)]))
    clock.end(first, 12.0, 0.0)
    clock.end(ahead, 13.0, 0.25)
    assert prefill.steps == [(2000, 2.0), (1000, 0.75)], "idle time and copies do not count"


def test_steps_that_only_decode_teach_what_a_step_costs_anyway(clock, prefill):
    for at in range(10, 20):
        clock.end(clock.plan(at, Work.of([(1, 500)] * 4)), at + 0.125, 0.0)
    clock.end(clock.plan(30.0, Work.of([])), 35.0, 0.0)
    assert prefill.steps == []
    clock.end(clock.plan(40.0, Work.of([(1000, 0), (1, 7)])), 41.0, 0.0)
    assert [seconds for _, seconds in prefill.steps] == pytest.approx([0.875])


def test_a_single_request_that_decodes_teaches_too_and_half_a_step_is_left_at_least(clock, prefill):
    clock.end(clock.plan(10.0, Work.of([(1, 500)])), 10.5, 0.0)
    clock.end(clock.plan(20.0, Work.of([(1000, 0)])), 22.0, 0.0)
    clock.end(clock.plan(30.0, Work.of([(1000, 0)])), 30.75, 0.0)
    assert prefill.steps == [(1000, 1.5), (1000, 0.375)]


def test_a_step_teaches_prefill_from_128_tokens_beyond_one_a_request(clock, prefill):
    for at, work in ((10.0, [(127, 0)]), (20.0, [(128, 0)]), (30.0, [(129, 0)])):
        clock.end(clock.plan(at, Work.of(work)), at + 1, 0.0)
    assert [tokens for tokens, _ in prefill.steps] == [129]


def test_steps_that_never_end_are_not_kept(clock):
    for at in range(9):
        clock.plan(at, Work.of([(1, 1)]))
    clock.end(clock.plan(10.0, Work.of([(1, 1)])), 11.0, 0.0)
    assert not clock._planned


def test_a_step_that_was_never_seen_to_end_spoils_one_sample_and_no_more(clock, prefill):
    clock.plan(10.0, Work.of([(2000, 0)]))
    clock.end(clock.plan(10.0, Work.of([(2000, 0)])), 20.0, 0.0)
    assert prefill.steps == []
    clock.end(clock.plan(30.0, Work.of([(2000, 0)])), 31.0, 0.0)
    assert prefill.steps == [(2000, 1.0)]


def test_an_engines_first_prefill_is_a_hint_and_no_measure(prefill):
    clock = StepClock(prefill)
    clock.end(clock.plan(0.0, Work.of([(2000, 0)])), 10.0, 0.0)
    assert prefill.steps == []
    assert prefill.seconds(1000, 0) == pytest.approx(5.0)
    assert prefill.known is Certainty.GUESSED


def test_a_step_that_is_too_small_to_measure_bounds_the_speed_from_above():
    prefill = Prefill(PrefillTime(1e-3), Certainty.GUESSED)
    clock = StepClock(prefill)
    for at, work, bound in (
        (0.0, [(100, 4000)], 1e-3),  # ten times as long a token as the plan says
        (10.0, [(5, 0)] * 8, 1e-3),
        (20.0, [(127, 0)] * 8, 1 / 1016),
    ):
        clock.end(clock.plan(at, Work.of(work)), at + 1.0, 0.0)
        assert prefill.seconds(1, 0) == pytest.approx(bound)
    prefill = taught(prefill)
    measured = prefill.line
    prefill.at_most(1e-9)
    assert (prefill.line, prefill.known) == (measured, Certainty.MEASURED)


def test_what_was_remembered_is_no_stronger_than_a_step_of_128_tokens():
    prefill = Prefill(PrefillTime(1e-3), Certainty.REMEMBERED)
    prefill.at_most(2e-3)
    assert prefill.line == PrefillTime(1e-3)
    prefill.at_most(5e-4)
    assert prefill.line == PrefillTime(5e-4), "what is seen contradicts it"
    assert int(prefill.known) == Certainty.REMEMBERED
    prefill.learn(2048, 2048**2 / 2, 20.48)
    assert prefill.seconds(1000, 0) == pytest.approx(10.0, rel=0.05)
    assert int(prefill.known) == Certainty.MEASURED


# ---- what is loaded ------------------------------------------------------------------------------


def per_token(ends, seconds):
    return [end.tokens * seconds for end in ends]


def test_what_is_slower_than_computing_is_declined_and_what_is_there_loaded():
    ends = [HitEnd(2, 0.0), HitEnd(10, 5.0)]
    assert choose(ends, per_token(ends, 0.1)) == LoadPlan(0, False, 0.0)
    assert choose(ends, per_token(ends, 1.0))[:2] == (1, False)


def test_the_cut_falls_between_a_fast_and_a_slow_tier():
    ends = [HitEnd(0, 0.0), HitEnd(8, 0.1), HitEnd(16, 30.0)]
    assert choose(ends, per_token(ends, 0.1))[:2] == (1, False)


def test_at_the_break_even_point_nothing_is_waited_for():
    for wait_s, row in ((0.95, 0), (0.85, 1)):
        ends = [HitEnd(0, 0.0), HitEnd(10, wait_s)]
        assert choose(ends, per_token(ends, 0.1)).row == row


def test_the_deadline_is_a_multiple_of_the_estimate_and_never_more_than_computing():
    def within(wait):
        ends = [HitEnd(4, 0.0), HitEnd(10, wait)]
        return choose(ends, per_token(ends, 0.1)).within_s

    assert within(0.1) == pytest.approx(0.3)
    assert within(0.5) == pytest.approx(0.6), "six tokens cost 0.6 s to compute"
    assert within(None) == pytest.approx(0.6), "an unknown tier is tried, for so long"
    assert within(1e-6) == pytest.approx(0.6 / 8), "not for milliseconds"


def test_an_unknown_engine_loads_all_there_is_and_a_known_one_what_is_worth_it():
    asking = Asking(1.0, 2.0, 0.5)
    ends = [HitEnd(1, 0.0), HitEnd(10, 99.0), HitEnd(20, asking.arrive_s, asking)]
    assert LoadPolicy(60.0).choose(ends, 0) == LoadPlan(1, True, 60.0)
    assert LoadPolicy(60.0, prefill=Prefill(PrefillTime(1e-3))).choose(ends, 0) == LoadPlan(
        0, False, 0.0
    )
    assert LoadPolicy(60.0, prefill=Prefill(PrefillTime(1e-3)), always=True).choose(ends, 0)[
        :2
    ] == (1, True)
    assert LoadPolicy(60.0).choose(ends[:2], 0) == LoadPlan(1, False, 60.0)


def test_what_comes_in_parts_is_promised_where_it_pays_at_twice_its_estimate():
    known = LoadPolicy(5.0, prefill=Prefill(PrefillTime(1.0)))
    ends = [HitEnd(1, 0.0), HitEnd(100, 40.0)]
    assert known.choose_in_parts(ends, 0, [0, 9]) == LoadPlan(1, False, 99.0), "not 5 s"
    slow = [HitEnd(1, 0.0), HitEnd(100, 50.0)]
    assert known.choose_in_parts(slow, 0, [0, 9]) == LoadPlan(0, False, 0.0)
    unknown = [HitEnd(1, 0.0), HitEnd(100, None)]
    assert known.choose_in_parts(unknown, 0, [0, 9]) == LoadPlan(1, False, 99.0), "it teaches"
    assert LoadPolicy(5.0, always=True).choose_in_parts(slow, 0, [0, 9]) == LoadPlan(
        1, False, math.inf
    )


# ---- an engine that has just started -------------------------------------------------------------

SLOW = [HitEnd(0, 0.0), HitEnd(1000, 60.0)]
"""A token takes a millisecond to compute, and 60 to load."""


def started(known, **more):
    speed = None if known is Certainty.NONE else PrefillTime(1e-3)
    return LoadPolicy(2.0, prefill=Prefill(speed, known), **more)


def both(policy, ends):
    return policy.choose(ends, 0), policy.choose_in_parts(ends, 0, [0] * len(ends))


@pytest.mark.parametrize("known", [Certainty.NONE, Certainty.GUESSED])
def test_while_nothing_was_measured_everything_is_loaded_in_the_time_of_its_bytes(known):
    for ends in (SLOW, [HitEnd(0, 0.0), HitEnd(1000, None)]):
        slowest_s = slowest_token_s(100, 10_000_000)
        for plan in both(started(known, slowest_s=slowest_s), ends):
            assert plan[:2] == (1, False)
            assert plan.within_s == pytest.approx(2.0 + 1.0 + 2.0), (
                "ten chunks of a tenth of a second, 50 MB a second, and no guess"
            )


def test_what_was_remembered_forbids_the_first_load_only_where_it_is_far_too_slow():
    for wait_s, row in ((3.5, 1), (3.7, 0)):
        for plan in both(started(Certainty.REMEMBERED), [HitEnd(0, 0.0), HitEnd(1000, wait_s)]):
            assert plan.row == row
            assert plan.within_s == 2.0, "what was measured on a quiet host cuts no load"
    asking = Asking(0.02, 3.5, 0.5)
    assert started(Certainty.REMEMBERED).choose([HitEnd(0, 0.0), HitEnd(1000, 3.5, asking)], 0).ask
    assert (
        not started(Certainty.MEASURED).choose([HitEnd(0, 0.0), HitEnd(1000, 3.5, asking)], 0).ask
    )


@pytest.mark.parametrize(
    ("known", "first", "later"),
    [
        (Certainty.NONE, 1, 1),
        (Certainty.GUESSED, 1, 1),
        (Certainty.REMEMBERED, 1, 1),
        (Certainty.MEASURED, 0, 0),
    ],
)
def test_a_load_of_a_quarter_of_a_second_is_not_doubted_before_the_speed_is_known(
    known, first, later
):
    ends = [HitEnd(0, 0.0), HitEnd(10, 0.25)]
    policy = started(known)
    assert [plan.row for plan in both(policy, ends)] == [first] * 2
    policy.load_ended(10)
    assert [plan.row for plan in both(policy, ends)] == [later] * 2


@pytest.mark.parametrize("known", Certainty)
@pytest.mark.parametrize("end", ["load_ended", "gave_up"])
def test_a_wrong_guess_costs_one_prompt_and_not_two(known, end):
    clock = Clock(10.0)
    policy = started(known, clock=clock)
    assert [plan.row for plan in both(policy, SLOW)] == [int(known <= Certainty.GUESSED)] * 2
    policy.load_ended(1000) if end == "load_ended" else policy.gave_up()
    step = policy.planned(Work.of([(100, 1000)]))
    clock.now += 0.2
    policy.ended(step, 0, 0.0, 0.0)
    assert [plan.row for plan in both(policy, SLOW)] == [0, 0]
    fast = [HitEnd(0, 0.0), HitEnd(1000, 0.1)]
    assert [plan.row for plan in both(policy, fast)] == [1, 1], "a right one costs none"


def test_once_an_engine_was_measured_it_is_believed_though_nothing_was_loaded():
    clock = Clock(10.0)
    policy = started(Certainty.GUESSED, clock=clock)
    for _ in range(2):
        step = policy.planned(Work.of([(2000, 0)]))
        clock.now += 2.0
        policy.ended(step, 0, 0.0, 0.0)
    assert [plan.row for plan in both(policy, SLOW)] == [0, 0]


def test_in_a_busy_engine_each_turn_of_the_slots_costs_two_steps():
    clock = Clock(0.0)
    policy = LoadPolicy(5.0, prefill=Prefill(PrefillTime(1.0)), clock=clock)
    step = policy.planned(Work.of([(1, 0)]))
    clock.now += 1.0
    policy.ended(step, 0, 0.0, 0.0)
    ends = [HitEnd(1, 0.0), HitEnd(100, 30.0)]
    for turns, row in ((9, 1), (20, 0)):
        plan = policy.choose_in_parts(ends, 0, [0, turns], busy=True)
        assert plan is not None
        assert plan.row == row


STEPS = st.tuples(st.sampled_from([0, 1, 4, 300]), st.integers(1, 4), st.booleans())


@pytest.mark.parametrize("in_parts", [False, True])
@given(st.lists(STEPS, max_size=60), st.integers(0, 2))
def test_what_an_engine_knows_does_not_depend_on_how_often_it_was_asked(in_parts, steps, ahead):
    """Steps of ``(tokens more than one each, requests, whether tokens were loaded in it)``, of
    which ``ahead`` are planned before the oldest has ended."""

    def ask(policy, in_parts, busy=True):
        if in_parts:
            return policy.choose_in_parts(SLOW, 0, [0, 3], busy=busy)
        return policy.choose(SLOW, 0, busy=busy)

    clock = Clock(10.0)
    often, once = (started(Certainty.NONE, clock=clock) for _ in range(2))
    under_way = []
    for more, requests, loads in [*steps, *[(0, 1, False)] * ahead]:
        work = Work.of([(1 + more, 50), *[(1, 7)] * (requests - 1)])
        under_way.append((often.planned(work), loads))
        assert once.planned(work) == under_way[-1][0]
        clock.now += 0.1 * requests + 0.01 * more
        if len(under_way) > ahead:
            step, loaded = under_way.pop(0)
            for policy in (often, once):
                policy.ended(step, 10.0 * loaded, 0.02 * loaded, 0.001)
            ask(often, in_parts)
    for busy in (False, True):
        assert ask(once, not in_parts, busy) == ask(often, not in_parts, busy)
    assert (once.prefill.line, once._step_s.value) == (often.prefill.line, often._step_s.value)


def test_a_prompt_is_learned_from_when_its_step_ends_though_nobody_asks():
    clock = Clock(10.0)
    policy = started(Certainty.GUESSED, clock=clock)
    for _ in range(2):
        step = policy.planned(Work.of([(2000, 0), (1, 7)]))
        clock.now += 2.0
        policy.ended(step, 0, 0.0, 0.0)
    assert policy.prefill.known is Certainty.MEASURED


def test_behind_a_long_beginning_the_same_tokens_are_worth_more():
    ends = [HitEnd(0, 0.0), HitEnd(1000, 0.1)]
    policy = LoadPolicy(60.0, prefill=Prefill(PrefillTime(10e-6, 10e-9)))
    assert policy.choose(ends, 0).row == 0
    assert policy.choose(ends, 100_000).row == 1


def test_a_copy_that_is_slower_than_computing_is_not_made():
    ends = [HitEnd(4, 0.0), HitEnd(8, 0.1)]
    assert choose(ends, per_token(ends, -0.1)) == LoadPlan(None, False, 0.0)


@pytest.mark.parametrize(
    ("answer_s", "arrive_s", "odds", "asked"),
    [
        (0.001, 0.1, 1.0, True),
        (0.001, 0.1, 0.0, True),
        (0.1, 0.2, 0.0, False),
        (0.1, 0.2, 0.9, True),
        (0.1, 2.0, 1.0, False),
        (None, None, 1.0, True),
    ],
)
def test_a_shared_tier_is_asked_when_the_answer_is_worth_it(answer_s, arrive_s, odds, asked):
    ends = [HitEnd(0, 0.0), HitEnd(10, arrive_s, Asking(answer_s, arrive_s, odds))]
    assert choose(ends, per_token(ends, 0.1))[:2] == (0, asked)


def test_behind_a_tier_that_is_declined_nobody_is_asked():
    ends = [HitEnd(0, 0.0), HitEnd(5, 9.0), HitEnd(10, 0.01, Asking(0.01, 0.01, 1.0))]
    assert choose(ends, per_token(ends, 0.1))[:2] == (0, False)


@pytest.mark.parametrize(
    ("waits", "saved_s", "row"),
    [
        ((0.0, 0.0), (1.0, 1.0), 0),
        ((0.0, None), (1.0, 0.5), 0),
        ((0.0, 0.0), (-0.5, -0.2), None),
        ((0.0, 5.0), (-0.5, 1.0), None),
        ((0.0, 0.0), (-0.5, 0.5), 1),
    ],
)
def test_an_end_is_taken_only_where_it_saves_more_than_what_is_there_and_than_nothing(
    waits, saved_s, row
):
    ends = [HitEnd(tokens, wait_s) for tokens, wait_s in enumerate(waits, 1)]
    assert choose(ends, saved_s)[:2] == (row, False)


@pytest.mark.parametrize(
    ("answer_s", "more_s", "asked"),
    [
        (0.25, 0.375, True),
        (0.25, 0.25, False),
        (0.25, 0.125, False),
        (None, 0.25, True),
        (None, -0.125, False),
    ],
)
@pytest.mark.parametrize("there_s", [0.0, 2.0])
def test_a_shared_tier_is_asked_for_what_it_may_add_and_not_for_what_is_there(
    answer_s, more_s, asked, there_s
):
    ends = [HitEnd(1, 0.0), HitEnd(2, 0.0, Asking(answer_s, 0.0, 0.5))]
    assert choose(ends, [there_s, there_s + more_s])[:2] == (0, asked)


def test_a_rest_that_is_asked_for_is_waited_for_as_long_as_it_takes_itself():
    ends = [HitEnd(0, 0.0), HitEnd(1, 0.0), HitEnd(3, 0.5, Asking(0.1, 0.5, 0.5))]
    assert choose(ends, [0.0, 1.0, 3.0]) == LoadPlan(1, True, 1.5)


WAITS = st.one_of(st.none(), st.floats(0, 100))


@given(
    st.integers(0, 50),
    st.dictionaries(st.integers(1, 50), WAITS, max_size=6),
    st.floats(-5, 5),
    st.none() | st.floats(0, 1),
)
def test_a_plan_is_possible_and_waits_no_longer_than_computing_takes(ready, more, each, odds):
    ends = [HitEnd(ready, 0.0)]
    ends += [HitEnd(ready + tokens, more[tokens]) for tokens in sorted(more)]
    known = len(ends)
    if odds is not None:
        ends.append(HitEnd(200, 1.0, Asking(0.5, 1.0, odds)))
    plan = choose(ends, per_token(ends, each))
    assert plan.row is None or 0 <= plan.row < known
    assert not plan.ask or (plan.row == known - 1 and odds is not None)
    assert 0 <= plan.within_s <= 200 * max(0.0, each)
