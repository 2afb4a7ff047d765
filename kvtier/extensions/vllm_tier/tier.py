"""KVTierTier: vLLM's SecondaryTierManager over a kvtier server.

vLLM calls everything on its scheduler's thread, or under one lock. Nothing here waits for the
server: lanes ask and copy. Nothing raises into vLLM: what cannot be had is a miss, what cannot be
kept is dropped, and both are counted. Every job is reported, within ``load_timeout_ms`` and one
answer of the server, because vLLM pins its slots until then.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from traceback import walk_stack
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.client.connect import Address
from kvtier.connectors.vllm.identity import identity, is_local, start_word
from kvtier.connectors.vllm.versions import log_like_vllm
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint, flat_key
from kvtier.core.lanes import Lane
from kvtier.extensions.cache_server import connect, load_each, safely, settings, tenant
from kvtier.server.strangers import LogLimit

logger = logging.getLogger("kvtier.vllm_tier")
logger.addFilter(LogLimit(20, 60.0))

CHUNKS = "kvtier_tier_chunks"
_MOVE_THREADS, _QUESTIONS, _JOBS = 4, 64, 256
_POLL_S, _CLOSE_S = 0.001, 10.0
_ANSWER_TIMES = 10
"""Answers that a lookup may wait for: one for each of its questions, and those before it."""
_MOST_ANNOUNCED_CHUNKS = 1 << 18
_FORMAT = 1
_MOST_FRAMES = 16
_TOPOLOGY = (
    *("tensor_parallel_size", "disable_custom_all_reduce"),
    *("enable_sp", "fuse_gemm_comms", "fuse_allreduce_rms"),
)
"""Configuration fields that follow from the number of GPUs that share a layer."""
Question = tuple[str, list[bytes]]
"""Request id and a run of its chunks to ask the server for."""
_GROUP_BYTES = 4
"""Last bytes of a vLLM key, which name its cache group."""


class Lookups:
    """Verdicts on chunks, by request, asked for in the background: vLLM asks chunk by chunk, step
    by step. For one thread, but for :meth:`answered`. ``counts`` is of verdicts.

    An answer that does not come within ``timeout_s`` is a miss. A verdict stands until its request
    has ended. So a chunk that was found and then could not be loaded does not send the request
    round and round."""

    def __init__(self, clock: Callable[[], float], timeout_s: float, counts: Counter[str]) -> None:
        self._clock, self.timeout_s, self._counts = clock, timeout_s, counts
        self._verdicts = dict[str, dict[bytes, bool | float]]()
        """Verdicts by request and chunk. A number is the time until which an answer may come."""
        self._questions = dict[tuple[str, bytes], list[bytes]]()
        self._answers = deque[tuple[Question, Sequence[bool]]]()

    def held(self, key: bytes, request: str) -> bool | None:
        """Whether the chunk is held; None while the server is asked."""
        while self._answers:
            (asked_by, keys), answer = self._answers.popleft()
            asked = self._verdicts.get(asked_by, {})
            for one, is_held in zip(keys, answer, strict=True):
                if isinstance(asked.get(one), float):
                    asked[one] = is_held
                    self._counts["hit" if is_held else "miss"] += 1
        verdicts = self._verdicts.setdefault(request, {})
        verdict = verdicts.get(key)
        if verdict is None:
            verdicts[key] = self._clock() + self.timeout_s
            self._questions.setdefault((request, key[-_GROUP_BYTES:]), []).append(key)
            return None
        if isinstance(verdict, bool):
            return verdict
        if self._clock() < verdict:
            return None
        self._counts.update(("late", "miss"))
        verdicts[key] = False
        return False

    def questions(self) -> list[Question]:
        """Take the runs to ask for now: one for each request and cache group."""
        questions, self._questions = self._questions, {}
        return [(request, keys) for (request, _), keys in questions.items()]

    def answered(self, question: Question, answer: Sequence[bool]) -> None:
        """Queue an answer. Any thread."""
        self._answers.append((question, answer))

    def failed(self, request: str, keys: Iterable[bytes]) -> None:
        """Turn the verdicts on chunks that could not be loaded into misses."""
        self._verdicts.get(request, {}).update(dict.fromkeys(keys, False))

    def ended(self, request: str) -> None:
        self._verdicts.pop(request, None)


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


# ---- names ---------------------------------------------------------------------------------------


def engine_identity(spec: Any) -> dict[str, Any]:
    """Return the fingerprint's parts for a vLLM ``OffloadingSpec``. Reads the weight files, unless
    their digests are kept. Logs why a name is of this start only.

    vLLM's key of a chunk is a hash over tokens, salt, and the names of adapters and media. This
    adds what decides the bytes: vLLM's configuration by the closed table of kvtier's own connector,
    the weights by their content, and the shape of a chunk. Where one of these is only a name here,
    a random word is part of it, and what is kept is of use to this start of the engine alone."""
    config, vllm_config = spec.config, _vllm_config()
    if vllm_config is None:
        return {"start": start_word("vLLM's configuration was not found")}
    engine = identity(vllm_config, {})
    why = _unnamed(vllm_config)
    if why and "start" not in engine:
        engine["start"] = start_word(why)
    parallel = config.parallel
    is_free = config.canonical_layout and parallel.is_parallelism_agnostic
    if is_free:
        engine["config"] = _without_topology(engine["config"])
    sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    return {
        "vllm_tier": _FORMAT,
        "engine": engine,
        "hardware": _hardware(),
        "longest": vllm_config.model_config.max_model_len,  # models choose rotary tables by it
        "dtype": config.model.dtype,
        "hash": [vllm_config.cache_config.prefix_caching_hash_algo, config.cache.tokens_per_hash],
        "chunk_blocks": config.cache.blocks_per_chunk,
        "groups": [[one.tokens_per_block, *one.layer_names] for one in config.groups],
        "layout": [config.kv_cache_layout, config.canonical_layout, spec.replicated_layout],
        "parallel": [] if is_free else [*sizes, parallel.world_size],
    }


def _vllm_config() -> Any:
    """Find vLLM's configuration in the frame of the caller that makes the tiers: a tier is given
    only a digest of it, without what names the model's content."""
    frames = islice(walk_stack(sys._getframe()), _MOST_FRAMES)
    found = (frame.f_locals.get("vllm_config") for frame, _ in frames)
    return next((one for one in found if hasattr(one, "model_config")), None)


def _unnamed(vllm_config: Any) -> str:
    """Return why vLLM's keys and the weights' files do not name all that decides, or ""."""
    model, algorithm = vllm_config.model_config, vllm_config.cache_config.prefix_caching_hash_algo
    if not is_local(vllm_config):
        return f"the weights of {model.model} are not local files"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "vLLM's keys have adapters by their names alone"
    if model.is_multimodal_model:
        return "vLLM's keys have media by names that a client may give"
    if not str(algorithm).startswith("sha256"):
        return f"prefix_caching_hash_algo={algorithm} may give two prompts one key; sha256 does not"
    return ""


def _without_topology(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: _without_topology(one) for name, one in config.items() if name not in _TOPOLOGY}


def _hardware() -> str:
    """Name the hardware as ranks do, without opening a GPU in the scheduler's process."""
    from vllm.platforms import current_platform

    from kvtier.connectors.vllm.worker_side.loaded import hardware

    device = current_platform.device_type
    if device == "cpu":
        return hardware(device)
    return f"{device} {current_platform.get_device_capability()}"
