"""What requests say of their future, told to the store once they have finished and everything they
saved is there: a save that comes later would take the hint back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.api import KVStore
from kvtier.connectors.vllm.groups import Geometry
from kvtier.connectors.vllm.hint_words import Said
from kvtier.core.chunk import ChunkKey
from kvtier.store.hints import NOTHING


class Afterwards:
    """Called by vLLM's scheduling loop, one thread."""

    def __init__(self, store: KVStore, geometry: Geometry) -> None:
        self._store, self._geometry = store, geometry
        self._waiting: dict[str, tuple[Said, Sequence[ChunkKey]]] = {}
        """By request: the hint, and the keys of its chunks."""
        self._new: Counter[str] = Counter()

    def finished(self, name: str, said: Said, keys: Sequence[ChunkKey], *, saving: bool) -> None:
        """A request ended. ``keys``: of its chunks. ``saving``: :meth:`saved` will be called."""
        self._new.update(f"hints_{kind}" for kind in said.kinds)
        if said.hint == NOTHING or not (keys or said.session):
            return
        self._waiting[name] = said, keys
        if not saving:
            self.saved(name)

    def saved(self, name: str) -> None:
        """Nothing of this request is on its way to the store any more."""
        if name in self._waiting:
            said, keys = self._waiting.pop(name)
            self._store.hint(self._run(keys), said.hint, said.session)

    def _run(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """What the request has in the store; without a whole chunk nothing: then the session's last
        prompt is meant."""
        end = len(keys) * self._geometry.chunk_tokens
        return self._geometry.run(keys, 0, end).keys if keys else ()

    def new(self) -> dict[str, int]:
        """Hints ``hints_<kind>`` since the last call."""
        counts, self._new = dict(self._new), Counter()
        return counts
