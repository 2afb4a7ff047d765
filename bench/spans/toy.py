"""The toy's task: made-up documents, and questions about them whose answers are known.

A document begins with its name and ends with a word of its own. Between them stand facts (a key and
a value) and filler. Some keys stand in several documents. Some facts have another key as their
value. There are four kinds of questions (:data:`KINDS`). Each has a single token as its answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.bench.spans.arms import Question, draw_documents

KINDS = ("inside", "order", "neighbour", "two-hops")
"""``inside``: a key that one document has. Asked is its value.

``order``: a key that several documents have. Asked is its value in the last of them.

``neighbour``: the last word of a document. Asked is the name of the document behind it.

``two-hops``: a key whose value is a key of an earlier document. Asked is that one's value."""


def _numbered(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


_SPECIAL = ["<unk>", "<s>", "</s>"]
_ASKED = [f"{kind}?" for kind in KINDS]
_FILLER, _NAMES, _ENDS = _numbered("w", 8), _numbered("n", 24), _numbered("e", 24)
_KEYS, _VALUES = _numbered("k", 64), _numbered("v", 24)
WORDS = [*_SPECIAL, *_ASKED, *_FILLER, *_NAMES, *_ENDS, *_KEYS, *_VALUES]
_ID = {word: number for number, word in enumerate(WORDS)}
_SHARED = 3
"""Keys that several documents have. Each document has one of them."""
_PLAIN, _POINTING = 3, 2
"""A document's other facts. Of so many the value is a key."""
SHORTEST = 2 + 3 * (1 + _PLAIN + _POINTING)
FOUND, LENGTHS, ANCHOR = 6, (64, 128), 32
"""Documents of a prompt, and tokens of each and of the anchor, as the benchmark has them."""
LONGEST = ANCHOR + FOUND * LENGTHS[1] + 3
POOL = min(len(_NAMES), (len(_KEYS) - _SHARED) // (_PLAIN + _POINTING))
"""Documents of a pool: as many as there are keys for."""


class Document(NamedTuple):
    tokens: list[int]
    facts: Mapping[int, int]


class Asked(NamedTuple):
    """A question about documents in their order. ``place``: where its answer is to be found, as a
    place in the documents' tokens, one document behind the other."""

    kind: str
    tokens: list[int]
    answer: int
    place: int


class Known(NamedTuple):
    """The kind of a question, and the one token of its answer."""

    kind: str
    answer: int


@dataclass(frozen=True, slots=True)
class Told:
    """Documents in an order, and all that can be asked about them. ``resolved``: where a fact
    points to an earlier document: its place, and the place of the value that it leads to."""

    tokens: list[int]
    asked: list[Asked]
    resolved: list[tuple[int, int]] = field(default_factory=list)


def anchor(length: int) -> list[int]:
    return [_ID["<s>"], *(_ID[_FILLER[index % len(_FILLER)]] for index in range(length - 1))]


def filler(draw: random.Random, length: int) -> list[int]:
    return [_ID[word] for word in draw.choices(_FILLER, k=length)]


def is_filler(token: int) -> bool:
    return WORDS[token] in _FILLER


def pool(draw: random.Random, lengths: Sequence[int]) -> list[Document]:
    """Documents of these lengths, whose facts point to each other."""
    keys = [_ID[key] for key in draw.sample(_KEYS, len(_KEYS))]
    shared, own = keys[:_SHARED], iter(keys[_SHARED:])
    plain = [[next(own) for _ in range(_PLAIN)] for _ in lengths]
    names = draw.sample(range(len(_NAMES)), len(lengths))
    made = []
    for index, length in enumerate(lengths):
        facts = [(key, _value(draw)) for key in [draw.choice(shared), *plain[index]]]
        others = [key for other, each in enumerate(plain) if other != index for key in each]
        facts += [
            (next(own), draw.choice(others) if others else _value(draw)) for _ in range(_POINTING)
        ]
        draw.shuffle(facts)
        made.append(_document(draw, names[index], facts, length))
    return made


def _value(draw: random.Random) -> int:
    return _ID[draw.choice(_VALUES)]


def _document(
    draw: random.Random, name: int, facts: Sequence[tuple[int, int]], length: int
) -> Document:
    room = [0] * (len(facts) + 1)
    for _ in range(length - 2 - 3 * len(facts)):
        room[draw.randrange(len(room))] += 1
    tokens, where = [_ID[_NAMES[name]], *filler(draw, room[0])], {}
    for (key, value), more in zip(facts, room[1:], strict=True):
        where[key] = len(tokens) + 1
        tokens += [key, value, *filler(draw, 1 + more)]
    return Document([*tokens, _ID[_ENDS[name]]], where)


def tell(documents: Sequence[Document]) -> Told:
    """The documents in this order, and what can be asked about them."""
    tokens: list[int] = []
    begins, places = [], {}
    found: dict[int, list[int]] = {}
    for document in documents:
        begins.append(len(tokens))
        for key, place in document.facts.items():
            found.setdefault(key, []).append(len(tokens) + place)
        tokens += document.tokens
    told = Told(tokens, [])
    for begin in begins[1:]:
        _add(told, "neighbour", tokens[begin - 1], begin, begin)
    for key, where in found.items():
        places[key] = where[-1]
        if WORDS[tokens[where[-1]]] in _VALUES:
            _add(told, "order" if len(where) > 1 else "inside", key, where[-1], where[-1])
    for key, place in places.items():
        target = places.get(tokens[place])
        if target is not None and target < place:
            told.resolved.append((place, target))
            _add(told, "two-hops", key, place, target)
    return told


def _add(told: Told, kind: str, about: int, place: int, answer: int) -> None:
    told.asked.append(Asked(kind, [_ID[f"{kind}?"], about], told.tokens[answer], place))


def questions(count: int, zipf: float, seed: int) -> list[tuple[Question, Known]]:
    """Questions about documents of one pool. Kinds take turns."""
    draw, made = random.Random(seed), list[tuple[Question, Known]]()
    documents = pool(draw, [draw.randint(*LENGTHS) for _ in range(POOL)])
    while len(made) < count:
        kind = KINDS[len(made) % len(KINDS)]
        found = [documents[index] for index in draw_documents(draw, POOL, FOUND, zipf)]
        asked = [one for one in tell(found).asked if one.kind == kind]
        if not asked:
            continue  # these documents have nothing of this kind
        one = draw.choice(asked)
        texts = [document.tokens for document in found]
        made.append((Question(anchor(ANCHOR), texts, one.tokens), Known(kind, one.answer)))
    return made
