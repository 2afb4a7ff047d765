"""KVTierTier: vLLM's SecondaryTierManager over a kvtier server.

vLLM calls everything on its scheduler's thread, or under one lock. Nothing here waits for the
server: lanes ask and copy. Nothing raises into vLLM: what cannot be had is a miss, what cannot be
kept is dropped, and both are counted. Every job is reported, within ``load_timeout_ms`` and one
answer of the server, because vLLM pins its slots until then.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.client.connect import Address
from kvtier.connectors.vllm.versions import log_like_vllm
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint, flat_key
from kvtier.core.lanes import Lane
from kvtier.extensions.cache_server import connect, load_each, safely, settings, tenant
from kvtier.extensions.vllm_tier.identity import engine_identity
from kvtier.extensions.vllm_tier.lookups import Lookups
from kvtier.server.listening.strangers import LogLimit

logger = logging.getLogger("kvtier.vllm_tier")
logger.addFilter(LogLimit(20, 60.0))

CHUNKS = "kvtier_tier_chunks"
_EVENTS = "enable_kv_events"
_MOVE_THREADS = 4
_QUEUED_LOOKUPS, _QUEUED_JOBS = 64, 256
_ANSWER_TIMES = 10
"""A lookup may take so many answers' time: one for each of its questions, and those before it."""
_CLOSE_S = 10.0
_MOST_ANNOUNCED_CHUNKS = 1 << 18


class KVTierTier(SecondaryTierManager):
    """Chunks of one engine. ``given``: keys of the entry in ``secondary_tiers``, kvtier's
    (:data:`kvtier.extensions.cache_server.KEYS`) and ``enable_kv_events``.

    Raises ConfigError for a key that is unknown, and for a server that refuses us. A server that is
    not there is a cache that is empty."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        events = given.pop(_EVENTS, False)
        config = settings(given, where=f"secondary_tiers[{tier_type}]")
        log_like_vllm("INFO")
        address = Address.parse(str(config.server.address))
        self.locality = Locality.LOCAL if address.path else Locality.REMOTE
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)
        parts = engine_identity(offloading_spec) | {"row": self.block_size_bytes}
        self._name = fingerprint(parts | tenant(config))
        layout = ChunkLayout(self._name, 1, 1, (self.block_size_bytes,))
        self._server = connect(config, layout)
        self._timeout_s = config.engine.load_timeout_ms / 1000
        self._counts, self._told = Counter[str](), Counter[str]()
        answer_s = _ANSWER_TIMES * config.server.timeout_ms / 1000
        self._lookups = Lookups(time.monotonic, answer_s, self._counts)
        self._asking = Lane("vllm-tier-ask", 1, urgent_bound=1, bound=_QUEUED_LOOKUPS)
        self._moving = Lane(
            "vllm-tier-move", _MOVE_THREADS, urgent_bound=_QUEUED_JOBS, bound=_QUEUED_JOBS
        )
        self._changed = threading.Condition()
        self._open, self._draining = 0, False
        self._done = deque[tuple[JobResult, Any, list[bytes]]]()
        emits = events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if emits else None
        self._announced = dict[bytes, None]()
        logger.info("chunks of %d bytes at the kvtier server %s", self.block_size_bytes, address)

    # ---- lookup ----------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        held = self._lookups.held(key, req_context.req_id)
        if held is None:
            return LookupResult.RETRY
        if not held and key in self._announced:
            del self._announced[key]
            self._tell([key], removed=True)
        return LookupResult.HIT if held else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.ended(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Ask for all chunks of the step. A full lane asks nothing: they are misses in time."""
        lookups = self._lookups
        runs = lookups.questions()

        def ask() -> None:
            for run in runs:
                known = partial(self._server.known, self._named(run))
                held = safely(self._counts, known, [False] * len(run))
                lookups.answered([*zip(run, held, strict=True)])

        if runs:
            self._asking.submit(ask)

    # ---- jobs ------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._load)

    def _submit(self, job: Any, move: Callable[..., list[bool]]) -> None:
        keys, rows = list(job.keys), [int(one) for one in job.chunk_ids]
        until = time.monotonic() + self._timeout_s
        with self._changed:
            self._open += 1

        def run() -> None:
            begun, moved = time.monotonic(), list[bool]()
            if begun < until and not self._draining:
                moved = safely(self._counts, lambda: move(self._named(keys), rows, until), [])
            self._end(job, keys, moved, time.monotonic() - begun)

        if not self._moving.submit(run, urgent=job.is_promotion):
            self._end(job, keys, [], 0.0)

    def _end(self, job: Any, keys: list[bytes], moved: list[bool], seconds: float) -> None:
        good = [key for key, is_moved in zip(keys, moved, strict=False) if is_moved]
        is_whole = len(good) == len(keys)
        some = tuple(good) if job.is_promotion and good and not is_whole else None
        size = len(good) * self.block_size_bytes
        result = JobResult(job.job_id, is_whole, some, seconds, size)
        with self._changed:
            self._done.append((result, job, good))
            self._open -= 1
            self._changed.notify_all()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._done:
            result, job, good = self._done.popleft()
            lost = len(job.keys) - len(good)
            self._counts["loaded" if job.is_promotion else "stored"] += len(good)
            self._counts["not_loaded" if job.is_promotion else "not_stored"] += lost
            if job.is_promotion and lost:
                self._lookups.failed(set(job.keys).difference(good))
            if good and not job.is_promotion:
                self._announce(good)
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        """Wait until no job touches vLLM's memory. Those that have not begun fail.

        vLLM asks for it where it forgets all that it has cached, as after other weights have been
        loaded. So what comes has other names than what was kept before."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: not self._open)
            self._draining = False
        self._name = fingerprint({"after": self._name.hex(), "start": secrets.token_hex(16)})
        self._lookups = Lookups(time.monotonic, self._lookups.timeout_s, self._counts)
        logger.warning("vLLM's caches were reset: what it kept before is not of use to it any more")

    def shutdown(self) -> None:
        with self._changed:
            self._draining = True
        for lane in (self._asking, self._moving):
            lane.close(_CLOSE_S)
        self._server.close()
        if not self._open:
            self._rows = None  # vLLM unmaps the memory next

    # ---- on a lane -------------------------------------------------------------------------------

    def _store(self, keys: Sequence[ChunkKey], rows: Sequence[int], until: float) -> list[bool]:
        def fill(place: int, slot: memoryview) -> bool:
            bytes_of = np.frombuffer(slot, np.uint8)
            np.copyto(bytes_of[: self.block_size_bytes], self._rows[rows[place]])
            bytes_of[self.block_size_bytes :] = 0
            return True

        return self._server.save(keys, fill, until)

    def _load(self, keys: Sequence[ChunkKey], rows: Sequence[int], until: float) -> list[bool]:
        def take(place: int, slot: memoryview) -> bool:
            row = np.frombuffer(slot, np.uint8, self.block_size_bytes)
            np.copyto(self._rows[rows[place]], row)
            return True

        return load_each(self._server, keys, take, until)

    def _named(self, keys: Iterable[bytes]) -> list[ChunkKey]:
        return [flat_key(self._name + key) for key in keys]

    # ---- what is told ----------------------------------------------------------------------------

    def _announce(self, keys: list[bytes]) -> None:
        if self._events is None:
            return
        self._announced.update(dict.fromkeys(keys))
        while len(self._announced) > _MOST_ANNOUNCED_CHUNKS:
            del self._announced[next(iter(self._announced))]
        self._tell(keys, removed=False)

    def _tell(self, keys: list[Any], *, removed: bool) -> None:
        assert self._events is not None
        self._events.append(OffloadingEvent(keys, self.medium, removed, self.locality))

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that were stored, and those that a later lookup did not find any more."""
        if self._events:
            events, self._events = self._events, []
            yield from events

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        text = "Chunks by what became of them at the kvtier server: hit, miss, late, loaded ..."
        return {CHUNKS: OffloadingCounterMetadata(text, ("outcome",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts = self._counts.copy()
        new, self._told = counts - self._told, counts
        if not new:
            return None
        stats = OffloadingConnectorStats()
        for outcome, count in new.items():
            stats.increase_counter(CHUNKS, count, (outcome,))
        return stats
