"""The workload, who says what when, and the arms. They differ in how conversations are routed, and
in whether the engines share a cache server.

Each arm is two engines behind the same router. In the round-robin arms and the cache-aware one a
client does not say which conversation it is.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.bench.flags import flag, shape_of
from kvtier.bench.processes.engine import Geometry, mib
from kvtier.bench.requests.client import draw


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


ENGINES = 2
BASE = "round-robin"
STICKY_SHARED = "sticky+kvtier"
CACHE_AWARE = "cache-aware+kvtier"
RUNNING = "server"
_IN_TURNS = {"ROUTER_POLICY": "round_robin"}


@dataclass(frozen=True, slots=True)
class Arm:
    """``router``: environment of the router's process. ``asked``: the router asks the kvtier
    server, which follows the engines' KV events. Only HAProxy does. ``stores``: each engine has a
    Store of its own, and they share the server's RAM in equal parts."""

    name: str
    about: str
    sticky: bool
    shared: bool
    router: Mapping[str, str] = field(default_factory=dict)
    asked: bool = False
    stores: bool = False


_ALONE, _SERVER = "each engine has its own cache only", "one kvtier server under both engines"
_STORES = "each engine has a Store of its own, with half of that RAM"
_AWARE = "the engine with the longest beginning of the prompt, as one kvtier server says"
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(BASE, f"requests in turns; {_ALONE}", False, False, _IN_TURNS),
        Arm("sticky", "a conversation keeps its engine", True, False),
        Arm("round-robin+kvtier", f"requests in turns; {_SERVER}", False, True, _IN_TURNS),
        Arm(
            "round-robin+stores",
            f"requests in turns; {_STORES}",
            False,
            False,
            _IN_TURNS,
            stores=True,
        ),
        Arm(STICKY_SHARED, f"a conversation keeps its engine; {_SERVER}", True, True),
        Arm(CACHE_AWARE, _AWARE, False, True, asked=True),
    )
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the caches. ``kept``: whole conversations in the GPU cache of an engine."""

    work: Conversations
    kept: float
    geometry: Geometry

    @property
    def max_model_len(self) -> int:
        return self.geometry.blocks(self.work.longest) * self.geometry.block_tokens

    @property
    def gpu_blocks(self) -> int:
        """Blocks of an engine's cache, and one more, because vLLM keeps block 0 for itself. An
        engine must hold at least one conversation."""
        return max(1, self.geometry.blocks(self.kept * self.max_model_len)) + 1

    def ram(self, parts: int = 1) -> str:
        """Of the cache server. It holds every conversation, and two more. ``parts``: one of so many
        parts of it."""
        kept = (self.work.sessions + 2) / parts
        return mib(self.geometry.bytes_of(self.work.longest, kept))
