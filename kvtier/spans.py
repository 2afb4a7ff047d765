"""A prompt made of an anchor, documents and a question, and the prompts that warm its documents.

The functions are pure, and they need neither torch nor vLLM. A client can import them. What an
engine makes of such prompts is an extension (:mod:`kvtier.extensions.spans`).

The *anchor* is what every prompt begins with: the first token, the system prompt, the tools. A
*home* is the prompt ``anchor + one document``. It is an ordinary prompt with ordinary keys.

Each part is tokenised by itself, so that a document has the same tokens wherever it stands. In a
text that is tokenised as a whole, the tokens at a seam depend on both sides of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from kvtier.core.errors import ConfigError

Tokenize = Callable[[str], Sequence[int]]
Part = str | Sequence[int]
Order = Literal["given", "stable"]

_ENCODE = "such as lambda text: tokenizer.encode(text, add_special_tokens=False)"


class Range(NamedTuple):
    """Places of tokens in a prompt, from ``begin`` up to and without ``end``."""

    begin: int
    end: int


class Composed(NamedTuple):
    """A prompt, and where its parts lie."""

    tokens: list[int]
    ranges: list[Range]
    """Range of the anchor, then of each document, as they stand in the prompt."""
    documents: list[int]
    """For each range after the anchor's, the index of its document in the given sequence."""


class Home(NamedTuple):
    """A prompt that brings one document into the cache."""

    tokens: list[int]
    """Anchor, document and filler: whole chunks."""
    document: Range
    """Place of the document in the tokens."""


def compose(
    tokenize: Tokenize,
    anchor: Part,
    documents: Sequence[Part],
    question: Part,
    order: Order = "given",
) -> Composed:
    """Put a prompt together: the anchor, the documents, the question.

    With the order ``stable`` documents are sorted by their tokens, so that prompts with the same
    documents have the same prefix. It is for questions to which their order does not matter.

    ``tokenize`` adds no special tokens: those belong in ``anchor``. Each part is a text or a list
    of token ids, which is taken as it is. Raises ConfigError for an empty part, a ``tokenize`` that
    adds tokens of its own, and an unknown order."""
    if order not in get_args(Order):
        known = " or ".join(get_args(Order))
        raise ConfigError(f"order={order!r}: expected {known}")
    parts = [anchor, *documents, question]
    if any(isinstance(part, str) for part in parts):
        _expect_nothing_added(tokenize)
    first = _tokens(tokenize, anchor, "the anchor")
    middle = [
        _tokens(tokenize, document, f"document {index}") for index, document in enumerate(documents)
    ]
    last = _tokens(tokenize, question, "the question")
    places = list(range(len(middle)))
    if order == "stable":
        places.sort(key=middle.__getitem__)
    tokens, ranges = list(first), [Range(0, len(first))]
    for place in places:
        ranges.append(Range(len(tokens), len(tokens) + len(middle[place])))
        tokens += middle[place]
    return Composed(tokens + last, ranges, places)


def homes(
    anchor: Sequence[int], documents: Sequence[Sequence[int]], chunk_tokens: int
) -> list[Home]:
    """Return the home of each document, in their order.

    A home ends with *filler* up to a whole chunk: the document's last token again and again, which
    no token of the document sees. Raises ConfigError for an empty part and for a chunk that is no
    positive number."""
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ConfigError(
            f"chunk_tokens={chunk_tokens!r}: expected tokens, at least 1; give the engine's "
            "chunk_tokens, which its log names at the start"
        )
    first = _ids(anchor, "the anchor")
    made = []
    for index, document in enumerate(documents):
        ids = _ids(document, f"document {index}")
        end = len(first) + len(ids)
        made.append(Home(filled([*first, *ids], chunk_tokens), Range(len(first), end)))
    return made


def filled(tokens: list[int], chunk_tokens: int) -> list[int]:
    """Return ``tokens``, which end with a document, with filler up to a whole number of chunks."""
    return tokens + tokens[-1:] * (-len(tokens) % chunk_tokens)


def _expect_nothing_added(tokenize: Tokenize) -> None:
    """Raises ConfigError when an empty text has tokens: every document would begin with them."""
    added = list(tokenize(""))
    if added:
        raise ConfigError(
            f"tokenize('') gave the tokens {added}: expected none, because every part is tokenised "
            f"by itself; give a function that adds no special tokens, {_ENCODE}, and write special "
            "tokens into the anchor"
        )


def _tokens(tokenize: Tokenize, part: Part, what: str) -> list[int]:
    return _ids(tokenize(part) if isinstance(part, str) else part, what)


def _ids(given: Sequence[int], what: str) -> list[int]:
    if isinstance(given, str | bytes):
        raise ConfigError(f"{what} is a text: expected token ids; tokenise it first, {_ENCODE}")
    try:
        ids = [operator.index(token) for token in given]
    except TypeError as error:
        raise ConfigError(
            f"{what} is a {type(given).__name__} that holds something else than whole numbers "
            f"({error}): expected token ids, {_ENCODE}"
        ) from error
    if not ids:
        raise ConfigError(f"{what} has no tokens: expected at least one; leave out what is empty")
    negative = next((token for token in ids if token < 0), None)
    if negative is not None:
        raise ConfigError(f"{what} has the token {negative}: expected token ids, which begin at 0")
    return ids
