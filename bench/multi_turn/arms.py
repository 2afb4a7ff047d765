"""The arms. They differ in how conversations are routed, and in whether the engines share a cache
server.

Each arm is two engines behind the same router. In the round-robin arms and the cache-aware one a
client does not say which conversation it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.bench.multi_turn.work import Conversations
from kvtier.bench.processes.engine import Geometry, mib

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
