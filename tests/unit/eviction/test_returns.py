"""When sessions return is learnt from prompts alone, and an order of leaving follows from it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import AT_ONCE, whole
from kvtier.eviction.by_return import ByReturn
from kvtier.eviction.returns import EDGES, Returns, _best_ratios, bin_of
from kvtier.eviction.saved_compute import SavedCompute
from kvtier.eviction.sessions import SessionPrompt, Sessions

SOON, LATE = 50, 900
"""Tokens of an answer that is a tool's call, and of one for a person."""


def taught(prompts: int = 1500, seed: int = 1) -> Returns:
    """Sessions with short answers come back in three seconds, those with long ones in minutes or
    never."""
    returns, draw, now = Returns(), random.Random(seed), 0.0
    waiting = list[tuple[float, int]]()
    for number in range(prompts):
        now += 1.0
        session = number
        if waiting and min(waiting)[0] <= now:
            _, session = min(waiting)
            waiting.remove(min(waiting))
        while returns.pass_time(now, 32):
            pass
        returns.prompt(session, now, 4000, 10, is_answered=True)
        is_soon = draw.random() < 0.5
        returns.answered(session, SOON if is_soon else LATE)
        if is_soon or draw.random() < 0.3:
            waiting.append((now + (3.0 if is_soon else draw.uniform(200, 500)), session))
    return returns


def worth_after(returns: Returns, answer: int, age: float) -> float:
    """Of a new session whose answer had so many tokens, so long after its prompt."""
    returns.prompt(1 << 40, 10_000.0, 4000, 10, is_answered=True)
    returns.answered(1 << 40, answer)
    while returns.pass_time(10_000.0 + age, 32):
        pass
    return returns.worth(1 << 40)[0]


def test_who_called_a_tool_is_worth_more_until_it_should_have_come() -> None:
    assert worth_after(taught(), SOON, 0.5) > 5 * worth_after(taught(), LATE, 0.5)
    assert worth_after(taught(), SOON, 100.0) < worth_after(taught(), SOON, 0.5) / 5


def test_the_same_prompts_teach_the_same() -> None:
    first, second = taught(700), taught(700)
    assert first._learner._weights == second._learner._weights
    assert {n: seen.index for n, seen in first._seen.items()} == {
        n: seen.index for n, seen in second._seen.items()
    }


def test_nothing_is_known_before_two_hundred_prompts() -> None:
    returns = Returns()
    for number in range(199):
        returns.prompt(number, float(number), 100, 1)
        assert returns.worth(number) == (0.0, math.inf)
    returns.prompt(199, 199.0, 100, 1)
    assert returns.worth(199)[0] > 0.0


def test_while_it_is_answered_a_session_is_worth_more_than_any_that_waits() -> None:
    returns = taught()
    most = max(max(seen.index) for seen in returns._seen.values())
    returns.prompt(1 << 40, 10_000.0, 4000, 10, is_answered=True)
    assert returns.worth(1 << 40)[0] > most
    while returns.pass_time(10_000.0 + 500, 32):
        pass
    assert returns.worth(1 << 40)[0] <= most, "nobody said that it has ended"


def test_sessions_are_bounded_and_unknown_ones_are_worth_nothing() -> None:
    returns = Returns()
    for number in range(17_000):
        returns.prompt(number, float(number), 100, 1)
    assert len(returns._seen) == 16_384
    assert returns.worth(0)[0] == 0.0 < returns.worth(16_999)[0]
    assert not returns.answered(0, 5)
    while returns.pass_time(1e6, 1000):
        pass
    assert not returns._due


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 100)), min_size=1, max_size=17))
def test_the_best_ratio_is_that_of_the_best_stretch(bins: list[tuple[float, float]]) -> None:
    hits, seconds = [hit for hit, _ in bins], [second for _, second in bins]
    found = _best_ratios(hits, seconds)
    for at, best in enumerate(found):
        each = [sum(hits[at:end]) / sum(seconds[at:end]) for end in range(at + 1, len(bins) + 1)]
        assert best == pytest.approx(max(each))


def test_bins_begin_at_their_edges() -> None:
    assert [bin_of(edge) for edge in EDGES] == list(range(len(EDGES)))
    assert bin_of(-1.0) == 0 and bin_of(1e9) == len(EDGES) - 1


# ---- the order ----------------------------------------------------------------------------------


class Place:
    """A ByReturn, driven as shadows are."""

    def __init__(self, room: int, returns: Returns, saved: SavedCompute | None = None) -> None:
        self.order, self.returns, self.sessions = ByReturn(room, saved), returns, Sessions(10_000)
        self.left = set[ChunkKey]()
        """What left for the last prompt."""

    def prompt(self, run: Sequence[ChunkKey], at: float, answer: int | None = None) -> int:
        while passed := self.returns.pass_time(at, 32):
            self.order.changed(passed, self.returns, at)
        session, common = whole(self.sessions.seeing(run))
        self.returns.prompt(session, at, 256 * len(run), len(run), is_answered=answer is not None)
        before = set(self.order)
        held = whole(self.order.serving(SessionPrompt(run, session, at, common), self.returns))
        self.left = before - set(self.order)
        if answer is not None:
            self.returns.answered(session, answer)
            self.order.changed((session,), self.returns, at)
        return held


def keys(*numbers: int) -> list[ChunkKey]:
    return [ChunkKey(number.to_bytes(40)) for number in numbers]


def test_before_anything_is_known_the_session_used_longest_ago_leaves_leaf_first() -> None:
    place = Place(6, Returns())
    place.prompt(keys(1, 2, 3), 0.0)
    place.prompt(keys(11, 12, 13), 1.0)
    place.prompt(keys(21), 2.0)
    assert place.left == {*keys(3)}
    place.prompt(keys(1, 2), 3.0)
    place.prompt(keys(31, 32), 4.0)
    assert place.left == {*keys(13, 12)}


def test_who_will_be_back_soon_stays() -> None:
    place = Place(6, taught())
    place.prompt(keys(1, 2, 3), 10_000.0, SOON)
    place.prompt(keys(11, 12, 13), 10_000.1, LATE)
    place.prompt(keys(21, 22, 23), 10_000.2, LATE)
    assert place.left == {*keys(13, 12, 11)}
    assert place.prompt(keys(1, 2, 3, 4), 10_003.0, SOON) == 3


def test_what_two_sessions_have_outlives_them() -> None:
    place = Place(10, taught())
    place.prompt(keys(1, 2, 11, 12, 13), 10_000.0, LATE)
    place.prompt(keys(1, 2, 21, 22, 23), 10_001.0, LATE)
    place.prompt(keys(31, 32, 33, 34), 10_002.0, LATE)
    place.prompt(keys(41, 42, 43, 44), 10_003.0, LATE)
    assert len(place.left) == 4
    assert set(keys(1, 2)) <= set(place.order)
    assert place.prompt(keys(1, 2, 51, 52, 53), 10_004.0, LATE) == 2


def test_a_document_that_had_left_and_is_asked_for_again_is_known_as_shared() -> None:
    place = Place(8, taught())
    place.prompt(keys(1, 2, 3, *range(111, 116)), 10_000.0, LATE)
    place.prompt(keys(*range(21, 29)), 10_010.0, LATE)
    place.prompt(keys(1, 2, 3, 12, 13, 14, 15), 10_030.0, LATE)
    shared = place.order._where[keys(3)[0]]
    assert shared.shared and shared.gap == 30.0 and list(shared.keys) == keys(1, 2, 3)


def test_deep_chunks_stay_where_all_else_is_equal() -> None:
    saved = SavedCompute(256, 1000.0)
    place = Place(12, taught(), saved)
    place.prompt(keys(*range(1, 11)), 10_000.0, LATE)
    place.prompt(keys(11, 12), 10_000.1, LATE)
    place.prompt(keys(21), 10_000.2, LATE)
    assert place.left == {*keys(12)}


def test_the_branch_that_a_session_left_leaves_first() -> None:
    place = Place(6, taught())
    place.prompt(keys(1, 2, 3, 4), 10_000.0, LATE)
    place.prompt(keys(1, 2, 3, 5), 10_001.0, SOON)
    place.prompt(keys(11, 12), 10_002.0, SOON)
    assert place.left == {*keys(4)}


def test_what_is_over_leaves_first() -> None:
    place = Place(6, taught())
    place.prompt(keys(1, 2, 3), 10_000.0, SOON)
    place.prompt(keys(11, 12, 13), 10_001.0, LATE)
    whole(place.order.cooling(keys(1, 2, 3, 99)))
    place.prompt(keys(21, 22), 10_002.0, LATE)
    assert place.left == {*keys(3, 2)}
    assert place.prompt(keys(1), 10_003.0, SOON) == 1


def test_a_prompt_larger_than_the_room_keeps_its_beginning_in_pieces() -> None:
    place = Place(1000, taught())
    place.prompt(keys(*range(5000, 5400)), 9999.0, SOON)
    run = keys(*range(1, 4001))
    _, steps = whole(place.sessions.seeing(run)), 0
    for _ in place.order.serving(SessionPrompt(run, 77, 10_000.0), place.returns):
        steps += 1
    assert len(place.order) == 1000 and set(run[:1000]) == set(place.order)
    assert steps > 4000 // AT_ONCE


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 60), st.booleans())
def test_it_is_bounded_and_each_chunk_is_in_one_stack(seed: int, room: int, cost: bool) -> None:
    draw, runs = random.Random(seed), list[list[ChunkKey]]()
    place = Place(room, taught(250, seed % 7), SavedCompute() if cost else None)
    for number in range(120):
        base = draw.choice(runs)[: draw.randint(1, 9)] if runs and draw.random() < 0.7 else []
        more = [number * 100 + at for at in range(1, draw.randint(2, 12))]
        runs.append([*base, *keys(*more)])
        order, before = place.order, set(place.order)
        ready = next((at for at, key in enumerate(runs[-1]) if key not in before), len(runs[-1]))
        answer = draw.choice([None, SOON, LATE])
        assert place.prompt(runs[-1], 10_000.0 + 7 * number, answer) == ready
        if draw.random() < 0.1:
            whole(order.cooling(draw.choice(runs)))
        assert len(order) <= room
        assert set(order.named) <= before | set(runs[-1])
        stacks = [*order._own.values(), *order._shared.values(), order._dead]
        assert sorted(key for stack in stacks for key in stack.keys) == sorted(order)
        assert all(order._where[key] is stack for stack in stacks for key in stack.keys)
        assert len(order._heap) <= 64 + 4 * len(stacks)
