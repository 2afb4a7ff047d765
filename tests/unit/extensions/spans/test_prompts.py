"""Prompts of documents: each token is in its place, and the stable order makes prompts alike."""

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError
from kvtier.spans import compose, homes

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=6)
PARTS = st.lists(TOKENS, max_size=6)


def spell(text):
    """A token for each character."""
    return [ord(letter) for letter in text]


def alike(one, other):
    """Tokens that both begin with."""
    for length, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return length
    return min(len(one), len(other))


def test_parts_are_tokenised_one_by_one_and_told_where_they_lie():
    asked: list[str] = []

    def tokenize(text):
        asked.append(text)
        return spell(text)

    made = compose(tokenize, "<s>", ["cat", "a dog"], "?")
    assert made.tokens == spell("<s>cata dog?")
    assert made.ranges == [(0, 3), (3, 6), (6, 11)]
    assert made.documents == [0, 1]
    assert asked == ["", "<s>", "cat", "a dog", "?"]


@given(anchor=TOKENS, documents=PARTS, question=TOKENS, order=st.sampled_from(["given", "stable"]))
def test_ranges_cover_all_but_the_question_once(anchor, documents, question, order):
    made = compose(spell, anchor, documents, question, order)
    assert made.ranges[0] == (0, len(anchor))
    assert all(one.end == other.begin for one, other in pairwise(made.ranges))
    assert made.tokens[made.ranges[-1].end :] == question
    assert made.tokens[: len(anchor)] == anchor
    assert sorted(made.documents) == list(range(len(documents)))
    for where, which in zip(made.ranges[1:], made.documents, strict=True):
        assert made.tokens[where.begin : where.end] == documents[which]
    if order == "given":
        assert made.documents == sorted(made.documents)


def test_a_search_that_gives_the_same_documents_in_another_order_shares_all_of_them():
    found = ["cat", "dog", "ant"]
    orders = [compose(spell, "<s>", found[turn:] + found[:turn], "?") for turn in range(3)]
    stable = [
        compose(spell, "<s>", found[turn:] + found[:turn], "?", "stable") for turn in range(3)
    ]
    assert alike(orders[0].tokens, orders[1].tokens) == 3
    assert {tuple(made.tokens) for made in stable} == {tuple(spell("<s>antcatdog?"))}
    assert [made.documents for made in stable] == [[2, 0, 1], [1, 2, 0], [0, 1, 2]]


def test_token_ids_are_taken_as_they_are():
    def never(text):
        raise AssertionError(text)

    made = compose(never, [1, 2], [np.array([3, 4])], (5,))  # type: ignore[list-item]
    assert made.tokens == [1, 2, 3, 4, 5]
    assert all(type(token) is int for token in made.tokens)


def test_without_documents_there_is_the_anchors_range_alone():
    assert compose(spell, "a", [], "b").ranges == [(0, 1)]


def test_a_tokenizer_that_adds_its_own_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"tokenize\(''\) gave the tokens \[1\].*special tokens"):
        compose(lambda text: [1, *spell(text)], "a", ["b"], "c")


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (("", ["b"], "c"), "the anchor has no tokens"),
        (("a", ["b", ""], "c"), "document 1 has no tokens"),
        (("a", ["b"], []), "the question has no tokens"),
        (("a", ["b", [1, -2]], "c"), "document 1 has the token -2"),
        (("a", [[1.5]], "c"), "document 0 is a list that holds something else"),
        (("a", [{"input_ids": [1]}], "c"), "document 0 is a dict that holds something else"),
    ],
)
def test_a_part_that_is_none_is_named(parts, told):
    with pytest.raises(ConfigError, match=told):
        compose(spell, *parts)


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigError, match="order='random': expected given or stable"):
        compose(spell, "a", ["b"], "c", cast(Any, "random"))


@given(anchor=TOKENS, documents=PARTS, chunk=st.integers(1, 9))
def test_a_home_is_whole_chunks_and_never_one_too_many(anchor, documents, chunk):
    made = homes(anchor, documents, chunk)
    assert len(made) == len(documents)
    for home, document in zip(made, documents, strict=True):
        begin, end = home.document
        assert home.tokens[:begin] == anchor
        assert home.tokens[begin:end] == document
        assert set(home.tokens[end:]) <= {document[-1]}
        assert len(home.tokens) % chunk == 0
        assert len(home.tokens) - end < chunk


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True, None])
def test_a_chunk_that_is_none_is_refused(chunk):
    with pytest.raises(ConfigError, match=r"chunk_tokens=.*expected tokens, at least 1"):
        homes([1], [[2]], chunk)


def test_texts_are_no_homes():
    with pytest.raises(ConfigError, match="document 0 is a text: expected token ids"):
        homes([1], ["cat"], 4)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="the anchor has no tokens"):
        homes([], [[2]], 4)
