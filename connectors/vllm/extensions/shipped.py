"""Which of kvtier's own extensions an engine has. Those of ``kvtier.extensions`` are found by name:
``engine`` of each has a function that makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier.api import KVStore
from kvtier.connectors.vllm.extension import EngineFacts, Extension, Tools
from kvtier.connectors.vllm.extensions.hit_log import HitLog
from kvtier.connectors.vllm.extensions.misses import Misses
from kvtier.connectors.vllm.extensions.tracing import Traces
from kvtier.connectors.vllm.groups import Geometry
from kvtier.connectors.vllm.hint_words import Said
from kvtier.connectors.vllm.scheduler_side.early import EarlyLoads
from kvtier.connectors.vllm.scheduler_side.jobs import Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkKey
from kvtier.eviction.hints import NO_HINT

if TYPE_CHECKING:
    from kvtier.connectors.vllm.worker_side.extension import WorkerExtension


class HintDelivery(Extension):
    """Tells the store of hints of finished requests after their saves, which would cancel them."""

    def __init__(self, store: KVStore, geometry: Geometry) -> None:
        self._store, self._geometry = store, geometry
        self._waiting: dict[str, tuple[Said, Sequence[ChunkKey]]] = {}
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
        if name in self._waiting:
            said, keys = self._waiting.pop(name)
            if keys:  # without a whole chunk the hint is about the session's last prompt
                keys = self._geometry.run(keys, 0, len(keys) * self._geometry.chunk_tokens).keys
            self._store.hint(keys, said.hint, said.session)


def shipped(tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    """In the order in which they are asked. vLLM's own configuration asks for events and traces."""
    wants_traces = facts.vllm_config.observability_config.otlp_traces_endpoint
    return (
        *_beside("spans", tools, facts),
        Misses(tools.store, tools.geometry, tools.load_policy.clock),
        HintDelivery(tools.store, tools.geometry),
        *_beside("event_stream", tools, facts),
        HitLog(),
        *([Traces()] if wants_traces else ()),
        EarlyLoads(tools, facts.duty),
    )


def _beside(name: str, tools: Tools, facts: EngineFacts) -> tuple[Extension, ...]:
    found: tuple[Extension, ...] = import_module(f"kvtier.extensions.{name}.engine").extensions(
        tools, facts
    )
    return found


def of_worker(vllm_config: Any, kept: Any, kv_caches: Any) -> tuple[WorkerExtension, ...]:
    """``kept``: see :func:`kvtier.connectors.vllm.layout.kept`."""
    mover = import_module("kvtier.extensions.spans.mover")
    made: WorkerExtension = mover.extension(vllm_config, kept, kv_caches)
    return (made,)
