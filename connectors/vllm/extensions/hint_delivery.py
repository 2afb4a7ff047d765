"""Hints of requests about their future. The store is told of them once the request has finished and
all that it saved is there, because a later save would cancel the hint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.api import KVStore
from kvtier.connectors.vllm.extension import Extension
from kvtier.connectors.vllm.groups import Geometry
from kvtier.connectors.vllm.hint_words import Said
from kvtier.connectors.vllm.scheduler_side.jobs import Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.eviction.hints import NO_HINT


class HintDelivery(Extension):
    """Tells the store, and counts hints as ``hints_<kind>``."""

    def __init__(self, store: KVStore, geometry: Geometry) -> None:
        self._store, self._geometry = store, geometry
        self._waiting: dict[str, tuple[Said, Sequence[ChunkKey]]] = {}
        """By request: the hint, and the keys of its chunks."""
        self._counts = Counter[str]()

    def finished(self, prompt: Prompt, *, saving: bool) -> None:
        said, name = prompt.said, prompt.request.request_id
        keys = prompt.chain.keys if prompt.chain is not None else ()
        self._counts.update(f"hints_{kind}" for kind in said.kinds)
        if said.hint == NO_HINT or not (keys or said.session):
            return
        self._waiting[name] = said, keys
        if not saving:
            self._tell(name)

    def ended(self, job: Pending, *, is_last: bool) -> None:
        if is_last:
            self._tell(job.request_id)

    def counts(self) -> dict[str, int]:
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def _tell(self, name: str) -> None:
        """All saves of this request have ended."""
        if name in self._waiting:
            said, keys = self._waiting.pop(name)
            if keys:  # without a whole chunk the hint is about the session's last prompt
                keys = self._geometry.run(keys, 0, len(keys) * self._geometry.chunk_tokens).keys
            self._store.hint(keys, said.hint, said.session)
