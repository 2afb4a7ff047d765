"""The door of shared tiers: a tenant that wants what others have there to be dropped."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.core.steps import whole
from kvtier.protocol import wire
from kvtier.server.session import Session
from kvtier.server.stream import ChunkStream

_MOST_KEYS = 4096


def resets(session: Session, known: Sequence[ChunkKey] = ()) -> None:
    """An attached engine forgets ``known``, of which it knows the names, then all chunks that there
    are, as vLLM's ``/reset_prefix_cache`` does."""
    whole(session.begin(wire.Invalidate(wire.joined(known[:_MOST_KEYS]))))
    whole(session.begin(wire.InvalidateAllCall()))


def deletes(stream: ChunkStream, known: Sequence[ChunkKey]) -> None:
    """An engine on another host deletes each of these."""
    for number, key in enumerate(known[:_MOST_KEYS], 1):
        whole(stream.begin(wire.Delete(number, key)))
