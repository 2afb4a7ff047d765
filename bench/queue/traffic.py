"""Traffic: a generated trace of agents, chats and questions about long documents. The same
arguments give the same requests.

- *Agents* share a prompt with the others of their kind. A short answer is a call of a tool, and the
  session goes on in seconds. A long one is for a person, and the session goes on in minutes.
- *Chats* go on a little more often than not, after a pause that is mostly short.
- *Questions* are about one of some long documents, of which a few are popular (Zipf's law).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier.bench.traces.mooncake import BLOCK_TOKENS, Request, key_of
from kvtier.core.chunk import ChunkKey

_AGENTS, _CHATS, _QUESTIONS = 150, 1500, 900
"""Agents and chats that begin in an hour, and questions that come."""
_KINDS, _KIND_CHUNKS = 5, 6
"""Kinds of agents, and chunks of the prompt that all agents of a kind begin with."""
_CALLS, _FOR_A_TOOL, _CHAT_GOES_ON = 25, 0.85, 0.55
"""Calls of an agent in the mean. The odds that an answer is for a tool, and that a chat goes on."""
_DOCUMENTS, _DOCUMENT_CHUNKS = 80, (20, 120)


class _Arrivals(NamedTuple):
    draw: random.Random
    until: float
    part: float

    def starts(self, an_hour: float) -> Iterator[float]:
        """Times that do not depend on each other (a Poisson process)."""
        rate = self.part * an_hour / 3600
        at = self.draw.expovariate(rate)
        while at < self.until:
            yield at
            at += self.draw.expovariate(rate)


class _Talk:
    """A prompt that grows by what is answered and said, with its beginning shared or not."""

    def __init__(self, name: str, shared: list[ChunkKey]) -> None:
        self._name, self._run = name, list(shared)

    def grow(self, chunks: int) -> None:
        first = len(self._run)
        self._run += _chunks(self._name, chunks, first)

    def ask(self, at: float, answer: int) -> Request:
        tokens = len(self._run) * BLOCK_TOKENS
        return Request(at, tuple(self._run), tokens=tokens, output=answer)


def _chunks(name: str, count: int, first: int = 0) -> list[ChunkKey]:
    return [key_of(f"{name}/{place}") for place in range(first, first + count)]


def _agents(arrivals: _Arrivals) -> Iterator[Request]:
    draw, until = arrivals.draw, arrivals.until
    kinds = [_chunks(f"kind {kind}", _KIND_CHUNKS) for kind in range(_KINDS)]
    for number, begun in enumerate(arrivals.starts(_AGENTS)):
        at, talk = begun, _Talk(f"agent {number}", draw.choice(kinds))
        talk.grow(draw.randint(1, 4))
        while at < until:
            for_a_tool = draw.random() < _FOR_A_TOOL
            answer = draw.randint(30, 200) if for_a_tool else draw.randint(300, 1000)
            yield talk.ask(at, answer)
            if draw.random() < 1 / _CALLS:
                break
            at += draw.uniform(2, 12) if for_a_tool else draw.lognormvariate(math.log(150), 0.8)
            talk.grow(draw.randint(1, 3))


def _chats(arrivals: _Arrivals) -> Iterator[Request]:
    draw, until = arrivals.draw, arrivals.until
    for number, begun in enumerate(arrivals.starts(_CHATS)):
        at, talk = begun, _Talk(f"chat {number}", [])
        talk.grow(draw.randint(1, 6))
        while at < until:
            yield talk.ask(at, draw.randint(50, 600))
            if draw.random() >= _CHAT_GOES_ON:
                break
            at += draw.lognormvariate(math.log(90), 1.0)
            talk.grow(draw.randint(1, 3))


def _questions(arrivals: _Arrivals) -> Iterator[Request]:
    draw = arrivals.draw
    sizes = [draw.randint(*_DOCUMENT_CHUNKS) for _ in range(_DOCUMENTS)]
    documents = [_chunks(f"document {number}", size) for number, size in enumerate(sizes)]
    popular = [1 / (1 + number) for number in range(_DOCUMENTS)]
    for number, at in enumerate(arrivals.starts(_QUESTIONS)):
        (document,) = draw.choices(documents, popular)
        talk = _Talk(f"question {number}", document)
        talk.grow(1)
        yield talk.ask(at, draw.randint(50, 300))


KINDS: dict[str, tuple[Callable[[_Arrivals], Iterator[Request]], ...]] = {
    "agents": (_agents,),
    "chats": (_chats,),
    "questions": (_questions,),
    "mixed": (_agents, _chats, _questions),
}


def traffic(hours: float, seed: int, part: float = 1.0, kind: str = "mixed") -> list[Request]:
    """Requests of so many hours, by their times. ``part``: of the agents, chats and questions.
    ``kind``: one of :data:`KINDS`."""
    arrivals = _Arrivals(random.Random(f"{seed}/traffic"), 3600 * hours, part)
    requests = [request for made in KINDS[kind] for request in made(arrivals)]
    return sorted(requests, key=lambda request: request.at)
