"""What is put together from homes: every token once, from the right place, and what
is computed in place because it is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connectors.vllm.groups import InPlaceRun
from kvtier.extensions.spans.plan import (
    PROMPT,
    Section,
    bounded,
    chunks_of,
    first_of,
    in_blocks,
    is_moved,
    pieces_of,
    ranges_of,
    runs_of,
    sections_of,
)
from kvtier.spans import Range, homes

LENGTHS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=5)


def laid(anchor, lengths):
    """Ranges of an anchor and of spans: the hole before each, and its length."""
    ranges = [Range(0, anchor)]
    for hole, length in lengths:
        begin = ranges[-1].end + hole
        ranges.append(Range(begin, begin + length))
    return ranges


@st.composite
def laid_out(draw):
    """Ranges, how many tokens are known of the prompt itself, and how many of each home."""
    ranges = laid(draw(st.integers(1, 7)), draw(LENGTHS))
    whole = [ranges[0].end + span.end - span.begin for span in ranges[1:]]
    known = [
        draw(st.sampled_from([0, length, length]) | st.integers(0, length)) for length in whole
    ]
    return ranges, draw(st.just(0) | st.integers(0, ranges[-1].end)), known


@given(laid_out())
def test_sections_are_all_that_is_known_each_token_once(given):
    ranges, exact, known = given
    anchor, sections = ranges[0].end, sections_of(*given)
    found = [place for one in sections for place in range(one.begin, one.end)]
    wanted = set(range(exact))
    wanted |= set(range(anchor)) if any(home >= anchor for home in known) else set()
    for span, home in zip(ranges[1:], known, strict=True):
        wanted |= set(range(span.begin, min(span.end, span.begin + home - anchor)))
    assert found == sorted(wanted)
    for section in sections:
        if section.source == PROMPT:
            assert (section.first, section.end) == (0, exact)
            continue
        assert section.first + section.end - section.begin <= known[section.source - 1]
        if section.begin >= anchor:
            assert section.distance == ranges[section.source].begin - anchor
        else:
            assert section.distance == 0


@given(laid_out(), st.integers(0, 6), st.integers(0, 40))
def test_runs_are_the_holes_and_the_first_tokens_of_what_is_moved(given, first, begin):
    ranges, sections = given[0], sections_of(*given)
    there = {place for one in sections for place in range(one.begin, one.end)}
    last = max(there, default=-1)
    seams = {
        place
        for one in sections
        if one.distance
        for place in range(one.begin, min(one.end, ranges[one.source].begin + first))
    }
    wanted = {place for place in range(begin, last + 1) if place not in there or place in seams}
    runs = runs_of(ranges, sections, first, begin)
    behind = {run.moved for run in runs if run.begin < run.moved}
    assert sorted(wanted | behind) == [place for run in runs for place in range(run.begin, run.end)]
    for run in runs:
        assert run.begin <= run.moved < run.end, "each has a token that shows whether it is right"
        assert not there & set(range(run.begin, run.moved))
        assert set(range(run.moved, run.end)) <= there


@given(laid_out(), st.integers(0, 6), st.integers(0, 40), st.integers(0, 30))
def test_no_more_is_computed_in_place_than_is_allowed(given, first, begin, most):
    ranges, sections = given[0], sections_of(*given)
    found = bounded(ranges, sections, first, begin, most)
    assert found == sections[: len(found)]

    def tokens(some):
        return sum(run.end - run.begin for run in runs_of(ranges, some, first, begin))

    assert tokens(found) <= most
    if len(found) < len(sections):
        assert tokens(sections[: len(found) + 1]) > most, "it is the longest"


@given(laid_out(), st.integers(0, 60), st.integers(1, 8))
def test_sections_end_with_a_whole_block_and_a_token_that_is_there(given, longest, block):
    sections = sections_of(*given)
    found = in_blocks(sections, longest, block)
    there = {place for one in sections for place in range(one.begin, one.end)}
    ends = [end for end in range(block, longest + 1, block) if end - 1 in there]
    assert (found[-1].end if found else 0) == (ends[-1] if ends else 0)
    kept = {place for one in found for place in range(one.begin, one.end)}
    assert kept == {place for place in there if ends and place < ends[-1]}


@given(
    anchor=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    exact=st.integers(0, 30),
    chunk=st.integers(1, 6),
    data=st.data(),
)
def test_pieces_are_the_prompts_tokens(anchor, lengths, exact, chunk, data):
    """Slots are filled as homes are cut into chunks. What pieces name in them is the prompt."""
    ranges = laid(anchor, [(0, length) for length in lengths])
    tokens = data.draw(st.permutations(range(1000, 1000 + ranges[-1].end)))
    exact = min(exact, len(tokens)) // chunk * chunk
    parts = [tokens[one.begin : one.end] for one in ranges]
    stored = [tokens, *(home.tokens for home in homes(parts[0], parts[1:], chunk))]
    whole = [anchor + span.end - span.begin for span in ranges[1:]]
    sections = sections_of(ranges, exact, whole)
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


def test_the_first_span_is_where_its_home_has_it_and_others_move():
    ranges = laid(10, [(0, 5), (0, 7)])
    sections = sections_of(ranges, 0, [15, 17])
    assert sections == [Section(1, 0, 15, 0), Section(2, 15, 22, 10)]
    assert [section.distance for section in sections] == [0, 5]
    assert not is_moved(sections[:1])
    assert is_moved(sections)


def test_every_home_has_the_anchor():
    """The first home is not there, and the second span is not next to it."""
    ranges = laid(10, [(0, 5), (1, 7)])
    sections = sections_of(ranges, 0, [0, 17])
    assert sections == [Section(2, 0, 10, 0), Section(2, 16, 23, 10)]
    assert runs_of(ranges, sections, 0, 0) == [InPlaceRun(10, 16, 17)]
    assert runs_of(ranges, sections, 3, 0) == [InPlaceRun(10, 16, 19)]
    assert runs_of(ranges, sections, 0, 12) == [InPlaceRun(12, 16, 17)], "what is computed stays"


def test_what_is_missing_of_a_home_is_a_hole():
    ranges = laid(10, [(0, 8), (0, 7)])
    sections = sections_of(ranges, 0, [14, 17])
    assert sections == [Section(1, 0, 14, 0), Section(2, 18, 25, 10)]
    assert bounded(ranges, sections, 0, 0, 5) == sections
    assert bounded(ranges, sections, 0, 0, 4) == sections[:1]
    assert bounded(ranges, sections, 0, 0, 0) == sections[:1], "nothing is computed in place"


def test_what_the_prompt_has_itself_is_taken_as_far_as_it_goes():
    ranges = laid(10, [(0, 5), (0, 7)])
    behind = [Section(PROMPT, 0, 18, 0), Section(2, 18, 22, 13)]
    assert sections_of(ranges, 18, [15, 17]) == behind
    assert sections_of(ranges, 22, [15, 17]) == [Section(PROMPT, 0, 22, 0)]


def test_ranges_are_read():
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
        ([[0, 1]] * 66, "66 ranges: expected a list of 2 to 65"),
    ],
)
def test_malformed_ranges_are_refused_with_what_is_wrong(given_ranges, told):
    with pytest.raises(ValueError, match=told):
        ranges_of(given_ranges, 20)


@pytest.mark.parametrize("given", [-1, True, "16", 1.5, None])
def test_how_many_tokens_are_computed_in_place_is_a_whole_number(given):
    with pytest.raises(ValueError, match="expected a whole number"):
        first_of(given)
