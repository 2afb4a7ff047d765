"""Prompts of benchmarks, drawn from words. Pure: the same seed gives the same prompts.

Words are token ids where the server takes them, and made-up words otherwise. One made-up word is
about one token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Prompt = Sequence[int | str] | str


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``document`` is the index of the document, and ``question`` the index of the
    question about it. ``is_miss``: the round before did not see this document. ``user``: OpenAI's
    ``user`` of the request. ``params``: its ``kv_transfer_params``. ``salt``: its ``cache_salt``.
    Empty ones are not sent. ``logprobs``: of so many likeliest tokens, which vLLM is asked for.
    ``may_end``: the answer may be shorter than ``output_len``."""

    document: int
    question: int
    prompt: Prompt
    output_len: int
    is_miss: bool = False
    user: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    logprobs: int = 0
    may_end: bool = False


def draw(words: Sequence[int | str], length: int, seed: int, what: object) -> list[int | str]:
    """``length`` words. ``what`` names the text: another name gives other words."""
    return random.Random(f"{seed}/{what}").choices(words, k=length)


def as_prompt(words: Sequence[int | str]) -> Prompt:
    return " ".join(map(str, words)) if isinstance(words[0], str) else list(words)
