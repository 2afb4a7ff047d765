"""ForwardingTier: a tier in front of another one. It passes every call on, and subclasses change
some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvtier.core.chunk import ChunkKey
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.base import Tier


class ForwardingTier(Tier):
    """Threads: as ``inner``, which is closed with it."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.shared, self.keeps_owners = inner.shared, inner.keeps_owners
        self.asks_for_owners = inner.asks_for_owners
        self.chunk_room, self.fixed_room = inner.chunk_room, inner.fixed_room

    @property
    def capacity(self) -> int:  # type: ignore[override]  # it may change below
        return self.inner.capacity

    def recovered(self) -> Sequence[ChunkKey]:
        return self.inner.recovered()

    def write(self, key: ChunkKey, data: memoryview, owner: int = UNOWNED) -> bool:
        return self.inner.write(key, data, owner)

    def read(self, key: ChunkKey, into: memoryview) -> bool | None:
        return self.inner.read(key, into)

    def may_read(self, key: ChunkKey) -> bool:
        return self.inner.may_read(key)

    def find(self, keys: Sequence[ChunkKey]) -> int:
        return self.inner.find(keys)

    def delete(self, key: ChunkKey) -> None:
        self.inner.delete(key)

    def close(self, coldest_first: Iterable[ChunkKey] = ()) -> None:
        self.inner.close(coldest_first)

    def owners(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        return self.inner.owners(keys)

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        return self.inner.held_of(owner)

    def resize(self, chunks: int) -> int:
        return self.inner.resize(chunks)

    @property
    def counts(self) -> Mapping[str, int]:
        return self.inner.counts

    @property
    def nodes_away(self) -> Sequence[str]:
        return self.inner.nodes_away

    @property
    def is_apart(self) -> bool:
        return self.inner.is_apart

    @property
    def trouble(self) -> str:
        return self.inner.trouble

    @property
    def owed(self) -> int:
        return self.inner.owed
