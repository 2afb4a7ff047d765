"""The workload: questions, each with some documents of a pool. Pure: a seed gives the same prompts.

A prompt is an anchor, documents and a question. Which documents a question gets is drawn without
replacement, by a Zipf distribution over the pool. Their order is shuffled. Lengths of documents
vary by half of the mean in both directions, so that they do not end where a chunk does.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.bench.flags import flag, shape_of
from kvtier.bench.requests.prompts import Ask
from kvtier.core.errors import StateError
from kvtier.spans import Order, compose, homes

FIELD, FIRST = "kvtier.spans", "kvtier.span_first"
"""Parameters of a request about its documents (kvtier/extensions/spans/README.md)."""
_LIKELIEST_TOKENS = 20
"""Tokens whose log-probabilities are asked for: as many as vLLM gives unless told otherwise."""
_WARM_UP_PROMPTS = 2


class Question(NamedTuple):
    """Parts of one request, in token ids. ``documents``: as the search gave them."""

    anchor: list[int]
    documents: list[list[int]]
    question: list[int]


def as_ask(
    index: int,
    number: int,
    question: Question,
    order: Order,
    output_len: int,
    first: int | None = None,
) -> Ask:
    """One question as a prompt. ``first``: it asks for its documents' homes, and that so many
    tokens of each are computed in place."""
    made = compose(_no_text, *question, order)
    params = {} if first is None else {FIELD: made.ranges, FIRST: first}
    return Ask(index, number, made.tokens, output_len, params=params, logprobs=_LIKELIEST_TOKENS)


def draw_documents(draw: random.Random, pool: int, found: int, zipf: float) -> list[int]:
    """Documents of one question: the first of the pool are found most often."""
    left = list(range(pool))
    drawn = []
    for _ in range(found):
        weights = [1 / (index + 1) ** zipf for index in left]
        (index,) = draw.choices(left, weights)
        left.remove(index)
        drawn.append(index)
    draw.shuffle(drawn)
    return drawn


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Sizes in tokens. ``words`` is what everything is drawn from."""

    words: Sequence[int]
    pool: int = flag(12, "documents that there are")
    documents: int = flag(4, "of the pool, a prompt")
    requests: int = flag(24, "a round")
    rounds: int = flag(3, "each with documents of its own, on the same server")
    zipf: float = flag(
        1.0, "exponent: how much more often the first of the pool are found", metavar="S"
    )
    anchor_length: int = flag(128, "tokens that every prompt of a round begins with")
    document_length: int = flag(256, "mean tokens of a document; they vary by half of it")
    question_length: int = flag(32, "tokens of it")
    output_len: int = flag(32, "tokens of an answer")
    max_inflight_requests: int = flag(1, "at once")
    seed: int = flag(0, "of documents, questions and order", type=int)

    @classmethod
    def of(cls, args: argparse.Namespace, words: Sequence[int]) -> Retrieval:
        return cls(words, **shape_of(args, cls))

    @property
    def longest(self) -> int:
        """Tokens of the longest request that there can be, its answer included."""
        documents = self.documents * (self.longest_home - self.anchor_length)
        return self.anchor_length + documents + self.question_length + self.output_len

    @property
    def longest_home(self) -> int:
        return self.anchor_length + self.document_length + self.document_length // 2

    def questions(self, number: int) -> list[Question]:
        anchor, pool = self._texts(number)
        draw = random.Random(f"{self.seed}/{number}/found")
        return [
            Question(
                anchor,
                [pool[at] for at in draw_documents(draw, self.pool, self.documents, self.zipf)],
                self._draw(number, f"question {index}", self.question_length),
            )
            for index in range(self.requests)
        ]

    def asks(self, number: int, order: Order, first: int | None = None) -> list[Ask]:
        """The same as prompts. ``document`` of an Ask is the request, ``question`` the round.
        ``first``: as :func:`as_ask`."""
        return [
            as_ask(index, number, question, order, self.output_len, first)
            for index, question in enumerate(self.questions(number))
        ]

    def homes(self, number: int, chunk_tokens: int) -> list[Ask]:
        found = homes(*self._texts(number), chunk_tokens)
        return [Ask(index, number, home.tokens, 1) for index, home in enumerate(found)]

    def warm_up(self) -> list[Ask]:
        return [
            Ask(-1 - index, -1, self._draw(-1, f"warm-up {index}", self.document_length), 2)
            for index in range(_WARM_UP_PROMPTS)
        ]

    def _texts(self, number: int) -> tuple[list[int], list[list[int]]]:
        anchor = self._draw(number, "anchor", self.anchor_length)
        return anchor, [self._document(number, index) for index in range(self.pool)]

    def _document(self, number: int, index: int) -> list[int]:
        half = self.document_length // 2
        draw = random.Random(f"{self.seed}/{number}/length {index}")
        length = self.document_length + draw.randint(-half, half)
        return self._draw(number, f"document {index}", length)

    def _draw(self, number: int, what: str, length: int) -> list[int]:
        return random.Random(f"{self.seed}/{number}/{what}").choices(self.words, k=length)


def _no_text(text: str) -> list[int]:
    raise StateError(f"every part of a prompt is token ids, and not {text!r}")
