"""The arms. They differ in how conversations are routed, and in whether the engines share a cache
server.

Each arm is two engines behind the same router. In the round-robin arms and the cache-aware one a
client does not say which conversation it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.bench.multi_turn.work import Conversations

ENGINES = 2
BASE = "round-robin"
STICKY_SHARED = "sticky+kvtier"
CACHE_AWARE = "cache-aware+kvtier"
RUNNING = "server"
"""A router that was not started here. It is no arm."""
_IN_TURNS = {"ROUTER_POLICY": "round_robin"}
_MIB = 2**20


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


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(BASE, "requests in turns; each engine has its own cache only", False, False, _IN_TURNS),
        Arm("sticky", "a conversation keeps its engine", True, False),
        Arm(
            "round-robin+kvtier",
            "requests in turns; one kvtier server under both engines",
            False,
            True,
            _IN_TURNS,
        ),
        Arm(
            "round-robin+stores",
            "requests in turns; each engine has a Store of its own, with half of that RAM",
            False,
            False,
            _IN_TURNS,
            stores=True,
        ),
        Arm(
            STICKY_SHARED,
            "a conversation keeps its engine; one kvtier server under both",
            True,
            True,
        ),
        Arm(
            CACHE_AWARE,
            "the engine with the longest beginning of the prompt, as one kvtier server says",
            False,
            True,
            asked=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the caches hold. ``kept``: whole conversations in the GPU cache of an engine."""

    work: Conversations
    kept: float
    block_tokens: int
    chunk_tokens: int
    token_bytes: int

    @property
    def max_model_len(self) -> int:
        return math.ceil(self.work.longest / self.block_tokens) * self.block_tokens

    @property
    def gpu_blocks(self) -> int:
        """Blocks of an engine's cache, and one more, because vLLM keeps block 0 for itself. An
        engine must hold at least one conversation."""
        return max(1, math.ceil(self.kept * self.max_model_len / self.block_tokens)) + 1

    @property
    def gpu_gib(self) -> int:
        return math.ceil(self.gpu_blocks * self.block_tokens * self.token_bytes / 2**30)

    def ram(self, parts: int = 1) -> str:
        """Of the cache server. It holds every conversation, and two more. ``parts``: one of so many
        parts of it."""
        chunks = math.ceil(self.work.longest / self.chunk_tokens)
        size = (self.work.sessions + 2) * chunks * self.chunk_tokens * self.token_bytes
        return f"{math.ceil(size / parts / _MIB)}MiB"
