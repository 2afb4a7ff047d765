"""RAM's live order: what a plan names leaves first, and without a plan it is that of Segments, to
the key, whatever happened in between."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunk import ChunkKey
from kvtier.eviction.planned import Planned
from kvtier.eviction.segments import SETTINGS, Segments, Setting

KEYS = [ChunkKey(bytes([number]) * 40) for number in range(12)]
A, B, C, D, *_ = KEYS
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "used", "ordered", "evicted", "discard", "cool", "plan"]),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    ),
    max_size=60,
)


def do(policy: Segments, step: str, run: Sequence[ChunkKey]) -> None:
    if step in {"used", "ordered", "cool"}:
        getattr(policy, step)(run)
    elif step == "add":
        for key in run:
            policy.add((key,))
    elif step == "evicted":
        policy.evicted([key for key in run if key in policy])
    elif step == "discard":
        for key in run:
            policy.discard(key)


@given(STEPS, st.sampled_from(SETTINGS))
def test_a_plan_moves_nothing(steps: list[tuple[str, list[ChunkKey]]], setting: Setting) -> None:
    planned, plain = Planned(8), Segments(8, setting)
    planned.settle(setting)
    named = dict[ChunkKey, None]()
    for step, run in steps:
        if step == "plan":
            planned.leave_first(run)
            named |= dict.fromkeys(key for key in run if key in plain)
        else:
            before = {key for key in named if key not in run} if step != "cool" else set(named)
            do(planned, step, run)
            do(plain, step, run)
            if step == "cool" and named:
                cooled = [key for key in reversed(run) if key in plain]
                named = dict.fromkeys([*cooled, *(key for key in named if key not in cooled)])
            else:
                named = {key: None for key in named if key in before}
        others = [key for key in plain if key not in named]
        assert list(planned) == [*named, *others]
        assert planned.coldest() == next(iter(planned), None)
        assert len(planned) == len(plain) and all(key in planned for key in plain)
    planned.end_plan()
    assert list(planned) == list(plain)


def test_what_is_used_or_saved_again_is_in_no_plan() -> None:
    planned = Planned(8)
    for key in (A, B, C, D):
        planned.add((key,))
    planned.leave_first([D, C, B, KEYS[9]])
    assert list(planned) == [D, C, B, A]
    planned.used([D])
    planned.add((C,))
    assert list(planned) == [B, A, D, C]


def test_what_is_over_leaves_first_also_where_the_plan_named_nothing_else() -> None:
    planned = Planned(8)
    planned.add((A, B, C))
    planned.leave_first([B])
    planned.cool([B])
    planned.leave_first([C])
    assert list(planned) == [B, C, A]
