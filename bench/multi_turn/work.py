"""The workload: who says what when. Pure: the same arguments give the same conversations, as far as
answers are equal.

The prompt of a turn is all that was said before (openings, additions and the model's own answers),
and something new.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conversations:
    """Lengths in tokens (words, for text). ``words`` is what prompts are drawn from."""

    words: Sequence[int | str]
    sessions: int
    turns: int
    first_length: int
    turn_length: int
    output_len: int
    think_seconds: float
    seed: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace, words: Sequence[int | str]) -> Conversations:
        """What the command line (:func:`kvtier.bench.multi_turn.flags.add_arguments`) describes."""
        return cls(
            words=words,
            sessions=args.sessions,
            turns=args.turns,
            first_length=args.first_length,
            turn_length=args.turn_length,
            output_len=args.output_len,
            think_seconds=args.think_seconds,
            seed=args.seed,
        )

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return (
            self.first_length + (self.turns - 1) * self.turn_length + self.turns * self.output_len
        )

    def says(self, session: int, turn: int) -> list[int | str]:
        """What the user adds in a turn (the first is 1): something long, then short questions."""
        return self._draw((session, turn), self.first_length if turn == 1 else self.turn_length)

    def thinks(self, session: int, turn: int) -> float:
        """Seconds before the turn: exponential, at most four times the mean, so that one draw does
        not decide a run."""
        if not self.think_seconds:
            return 0.0
        drawn = random.Random(f"{self.seed}/think/{session}/{turn}").expovariate(
            1 / self.think_seconds
        )
        return min(drawn, 4 * self.think_seconds)

    def warm_up(self, engine: int) -> list[int | str]:
        """A prompt that nothing shares: an engine's first-use costs are paid with it."""
        return self._draw(("warm-up", engine), min(256, self.first_length))

    def _draw(self, what: object, length: int) -> list[int | str]:
        return random.Random(f"{self.seed}/{what}").choices(self.words, k=length)
