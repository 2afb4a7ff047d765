"""Long Doc QA's workload: which prompt is asked when.

A prompt is a document and a question after it, so that the document is the prefix that several
prompts share.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.bench.flags import Presets, flag, shape_of
from kvtier.bench.requests.prompts import Ask, Prompt, as_prompt, draw

REPEAT_MODES = ("tile", "interleave", "random")
_PRE_WARM_UP_PROMPTS = 2
_PRE_WARM_UP_SHARE = 4


PRESETS: Presets = {
    # AWS publishes numbers of this shape for its LMI containers. Its runner has the other defaults.
    "lmi": {"num_documents": 46, "document_length": 10000, "max_inflight_requests": 4},
}


def _ratio(text: str) -> tuple[int, int]:
    hits, _, misses = text.partition(":")
    if not (hits.isdigit() and misses.isdigit() and int(hits)):
        raise argparse.ArgumentTypeError(f"{text!r} is not H:M with H at least 1, such as 3:1")
    return int(hits), int(misses)


_MISSES = "after H queries, M on unseen documents"
_SEED = "for documents and order; another number gives documents never seen before"


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in tokens, or in words of a text. ``words`` is what prompts are drawn from."""

    words: Sequence[int | str]
    num_documents: int = flag(8, "documents")
    document_length: int = flag(20000, "tokens of a document")
    question_length: int = flag(64, "tokens of the question behind it")
    output_len: int = flag(100, "tokens of an answer")
    repeat_count: int = flag(2, "times each document is asked about in the query round")
    repeat_mode: str = flag(
        "tile", "order of repeats: abcabc, aabbcc or shuffled", choices=REPEAT_MODES
    )
    hit_miss_ratio: tuple[int, int] = flag((1, 0), _MISSES, type=_ratio, metavar="H:M", shown="1:0")
    max_inflight_requests: int = flag(2, "requests at once")
    shuffle_seed: int = flag(0, _SEED, type=int)

    @classmethod
    def of(cls, args: argparse.Namespace, words: Sequence[int | str]) -> Workload:
        return cls(words, **shape_of(args, cls))

    @property
    def request_length(self) -> int:
        return self.document_length + self.question_length + self.output_len

    def pre_warm_up(self) -> list[Ask]:
        """A few short prompts that nothing else shares. What only the first requests of a server
        cost is paid with them."""
        length = max(1, self.document_length // _PRE_WARM_UP_SHARE)
        asks = []
        for index in range(_PRE_WARM_UP_PROMPTS):
            prompt = as_prompt(self._draw(("pre-warm-up", index), length))
            asks.append(Ask(-1 - index, 0, prompt, min(2, self.output_len)))
        return asks

    def warm_up(self, output_len: int = 1) -> list[Ask]:
        """Every document once, with a question that is not asked again. One token of answer is
        enough where only the fill counts."""
        return [
            Ask(index, -1, self._prompt(index, ("warm-up", index)), output_len, is_miss=True)
            for index in range(self.num_documents)
        ]

    def queries(self, first: int = 0) -> list[Ask]:
        """Every document ``repeat_count`` times, each time with another question, from question
        ``first`` on. Documents that were never seen come between them, as ``hit_miss_ratio``
        says."""
        asks: list[Ask] = []
        hits, misses = self.hit_miss_ratio
        fresh = self.num_documents
        for count, (document, question) in enumerate(self._order(), start=1):
            asks.append(self._ask(document, first + question))
            if count % hits == 0:
                asks += [self._ask(fresh + extra, 0, is_miss=True) for extra in range(misses)]
                fresh += misses
        return asks

    def _order(self) -> list[tuple[int, int]]:
        """Pairs of document and question. The questions of a document are asked in order."""
        documents, times = range(self.num_documents), range(self.repeat_count)
        if self.repeat_mode == "interleave":
            return [(document, question) for document in documents for question in times]
        order = [document for _ in times for document in documents]
        if self.repeat_mode == "random":
            random.Random(self.shuffle_seed).shuffle(order)
        asked = dict.fromkeys(documents, -1)
        pairs = []
        for document in order:
            asked[document] += 1
            pairs.append((document, asked[document]))
        return pairs

    def _ask(self, document: int, question: int, is_miss: bool = False) -> Ask:
        prompt = self._prompt(document, ("question", document, question))
        return Ask(document, question, prompt, self.output_len, is_miss)

    def _prompt(self, document: int, question: object) -> Prompt:
        words = self._draw(("document", document), self.document_length)
        return as_prompt(words + self._draw(question, self.question_length))

    def _draw(self, what: object, length: int) -> list[int | str]:
        return draw(self.words, length, self.shuffle_seed, what)
