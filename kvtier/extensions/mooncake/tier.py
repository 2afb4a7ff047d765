"""MooncakeTier: chunks in the memory that many hosts lend to Mooncake's pool, over TCP or RDMA.

Every chunk is one object of the pool. The pool drops what was not used for long by itself, and what
a dead host held is gone: both are misses. Order and room are the Directory's, as for every tier.
What one kvtier deletes is gone for all.

Mooncake has no list of what it holds, so nothing is recovered at a start: what is there is found by
asking, many chunks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.core.chunk import ChunkKey
from kvtier.extensions.mooncake.client import MooncakeStore
from kvtier.tiers.away.object_layout import ObjectForm
from kvtier.tiers.away.whole_objects import WholeObjectTier


class MooncakeTier(WholeObjectTier[MooncakeStore]):
    """Chunks in Mooncake's pool. What this process lent to it is taken back by :meth:`close`.

    A master that does not answer is no error: the tier misses and refuses, and is there once the
    master is. Raises TierError for what does not heal by waiting: no library, no such protocol, no
    room for a chunk.

    Threads: any number of lane threads.
    """

    name = "mooncake"
    _share = "bytes in mooncake_url"

    def __init__(
        self,
        store: MooncakeStore,
        form: ObjectForm,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, form, store.url.bytes_, chunk_bytes, clock)

    def _held(self, run: Sequence[ChunkKey]) -> int:
        names = [self._form.name(key) for key in run]
        return self._call("failed_finds", partial(self._store.has, names)) or 0

    def held_of(self, owner: int | None) -> tuple[Sequence[ChunkKey], bool]:
        """See :meth:`Tier.held_of`. The pool keeps no owners and has no list."""
        return [], False
