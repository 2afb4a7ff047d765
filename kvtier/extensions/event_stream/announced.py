"""Announced: what a server publishes of its chunks, by vLLM's KV events. Pure.

vLLM's hashes do not depend on the model or the tenant, so one stream can tell of one owner's chunks
only. It is the owner whose engine announced first. Another one takes over when no engine of the
first is attached any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.core.chunk import ChunkKey, own_half, parent_half
from kvtier.core.lookup import Change
from kvtier.core.steps import PIECE_CHUNKS, Steps
from kvtier.protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    where,
)
from kvtier.server.session import Session
from kvtier.store.observers.changes import Changes
from kvtier.store.store import Store
from kvtier.tiers.registry import is_shared

_MOST_BLOCKS = 1 << 21
"""Most blocks that are published and not withdrawn: about 130 MB."""
_pack, _unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[Hash]).decode


@dataclass(slots=True)
class _Chunk:
    """A published chunk. ``hashes``: of its blocks, packed. ``session``: number of the session that
    announced it. ``places``: bits of the places where it is published."""

    hashes: bytes
    blocks: int
    group: int | None
    session: int
    places: int = 0


class Announced:
    """Published chunks of one owner, on the server's loop. ``publish`` gets each event, in
    order."""

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish
        self._whose: tuple[Store, int] | None = None
        self._watch: Changes | None = None
        self._sessions: set[int] = set()
        """Attached sessions of the owner that have announced chunks."""
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._ends: dict[bytes, Hash] = {}
        """Own half of a chunk's key -> hash of its last block, which is its children's parent."""
        self._blocks: Counter[int] = Counter()
        """Published blocks by the session that announced them."""
        self.ignored = 0
        """Chunks that were not published: another owner's, or there was no room."""

    def announcing(
        self, session: Session, key: ChunkKey, place: int, event: BlockStored
    ) -> Steps[None]:
        whose = session.store, session.owner
        if whose != self._whose:
            if self._sessions:
                self.ignored += 1
                return
            yield from self.ending()
            if self._whose is not None:
                return  # another session was faster
            self._whose, self._watch = whose, session.store.watch(named_only=True)
        self._sessions.add(session.number)
        yield from self.following()
        if self._watch is None or whose != self._whose:
            return
        held = next(iter(self._watch.find([key])), 0)
        chunk = self._chunks.get(key) or self._new(session.number, key, event)
        if chunk is None or chunk.blocks != len(event.block_hashes):
            self.ignored += 1
        elif held & ~chunk.places & 1 << place:
            self._stored(chunk, key, place, event)
        if chunk is not None and not chunk.places:
            self._forget(key)

    def gone(self, session: Session) -> None:
        self._sessions.discard(session.number)

    def following(self) -> Steps[None]:
        while self._watch is not None:
            changes = self._watch.changes(PIECE_CHUNKS)
            if changes is None:
                yield from self._withdrawing()
            elif not changes:
                return
            for change in changes or ():
                self._changed(change)
            yield 0.0

    def without(self, stores: Sequence[Store]) -> Steps[None]:
        if self._whose is not None and self._whose[0] not in stores:
            yield from self.ending()

    def ending(self) -> Steps[None]:
        """Withdraw everything, and publish for no owner."""
        yield from self._withdrawing()
        if self._watch is not None:
            self._watch.end()
        self._whose = self._watch = None
        self._sessions.clear()

    # ---- steps -----------------------------------------------------------------------------------

    def _new(self, number: int, key: ChunkKey, event: BlockStored) -> _Chunk | None:
        """Add a chunk, or return None: a session may have half of what the others leave."""
        blocks, own = len(event.block_hashes), self._blocks[number]
        if 2 * (own + blocks) > _MOST_BLOCKS - (self._blocks.total() - own):
            return None
        self._blocks[number] += blocks
        self._ends[own_half(key)] = event.block_hashes[-1]
        chunk = _Chunk(_pack(event.block_hashes), blocks, event.group_idx, number)
        self._chunks[key] = chunk
        return chunk

    def _stored(self, chunk: _Chunk, key: ChunkKey, place: int, event: BlockStored) -> None:
        """Publish a chunk by the hashes announced first: PYTHONHASHSEED may differ by engine."""
        chunk.places |= 1 << place
        self._publish(
            msgspec.structs.replace(
                event,
                block_hashes=_unpack(chunk.hashes),
                parent_block_hash=self._ends.get(parent_half(key), event.parent_block_hash),
                **self._where(place),
            )
        )

    def _changed(self, change: Change) -> None:
        chunk, bit = self._chunks.get(change.key), 1 << change.place
        if chunk is None or change.there or not chunk.places & bit:
            return
        chunk.places &= ~bit
        self._removed(chunk, change.place)
        if not chunk.places:
            self._forget(change.key)
            if not self._chunks:
                self._publish(AllBlocksCleared())

    def _withdrawing(self) -> Steps[None]:
        if not self._chunks:
            return
        for number, key in enumerate(list(self._chunks)):
            if (chunk := self._chunks.get(key)) is not None:
                for place in range(chunk.places.bit_length()):
                    if chunk.places >> place & 1:
                        self._removed(chunk, place)
                self._forget(key)
            if number % PIECE_CHUNKS == PIECE_CHUNKS - 1:
                yield 0.0
        self._publish(AllBlocksCleared())

    def _removed(self, chunk: _Chunk, place: int) -> None:
        hashes = _unpack(chunk.hashes)
        self._publish(BlockRemoved(hashes, group_idx=chunk.group, **self._where(place)))

    def _forget(self, key: ChunkKey) -> None:
        chunk = self._chunks.pop(key)
        self._ends.pop(own_half(key), None)
        self._blocks[chunk.session] -= chunk.blocks
        if not self._blocks[chunk.session]:
            del self._blocks[chunk.session]

    def _where(self, place: int) -> dict[str, str | None]:
        assert self._whose is not None
        name = self._whose[0].place_names[place]
        return where(place, name, shared=is_shared(name))
