"""What is put together from homes: every token once, from the right place, without a hole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.spans import Range, homes
from kvtier.spans.plan import (
    PROMPT,
    Section,
    chunks_of,
    first_of,
    is_moved,
    pieces_of,
    ranges_of,
    seams_of,
    sections_of,
)

LENGTHS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=5)


def laid(anchor: int, lengths: list[tuple[int, int]]) -> list[Range]:
    """Ranges of an anchor and of spans: the hole before each, and its length."""
    ranges = [Range(0, anchor)]
    for hole, length in lengths:
        begin = ranges[-1].end + hole
        ranges.append(Range(begin, begin + length))
    return ranges


@given(anchor=st.integers(1, 7), lengths=LENGTHS, exact=st.integers(0, 30))
def test_sections_are_one_run_up_to_the_first_hole(
    anchor: int, lengths: list[tuple[int, int]], exact: int
) -> None:
    ranges = laid(anchor, lengths)
    exact = min(exact, ranges[-1].end)
    sections = sections_of(ranges, exact)
    if sections:
        assert sections[0].begin == 0
        assert all(one.end == other.begin for one, other in pairwise(sections))
        assert all(one.begin < one.end for one in sections)
    reach = sections[-1].end if sections else 0
    assert reach >= exact
    behind = [span for span in ranges[1:] if span.end > reach]
    if behind and sections:
        assert behind[0].begin > reach, "only a hole ends it"
    for section in sections:
        if section.source == PROMPT:
            assert (section.first, section.end) == (0, exact)
        else:
            span = ranges[section.source]
            assert section.end == span.end
            assert section.distance == span.begin - anchor


@given(
    anchor=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    exact=st.integers(0, 30),
    chunk=st.integers(1, 6),
    data=st.data(),
)
def test_pieces_are_the_prompts_tokens(
    anchor: int, lengths: list[int], exact: int, chunk: int, data: st.DataObject
) -> None:
    """Slots are filled as homes are cut into chunks; what pieces name in them is the prompt."""
    ranges = laid(anchor, [(0, length) for length in lengths])
    tokens = data.draw(st.permutations(range(1000, 1000 + ranges[-1].end)))
    exact = min(exact, len(tokens)) // chunk * chunk
    parts = [tokens[one.begin : one.end] for one in ranges]
    stored = [tokens, *(home.tokens for home in homes(parts[0], parts[1:], chunk))]
    sections = sections_of(ranges, exact)
    assert sections[-1].end == len(tokens)
    begin = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(begin, len(tokens)))
    slots: list[list[int]] = []
    found: dict[int, int] = {}
    for section in sections:
        chunks = chunks_of(section, chunk)
        source = stored[section.source]
        mine = list(range(len(slots), len(slots) + len(chunks)))
        slots += [source[index * chunk : (index + 1) * chunk] for index in chunks]
        for piece in pieces_of(section, mine, chunk, begin, end):
            assert piece.first + piece.tokens <= chunk
            assert piece.distance == section.distance
            for at in range(piece.tokens):
                assert piece.begin + at not in found
                found[piece.begin + at] = slots[piece.slot][piece.first + at]
    assert found == {place: tokens[place] for place in range(begin, end)}


def test_the_first_span_is_where_its_home_has_it_and_others_move() -> None:
    ranges = laid(10, [(0, 5), (0, 7)])
    assert sections_of(ranges, 0) == [Section(1, 0, 15, 0), Section(2, 15, 22, 10)]
    assert [section.distance for section in sections_of(ranges, 0)] == [0, 5]
    assert not is_moved(sections_of(ranges, 0)[:1])
    assert is_moved(sections_of(ranges, 0))


def test_a_hole_behind_the_anchor_leaves_nothing() -> None:
    assert sections_of(laid(10, [(1, 5)]), 0) == []


def test_what_the_prompt_has_itself_is_taken_as_far_as_it_goes() -> None:
    ranges = laid(10, [(0, 5), (0, 7)])
    assert sections_of(ranges, 18) == [Section(PROMPT, 0, 18, 0), Section(2, 18, 22, 13)]
    assert sections_of(ranges, 22) == [Section(PROMPT, 0, 22, 0)]


def test_ranges_are_read() -> None:
    assert ranges_of([[0, 3], (3, 9), [12, 20]], 20) == [(0, 3), (3, 9), (12, 20)]


@pytest.mark.parametrize(
    ("given_ranges", "told"),
    [
        ("all", "expected a list"),
        ([], "expected a list of 2"),
        ([[0, 3]], "expected a list of 2"),
        ([[1, 3], [3, 4]], "begins at 0"),
        ([[0, 3], [2, 4]], "between 3 and 20"),
        ([[0, 3], [3, 21]], "between 3 and 20"),
        ([[0, 3], [5, 5]], "between 3 and 20"),
        ([[0, 3], [9, 5]], "between 3 and 20"),
        ([[0, 0], [3, 5]], "between 0 and 20"),
        ([[0, 3], [3, 4.0]], "whole numbers"),
        ([[0, 3], [3, True]], "whole numbers"),
        ([[0, 3], [3]], "expected .begin, end."),
        ([[0, 3], 4], "expected .begin, end."),
        ([[0, 1]] * 2000, "expected a list of 2"),
    ],
)
def test_malformed_ranges_are_refused_with_what_is_wrong(given_ranges: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ranges_of(given_ranges, 20)


@given(
    anchor=st.integers(1, 7),
    lengths=LENGTHS,
    first=st.integers(0, 11),
    begin=st.integers(0, 30),
    end=st.integers(0, 60),
)
def test_seams_are_the_first_tokens_of_each_span_that_is_moved(
    anchor: int, lengths: list[tuple[int, int]], first: int, begin: int, end: int
) -> None:
    ranges = laid(anchor, lengths)
    wanted = {
        place
        for span in ranges[1:]
        if span.begin > anchor
        for place in range(span.begin, min(span.begin + first, span.end))
        if begin <= place < end
    }
    seams = seams_of(ranges, first, begin, end)
    assert [place for seam in seams for place in range(*seam)] == sorted(wanted)
    assert all(seam.begin < seam.end for seam in seams)


@pytest.mark.parametrize("given", [-1, True, "16", 1.5, None])
def test_how_many_tokens_are_computed_in_place_is_a_whole_number(given: Any) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        first_of(given)
