"""Hints of requests about their future. The store is told of them once the request has finished and
all that it saved is there, because a later save would cancel the hint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.api import KVStore
from kvtier.connectors.vllm.groups import Geometry
from kvtier.connectors.vllm.hint_words import Said
from kvtier.core.chunk import ChunkKey
from kvtier.eviction.hints import NOTHING


class Afterwards:
    """Called only by the thread of vLLM's scheduling loop. ``counts``: hints as
    ``hints_<kind>`` are counted there."""

    def __init__(self, store: KVStore, geometry: Geometry, counts: Counter[str]) -> None:
        self._store, self._geometry = store, geometry
        self._waiting: dict[str, tuple[Said, Sequence[ChunkKey]]] = {}
        """By request: the hint, and the keys of its chunks."""
        self._counts = counts

    def finished(self, name: str, said: Said, keys: Sequence[ChunkKey], *, saving: bool) -> None:
        """A request ended. ``keys``: the keys of its chunks. ``saving``: :meth:`saved` will be
        called."""
        self._counts.update(f"hints_{kind}" for kind in said.kinds)
        if said.hint == NOTHING or not (keys or said.session):
            return
        self._waiting[name] = said, keys
        if not saving:
            self.saved(name)

    def saved(self, name: str) -> None:
        """All saves of this request have ended."""
        if name in self._waiting:
            said, keys = self._waiting.pop(name)
            if keys:  # without a whole chunk the hint is about the session's last prompt
                keys = self._geometry.run(keys, 0, len(keys) * self._geometry.chunk_tokens).keys
            self._store.hint(keys, said.hint, said.session)
