"""KVTierTier: vLLM's SecondaryTierManager over a kvtier server.

vLLM calls everything on its scheduler's thread, or under one lock. Nothing here waits for the
server: lanes ask and copy. Nothing raises into vLLM: what cannot be had is a miss, what cannot be
kept is dropped, and both are counted. Every job is reported, within ``load_timeout_ms`` and one
answer of the server, because vLLM pins its slots until then.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics
from vllm.v1.kv_offload import base
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
_MOVE_THREADS, _QUESTIONS, _JOBS = 4, 64, 256
_POLL_S, _CLOSE_S = 0.001, 10.0
_ANSWER_TIMES = 10
"""Answers that a lookup may wait for: one for each of its questions, and those before it."""
_MOST_ANNOUNCED_CHUNKS = 1 << 18


class KVTierTier(SecondaryTierManager):
    """Chunks of one engine. ``given``: keys of the entry in ``secondary_tiers``, kvtier's
    (:data:`kvtier.extensions.cache_server.KEYS`) and ``enable_kv_events``.

    Raises ConfigError for an unknown key, or a server that refuses us. A server that is not there
    is an empty cache."""

    medium = base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        enable_kv_events: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = settings(given, where=f"secondary_tiers[{tier_type}]")
        log_like_vllm("INFO")
        address = Address.parse(str(config.server.address))
        self.locality = base.Locality.LOCAL if address.path else base.Locality.REMOTE
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)
        parts = engine_identity(offloading_spec) | {"row": self.block_size_bytes}
        self._name = fingerprint(parts | tenant(config))
        self._server = connect(config, ChunkLayout(self._name, 1, 1, (self.block_size_bytes,)))
        self._timeout_s = config.engine.load_timeout_ms / 1000
        self._counts, self._told = Counter[str](), Counter[str]()
        answer_s = _ANSWER_TIMES * config.server.timeout_ms / 1000
        self._lookups = Lookups(time.monotonic, answer_s, self._counts)
        self._asking = Lane("vllm-tier-ask", 1, urgent_bound=1, bound=_QUESTIONS)
        self._moving = Lane("vllm-tier-move", _MOVE_THREADS, urgent_bound=_JOBS, bound=_JOBS)
        self._draining = False
        self._done = deque[tuple[Any, list[bool], float]]()
        """Ended jobs: job, which of its chunks were moved, seconds."""
        self._emits = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events, self._announced = list[base.OffloadingEvent](), dict[bytes, bool]()
        logger.info("chunks of %d bytes at the kvtier server %s", self.block_size_bytes, address)

    # ---- lookup ----------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> base.LookupResult:
        held = self._lookups.held(key, req_context.req_id)
        if held is None:
            return base.LookupResult.RETRY
        if not held and self._announced.pop(key, False):
            self._tell([key], removed=True)
        return base.LookupResult.HIT if held else base.LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.ended(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Ask for all chunks of the step. If the lane is full, they become misses unasked."""
        lookups, questions = self._lookups, self._lookups.questions()

        def ask() -> None:
            for question in questions:
                known = partial(self._server.known, self._named(question[1]))
                lookups.answered(question, safely(self._counts, known, [False] * len(question[1])))

        if questions:
            self._asking.submit(ask)

    # ---- jobs ------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        job, until = job_metadata, time.monotonic() + self._timeout_s

        def run() -> None:
            begun, moved = time.monotonic(), list[bool]()
            if begun < until and not self._draining:
                moved = safely(self._counts, partial(self._move, job, until), moved)
            self._done.append((job, moved, time.monotonic() - begun))

        if not self._moving.submit(run, urgent=job.is_promotion):
            self._done.append((job, [], 0.0))

    submit_load = submit_store

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._done:
            job, moved, seconds = self._done.popleft()
            good = [key for key, is_moved in zip(job.keys, moved, strict=False) if is_moved]
            lost, did = len(job.keys) - len(good), "loaded" if job.is_promotion else "stored"
            self._counts.update({did: len(good), f"not_{did}": lost})
            if not job.is_promotion:
                self._announce(good)
            elif lost:
                self._lookups.failed(job.req_context.req_id, set(job.keys).difference(good))
            size = len(good) * self.block_size_bytes
            results.append(JobResult(job.job_id, not lost, good, seconds, size))
        return results

    def drain_jobs(self) -> None:
        """Wait until no job touches vLLM's memory. Jobs that have not begun fail.

        vLLM calls it to reset its caches, as after other weights were loaded. So later chunks get
        other keys."""
        self._draining = True
        while not self._moving.is_idle:
            time.sleep(_POLL_S)
        self._draining = False
        self._name = fingerprint({"after": self._name.hex(), "start": secrets.token_hex(16)})
        self._lookups = Lookups(time.monotonic, self._lookups.timeout_s, self._counts)
        logger.warning("vLLM's caches were reset: what it kept before is not of use to it any more")

    def shutdown(self) -> None:
        self._draining = True
        self._asking.close(_CLOSE_S)
        if self._moving.close(_CLOSE_S):
            self._rows = None  # vLLM unmaps the memory next
        self._server.close()

    # ---- on a lane -------------------------------------------------------------------------------

    def _move(self, job: Any, until: float) -> list[bool]:
        """Save or load a job's chunks. Returns for each whether it is held, or was loaded."""
        keys, size = self._named(job.keys), self.block_size_bytes

        def fill(place: int, slot: memoryview) -> bool:
            bytes_of = np.frombuffer(slot, np.uint8)
            np.copyto(bytes_of[:size], self._rows[job.chunk_ids[place]])
            bytes_of[size:] = 0
            return True

        def take(place: int, slot: memoryview) -> bool:
            np.copyto(self._rows[job.chunk_ids[place]], np.frombuffer(slot, np.uint8, size))
            return True

        if job.is_promotion:
            return load_each(self._server, keys, take, until)
        return self._server.save(keys, fill, until)

    def _named(self, keys: Iterable[bytes]) -> list[ChunkKey]:
        return [flat_key(self._name + key) for key in keys]

    # ---- what is told ----------------------------------------------------------------------------

    def _announce(self, keys: list[bytes]) -> None:
        if self._emits and keys:
            self._announced.update(dict.fromkeys(keys, True))
            while len(self._announced) > _MOST_ANNOUNCED_CHUNKS:
                del self._announced[next(iter(self._announced))]
            self._tell(keys, removed=False)

    def _tell(self, keys: list[Any], *, removed: bool) -> None:
        self._events.append(base.OffloadingEvent(keys, self.medium, removed, self.locality))

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Take the events of stored chunks, and of those that a later lookup missed."""
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        text = "Chunks by what became of them at the kvtier server: hit, miss, late, loaded ..."
        return {CHUNKS: base.OffloadingCounterMetadata(text, ("outcome",))}

    def get_stats(self) -> Any:
        counts, stats = self._counts.copy(), metrics.OffloadingConnectorStats()
        new, self._told = counts - self._told, counts
        for outcome, count in new.items():
            stats.increase_counter(CHUNKS, count, (outcome,))
        return stats if new else None
