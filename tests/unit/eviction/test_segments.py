"""Segments: every setting against its own words. The first is LRU, and a shadow serves as a
Directory would."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import whole
from kvtier.eviction.adaptive import Shadow
from kvtier.eviction.order import LRU_SETTING, SETTINGS, Segments, Setting
from kvtier.store.directory import Directory

KEYS = [ChunkKey(bytes([number]) * 40) for number in range(12)]
A, B, C, D, *_ = KEYS
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "used", "ordered", "evicted", "discard"]),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    ),
    max_size=60,
)


def do(policy, step, run):
    if step in ("used", "ordered"):
        getattr(policy, step)(run)
    elif step == "add":
        policy.add((run[0],), 7)
    elif step == "discard":
        policy.discard(run[0])
    elif (victim := policy.coldest()) is not None:
        policy.evicted((victim,))


@given(STEPS)
def test_the_first_setting_is_lru(steps):
    lru, segments = list[ChunkKey](), Segments(6)
    for step, run in steps:
        do(segments, step, run)
        if step == "evicted":
            del lru[:1]
        else:
            moved = run[:1] if step in ("add", "discard") else [key for key in run if key in lru]
            lru = [key for key in lru if key not in moved]
            lru += moved[::-1] if step != "discard" else []
        assert list(segments) == lru and not segments._ghosts
        assert [segments.owner(key) for key in KEYS] == [7 * (key in lru) for key in KEYS]


@given(
    STEPS,
    st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(SETTINGS), st.integers(0, 8)), max_size=4
    ),
)
def test_any_setting_at_any_time_knows_the_same_keys(steps, changes):
    segments, known = Segments(6), set[ChunkKey]()
    for at, (step, run) in enumerate(steps):
        for when, setting, room in changes:
            if when == at:
                segments.settle(setting)
                segments.resize(room)
        victim = segments.coldest()
        do(segments, step, run)
        known |= {run[0]} if step == "add" else set()
        known -= {run[0]} if step == "discard" else {victim} if step == "evicted" else set()
        assert set(segments) == known and len(segments) == len(known)
        assert all((key in segments) == (key in known) for key in KEYS)


def test_what_was_used_again_stays_before_what_came_once():
    segments = Segments(4, Setting(0.5, 1.0))
    for key in (A, B, C):
        segments.add((key,))
    segments.used([A])
    assert list(segments) == [B, C, A]
    segments.used([C, B])
    assert list(segments) == [A, B, C], (
        "the second list has room for two: the coldest of it goes back"
    )


def test_to_be_ordered_is_no_use():
    segments = Segments(4, Setting(0.5, 1.0))
    for key in (A, B, C):
        segments.add((key,))
    segments.used([C])
    segments.ordered([A, B])
    assert list(segments) == [B, A, C]


def test_what_comes_back_soon_is_known_and_later_it_is_not():
    segments = Segments(2, Setting(0.5, 2.0))
    for key in (A, B, C):
        segments.add((key,))
    segments.evicted((A,))
    segments.add((A,))
    assert list(segments) == [B, C, A]
    segments.evicted((B,))
    for number in range(4):
        segments.add((KEYS[5 + number],))
        segments.evicted((KEYS[5 + number],))
    segments.add((B,))
    assert list(segments) == [C, B, A], "it left too long ago"


def test_what_was_forgotten_is_not_remembered():
    segments = Segments(2, Setting(0.5, 2.0))
    segments.add((A,))
    segments.evicted((A,))
    segments.discard(A)
    segments.add((A,))
    segments.add((B,))
    assert list(segments) == [A, B]


def test_back_to_lru_a_few_keys_move_at_a_time():
    segments = Segments(1000, SETTINGS[1])
    keys = [ChunkKey(number.to_bytes(40, "big")) for number in range(500)]
    for key in keys:
        segments.add((key,))
    segments.used(keys)
    segments.settle(LRU_SETTING)
    before = list(segments)
    segments.ordered([])
    assert len(segments._once) <= 8, "nobody waits for 500 moves"
    for _ in range(500):
        segments.ordered([])
    assert list(segments) == before and not segments._again


def test_in_a_smaller_place_no_eviction_waits_until_all_is_forgotten_that_is_too_much():
    segments = Segments(1000, SETTINGS[1])
    keys = [ChunkKey(number.to_bytes(40, "big")) for number in range(900)]
    segments.add(keys)
    segments.evicted(keys[:800])
    segments.resize(10)
    for first in range(800, 900, 10):
        before = len(segments._ghosts)
        segments.evicted(keys[first : first + 10])
        assert len(segments._ghosts) == before, "as many are forgotten as leave"


@pytest.mark.parametrize("setting", [LRU_SETTING, Setting(0.1, 1.0)], ids=lambda one: one.name)
def test_under_a_smaller_share_no_use_waits_for_more_moves_than_its_own_and_a_few(setting):
    segments = Segments(1000, SETTINGS[1])
    keys = [ChunkKey(number.to_bytes(40, "big")) for number in range(800)]
    for key in keys:
        segments.add((key,))
    segments.used(keys[:700])
    segments.settle(setting)
    for at in range(0, 800, 8):
        before, part = len(segments._again), keys[at : at + 8]
        new = sum(key in segments._once for key in part) if segments._protected else 0
        segments.used(part)
        moved = before + new - len(segments._again)
        assert 0 <= moved <= new + 4
    for _ in range(200):
        segments.used([])
    assert len(segments._again) == segments._protected


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("room", [5, 40])
def test_a_shadow_hits_what_a_directory_hits(setting, room):
    draw = random.Random(room)
    runs = list[list[ChunkKey]]()
    for number in range(400):
        base = draw.choice(runs)[: draw.randint(1, 9)] if runs and draw.random() < 0.6 else []
        runs.append(
            [
                *base,
                *(
                    ChunkKey(bytes([number % 256, number >> 8, at]) * 16)
                    for at in range(draw.randint(1, 6))
                ),
            ]
        )
    shadow, directory = (
        Shadow(room, setting),
        Directory(room, policy=lambda room: Segments(room, setting)),
    )
    for run in runs:
        ready = directory.ready_run(run)
        directory.used(run)
        assert whole(shadow.serving(run)) == ready
        keep, entries = frozenset(run), []
        directory.ordered(run)
        for key in run:
            if directory.get(key) is None:
                entry = directory.reserve(key, keep)
                if entry is None:
                    break
                entries.append(entry)
        for entry in reversed(entries):
            directory.filled((entry,))
        directory.ordered(run)
        directory.check()
        assert set(shadow) == set(directory.keys())
