"""What bench/rounding.py makes of answers: where two part, the margin there, and its rows. No
engine."""

from __future__ import annotations

import pytest

from kvtier.bench.rounding import WAYS, Answer, Parting, compared, differing

SAME = Answer([5, 6, 7], [1.0, 2.0, 3.0])


def test_an_answer_parts_at_its_first_other_token_and_the_margins_are_those_of_that_token() -> None:
    one, other = Answer([5, 6, 7], [1.0, 1e-6, 3.0]), Answer([5, 8, 9], [1.0, 2e-6, 0.5])
    assert differing([SAME, one], [SAME, other]) == [Parting(1, 1, (1e-6, 2e-6))]
    assert differing([SAME], [SAME]) == []


def test_answers_with_other_margins_and_the_same_tokens_are_the_same() -> None:
    assert differing([SAME], [Answer(SAME.tokens, [0.9, 2.1, 3.0])]) == []


def test_rows_count_answers_and_name_the_widest_margin() -> None:
    other = Answer([5, 6, 8], [1.0, 2.0, 0.25])
    rows, partings = compared({WAYS[0]: [SAME, SAME], WAYS[1]: [SAME, other]})
    values = {row.name.rpartition(": ")[2]: (row.value, row.limit) for row in rows}
    wanted = {
        "answers that differ": (1, 2),
        "widest margin where they part": (3.0, None),
        "narrowest margin of all tokens": (1.0, None),
    }
    assert {name: values[name] for name in wanted} == wanted
    between = f"{WAYS[0]} | {WAYS[1]}"
    assert partings == [{"between": between, "question": 1, "token": 2, "margins": (3.0, 0.25)}]


def test_answers_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        differing([SAME], [Answer([5], [1.0])])
