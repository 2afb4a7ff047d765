"""The arms: who keeps what was computed, and in which order a prompt has its documents.

All arms but ``none`` have vLLM's own prefix cache on. Where vLLM is alone its cache holds every
prompt of the run, which no tier below can beat. Where kvtier is, vLLM's cache holds the requests in
flight and half a prompt more, so that nearly all reuse is kvtier's.

A prompt is an anchor, documents and a question. Which documents a question gets is drawn without
replacement, by a Zipf distribution over the pool, and their order is shuffled. Lengths of documents
vary by half of the mean in both directions, so that they do not end where a chunk does.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.bench.flags import flag, shape_of
from kvtier.bench.processes.engine import Geometry, cache_args, mib, transfer
from kvtier.bench.requests.client import Ask
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


FULL = "none"
"""The arm that computes every prompt from its start: what answers are compared with."""


@dataclass(frozen=True, slots=True)
class Arm:
    """``cannot_run``: why there are no numbers of it. Empty when it runs."""

    name: str
    about: str
    order: Order = "given"
    kvtier: bool = False
    first: int | None = None
    """Documents are taken from their homes, which are warmed before, and so many tokens of each are
    computed in place. None: they are not."""
    cannot_run: str = ""


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(FULL, "vLLM without any cache of prefixes: full prefill"),
        Arm("vllm-prefix-cache", "vLLM's own cache, which holds every prompt"),
        Arm(
            "vllm-prefix-cache+stable",
            "the same, with the documents in the stable order",
            order="stable",
        ),
        Arm("kvtier", "kvtier's RAM holds every prompt; exact", kvtier=True),
        Arm(
            "kvtier+stable",
            "the same, with the documents in the stable order; exact",
            order="stable",
            kvtier=True,
        ),
        Arm(
            "spans-k0",
            "kvtier takes each document from its warm home; an approximation",
            kvtier=True,
            first=0,
        ),
        *(
            Arm(
                f"spans-k{first}",
                f"the same, with the first {first} tokens of each moved document computed in place",
                kvtier=True,
                first=first,
            )
            for first in (2, 16, 64)
        ),
        Arm(
            "lmcache-blend",
            "LMCache 0.5.6 blends documents wherever they stand",
            cannot_run=(
                "in the engine it needs an edited vLLM, because nothing registers the model with "
                "it (LMCache issues 4131 and 2306, open), and it refuses CPUs (2594); nothing in "
                "its package asks its blending server from vLLM (5101, open)"
            ),
        ),
    )
}
RUN = [arm for arm in ARMS.values() if not arm.cannot_run]
DEFAULT = [arm for arm in RUN if arm.first != 2]
"""Arms that run by default. So few tokens bring back nothing of random documents."""
ONE_SERVER = [ARMS[FULL], ARMS["kvtier"], *(arm for arm in RUN if arm.first is not None)]
"""Arms that one server has by itself."""


@dataclass(frozen=True, slots=True)
class Sizes:
    work: Retrieval
    geometry: Geometry

    @property
    def request_blocks(self) -> int:
        return self.geometry.blocks(self.work.longest)

    @property
    def max_model_len(self) -> int:
        return self.request_blocks * self.geometry.block_tokens

    @property
    def prompts(self) -> int:
        return self.work.rounds * self.work.requests + 2

    def gpu_blocks(self, arm: Arm) -> int:
        """Blocks of the engine's cache. One more, because vLLM keeps block 0 for itself."""
        inflight = self.work.max_inflight_requests
        if arm.kvtier or arm.name == FULL:
            return inflight * self.request_blocks + self.request_blocks // 2 + 1
        return (self.prompts + inflight) * self.request_blocks + 1

    def gpu_gib(self, arm: Arm) -> int:
        return self.geometry.gib(self.gpu_blocks(arm))

    def ram(self, arm: Arm) -> str:
        """kvtier's: every prompt, as if none shared anything, and every home."""
        prompts = self.prompts + 2 * self.work.max_inflight_requests
        size = self.geometry.bytes_of(self.work.longest, prompts)
        if arm.first is not None:
            homes = self.work.rounds * self.work.pool
            size += self.geometry.bytes_of(self.work.longest_home, homes)
        return mib(size)


def server_args(arm: Arm, sizes: Sizes, *, load_every_hit: bool = False) -> list[str]:
    """vLLM's arguments in which the arms differ."""
    connector = transfer(load_every_hit=load_every_hit) if arm.kvtier else None
    args = cache_args(sizes.max_model_len, sizes.gpu_blocks(arm), connector)
    return [*args, "--no-enable-prefix-caching"] if arm.name == FULL else args


def server_env(arm: Arm, sizes: Sizes) -> dict[str, str]:
    """kvtier's variables. None where it is not."""
    if not arm.kvtier:
        return {}
    spans = {} if arm.first is None else {"KVTIER_SPANS": "on"}
    ram, chunk = sizes.ram(arm), str(sizes.geometry.chunk_tokens)
    return {"KVTIER_RAM_BYTES": ram, "KVTIER_CHUNK_TOKENS": chunk} | spans
