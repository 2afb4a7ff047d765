"""Which nodes of a Redis are left alone now, because they fail or take no writes: each for
itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.tiers.breaker import Breaker
from kvtier.tiers.redis.servers import RedisServers

_FULL_WAIT_S, _LONGEST_FULL_WAIT_S = 0.25, 8.0


@dataclass(frozen=True, slots=True)
class Node:
    """State of one node. Its capacity is its own: a full one says nothing about the
    others."""

    away: Breaker
    """For every call."""
    full: Breaker
    """For writes besides: a full node still serves reads."""


class NodeHealth:
    """The nodes of some servers, by where a name lies. Threads: any. ``_lock`` is never held during
    I/O."""

    def __init__(self, servers: RedisServers, clock: Callable[[], float]) -> None:
        self._servers, self._clock = servers, clock
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}

    def of(self, name: bytes) -> Node:
        """The node of ``name``. Nodes that left the cluster are forgotten when a new one is met."""
        place = self._servers.node_of(name)
        with self._lock:
            if place not in self._nodes:
                self._nodes = dict(self._present())
                full = Breaker(self._clock, 1, _FULL_WAIT_S, _LONGEST_FULL_WAIT_S)
                self._nodes[place] = Node(Breaker(self._clock), full)
            return self._nodes[place]

    @property
    def away(self) -> list[str]:
        """Nodes that are left alone now because they failed."""
        return [name for name, node in self._present() if node.away.open]

    @property
    def full(self) -> bool:
        """Whether a node has refused a write, and taken none since."""
        return any(node.full.open for _, node in self._present())

    def _present(self) -> list[tuple[str, Node]]:
        known = set(self._servers.nodes())
        return [(name, node) for name, node in list(self._nodes.items()) if name in known]
