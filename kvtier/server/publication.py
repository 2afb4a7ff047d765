"""What a session tells a server's own stream of events, if the server has one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import Steps
from kvtier.protocol.kv_events import BlockStored
from kvtier.server.watches import Watches
from kvtier.store.store import Store


class Teller(NamedTuple):
    """A session that announces. ``number`` is its own."""

    store: Store
    watches: Watches
    owner: int
    number: int


class Publication(Protocol):
    """The stream, as sessions see it. For the server's loop."""

    def announcing(
        self, teller: Teller, key: ChunkKey, place: int, event: BlockStored
    ) -> Steps[None]:
        """An engine says that this chunk is in this place."""

    def gone(self, number: int) -> None:
        """This session is not attached any more. What it announced stays."""
