"""Long Doc QA's workload: which prompt is asked when. Pure: the same arguments give the same
prompts.

A prompt is a document followed by a question, so that the document is the prefix that several
prompts share. Words are token ids where the server takes them, else strings (one made-up word is
about one token).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

REPEAT_MODES = ("tile", "interleave", "random")
_PRE_WARM_UP_PROMPTS = 2
_PRE_WARM_UP_SHARE = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``document`` is the index of the document, ``question`` that of the question
    asked about it;
    ``is_miss``: the round before did not see this document."""

    document: int
    question: int
    prompt: Sequence[int | str] | str
    output_len: int
    is_miss: bool = False
    user: str = ""
    """OpenAI's ``user`` of the request; none when empty."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes in tokens (words, for text). ``words`` is what prompts are drawn from."""

    words: Sequence[int | str]
    num_documents: int
    document_length: int
    question_length: int
    output_len: int
    repeat_count: int = 1
    repeat_mode: str = "tile"
    hit_miss: tuple[int, int] = (1, 0)
    seed: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace, words: Sequence[int | str]) -> Workload:
        """The workload that the command line (:func:`kvtier.bench.long_doc_qa.flags.add_arguments`)
        describes."""
        return cls(
            words=words,
            num_documents=args.num_documents,
            document_length=args.document_length,
            question_length=args.question_length,
            output_len=args.output_len,
            repeat_count=args.repeat_count,
            repeat_mode=args.repeat_mode,
            hit_miss=args.hit_miss_ratio,
            seed=args.shuffle_seed,
        )

    @property
    def request_length(self) -> int:
        """Tokens of one request from its first prompt token to its last generated one."""
        return self.document_length + self.question_length + self.output_len

    def pre_warm_up(self) -> list[Ask]:
        """A few short prompts that nothing else shares: first-use costs of the server are paid
        here."""
        length = max(1, self.document_length // _PRE_WARM_UP_SHARE)
        return [
            Ask(-1 - index, 0, self._text(("pre-warm-up", index), length), min(2, self.output_len))
            for index in range(_PRE_WARM_UP_PROMPTS)
        ]

    def warm_up(self, output_len: int = 1) -> list[Ask]:
        """Every document once, with a question nobody asks again; one token of answer where only
        the fill counts."""
        return [
            Ask(index, -1, self._prompt(index, ("warm-up", index)), output_len, is_miss=True)
            for index in range(self.num_documents)
        ]

    def queries(self, first: int = 0) -> list[Ask]:
        """Every document ``repeat_count`` times, each time with another question, from question
        ``first`` on; between them, as ``hit_miss`` says, documents that were never seen."""
        asks: list[Ask] = []
        hits, misses = self.hit_miss
        fresh = self.num_documents
        for count, (document, question) in enumerate(self._order(), start=1):
            asks.append(self._ask(document, first + question))
            if count % hits == 0:
                asks += [self._ask(fresh + extra, 0, is_miss=True) for extra in range(misses)]
                fresh += misses
        return asks

    def _order(self) -> list[tuple[int, int]]:
        """``(document, question)`` pairs. Question r of a document is always asked after its
        question r - 1."""
        documents, times = range(self.num_documents), range(self.repeat_count)
        if self.repeat_mode == "interleave":
            return [(document, question) for document in documents for question in times]
        order = [document for _ in times for document in documents]
        if self.repeat_mode == "random":
            random.Random(self.seed).shuffle(order)
        asked = dict.fromkeys(documents, -1)
        pairs = []
        for document in order:
            asked[document] += 1
            pairs.append((document, asked[document]))
        return pairs

    def _ask(self, document: int, question: int, is_miss: bool = False) -> Ask:
        prompt = self._prompt(document, ("question", document, question))
        return Ask(document, question, prompt, self.output_len, is_miss)

    def _prompt(self, document: int, question: object) -> Sequence[int | str] | str:
        words = self._draw(("document", document), self.document_length)
        return self._joined(words + self._draw(question, self.question_length))

    def _text(self, what: object, length: int) -> Sequence[int | str] | str:
        return self._joined(self._draw(what, length))

    def _draw(self, what: object, length: int) -> list[int | str]:
        return random.Random(f"{self.seed}/{what}").choices(self.words, k=length)

    def _joined(self, words: Sequence[int | str]) -> Sequence[int | str] | str:
        return " ".join(map(str, words)) if isinstance(self.words[0], str) else words
