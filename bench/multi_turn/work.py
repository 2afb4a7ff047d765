"""The workload: who says what when. The same arguments give the same conversations, as far as
answers are equal.

The prompt of a turn is all that was said before, the model's answers too, and something new.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.bench.flags import flag, shape_of
from kvtier.bench.requests.prompts import draw


@dataclass(frozen=True, slots=True)
class Conversations:
    """Lengths are in tokens, or in words of a text. ``words`` is what prompts are drawn from."""

    words: Sequence[int | str]
    sessions: int = flag(8, "conversations at once")
    turns: int = flag(4, "of each")
    first_length: int = flag(2048, "tokens of the first turn's prompt")
    turn_length: int = flag(128, "tokens that the user adds in every other turn")
    output_len: int = flag(32, "tokens of an answer")
    think_seconds: float = flag(2.0, "mean pause before a turn", metavar="S")
    seed: int = flag(0, "for words and pauses", type=int)

    @classmethod
    def of(cls, args: argparse.Namespace, words: Sequence[int | str]) -> Conversations:
        return cls(words, **shape_of(args, cls))

    @property
    def longest(self) -> int:
        asked = self.first_length + (self.turns - 1) * self.turn_length
        return asked + self.turns * self.output_len

    def says(self, session: int, turn: int) -> list[int | str]:
        """The user's words of a turn: something long in turn 1, then short questions."""
        return self._draw((session, turn), self.first_length if turn == 1 else self.turn_length)

    def thinks(self, session: int, turn: int) -> float:
        """Seconds before the turn, exponential. They are at most four times the mean, so that one
        draw does not decide a run."""
        if not self.think_seconds:
            return 0.0
        draws = random.Random(f"{self.seed}/think/{session}/{turn}")
        return min(draws.expovariate(1 / self.think_seconds), 4 * self.think_seconds)

    def warm_up(self, engine: int) -> list[int | str]:
        """A prompt that nothing shares. What only the first request of an engine costs is paid with
        it."""
        return self._draw(("warm-up", engine), min(256, self.first_length))

    def _draw(self, what: object, length: int) -> list[int | str]:
        return draw(self.words, length, self.seed, what)
