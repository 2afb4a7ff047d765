"""vLLM's connector class: pure delegation to the scheduler's and the worker's half."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

import kvtier
from kvtier.config.keys import Config, tell
from kvtier.config.load import load
from kvtier.connectors.vllm import EXTENSIONS, LOAD_EVERY_HIT, layout, settings, versions
from kvtier.connectors.vllm.groups import Geometry
from kvtier.connectors.vllm.identity import begin
from kvtier.connectors.vllm.layout import why_no_prefixes
from kvtier.connectors.vllm.metadata import RankLayout, StepMetadata, StepReport
from kvtier.connectors.vllm.scheduler_side.idle import IdleHalf, StartingHalf
from kvtier.connectors.vllm.scheduler_side.orphans import end_with_parent
from kvtier.connectors.vllm.stats import TierMetrics, TierStats
from kvtier.core.errors import ConfigError, KVTierError

# Imports for a half are where it is made: a process of an engine has one half, and one that only
# serves metrics has none.
if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtier.api import KVStore
    from kvtier.connectors.vllm.extension import Duty, Extension, Tools
    from kvtier.connectors.vllm.extensions.learning import Learning
    from kvtier.connectors.vllm.scheduler_side.scheduler import SchedulerHalf
    from kvtier.connectors.vllm.stats import Figures
    from kvtier.connectors.vllm.worker_side.pools import OwnHost
    from kvtier.connectors.vllm.worker_side.worker import WorkerHalf
    from kvtier.core.chunk import ChunkLayout
    from kvtier.load_policy.decide import LoadPolicy
    from kvtier.load_policy.prefill import Prefill
    from kvtier.started import Started

logger = logging.getLogger("kvtier.connectors.vllm")

_NAMES_FAILED_LOADS = hasattr(KVConnectorBase_V1, versions.LOAD_RESULTS)
_WITH_GROUPS = versions.keeps_groups(KVConnectorBase_V1)
_WORKERS_FIRST = versions.workers_tell_first(versions.running())


class KVTierConnector(KVConnectorBase_V1, versions.groups_base(KVConnectorBase_V1)):  # type: ignore[misc]
    """Keeps KV of full chunks in RAM, NVMe and Redis, and loads it on prefill.

    Configuration: kvtier's own file and environment (see deploy/CONFIGURATION.md), overridden by
    ``kv_connector_extra_config``.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        found = versions.require()
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        self._config = load(flags=settings(transfer), ranks=parallel.world_size)
        versions.log_like_vllm(self._config.engine.log_level)
        if role == KVConnectorRole.SCHEDULER:  # only one process of the engine
            end_with_parent()
            self._tell(found)
        versions.set_failure_policy(vllm_config)
        layout.refuse_hosts(parallel, self._config.server, spans=self._config.engine.spans)
        self._hosts = layout.HostsOf.of(parallel)
        self._own_host: OwnHost | None = None
        """Access to the server on this host. Only in a worker of an engine over several hosts."""
        self._kept = layout.kept(
            kv_cache_config, with_groups=_WITH_GROUPS, sharing=layout.ContextRanks.of(parallel)
        )
        untouched = (
            "chunk_tokens" not in self._config.sources
            or self._config.engine.chunk_tokens == Config().engine.chunk_tokens
        )
        self._chunk_tokens = layout.chunk_tokens(
            self._config.engine.chunk_tokens, self._kept, is_default=untouched
        )
        self._worker: WorkerHalf | None = None
        """Half of a worker, once its KV caches are registered."""
        self._starting = StartingHalf(layout.places(parallel))
        self._scheduler: SchedulerHalf | IdleHalf = self._starting
        self._figures: Figures | None = None
        if role == KVConnectorRole.WORKER:
            if not parallel.rank:
                begin(vllm_config)
            if self._hosts.number > 1:
                from kvtier.connectors.vllm.worker_side.pools import OwnHost

                self._own_host = OwnHost(self._config.server, self._hosts.of_rank(parallel.rank))

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether saves must arrive. False: a save that is dropped is a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return None: any layout will do. vLLM asks before it forms KV cache groups, so models
        whose recurrent state cannot be kept are refused here, by name."""
        layout.refuse_recurrent(vllm_config, with_groups=_WITH_GROUPS)
        return None

    # ---- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from kvtier.connectors.vllm.extensions.installed import of_worker
        from kvtier.connectors.vllm.worker_side.loaded import LoadedModel
        from kvtier.connectors.vllm.worker_side.worker import GroupLayers, WorkerHalf

        vllm, kept, blocks = self._vllm_config, self._kept, self._kv_cache_config.num_blocks
        geometry = Geometry(kept.groups, self._chunk_tokens)
        groups = [
            GroupLayers(layers, geometry.blocks_per_piece(group), blocks)
            for group, layers in zip(kept.groups, kept.layers, strict=True)
        ]
        self._worker = WorkerHalf(
            vllm.parallel_config.rank,
            groups,
            kv_caches,
            LoadedModel(vllm),
            of_worker(vllm, kept, kv_caches) if self._config.engine.spans else (),
            self._own_host.map if self._own_host is not None else None,
        )

    @property
    def _half(self) -> WorkerHalf:
        assert self._worker is not None, "vLLM registers the KV caches before its first step"
        return self._worker

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's layout. A MultiConnector passes what one of its connectors says to all
        of them: there each rank's layout comes with the report of a first step."""
        among_others = has_kv_transfer_group() and get_kv_transfer_group() is not self
        return None if among_others else self._own_layout()

    def _own_layout(self) -> RankLayout | None:
        if self._worker is None:
            return None
        told = self._worker.layout()
        why = why_no_prefixes(self._vllm_config, self._kv_cache_config)
        words = layout.divided(self._vllm_config.parallel_config)
        server = self._own_host.server() if self._own_host is not None else b""
        described = told.description | words
        return replace(told, why_no_prefixes=why, description=described, server=server)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Begin a step. vLLM before 0.32 names preempted requests instead, if there are any."""
        if isinstance(kv_connector_metadata, StepMetadata):
            self._half.open(self._own_part(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(connector_metadata, StepMetadata):
            connector_metadata = self._own_part(connector_metadata)
        super().bind_connector_metadata(connector_metadata)
        self._half.begin(self._step())

    def _own_part(self, metadata: StepMetadata) -> StepMetadata:
        return metadata if self._own_host is None else self._own_host.part(metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._half.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: loads go into blocks with which no step computes."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        self._half.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return ended loads to a vLLM before 0.32. See :meth:`get_transfer_results`."""
        return None, self._half.transfers()[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        ended, failed = self._half.transfers()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks of failed loads without a name for vLLM, and those that cut loads left."""
        bad, left = self._half.ends.take_blocks()
        return left if _NAMES_FAILED_LOADS else bad | left

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._half.ends.take_report()
        own = self._own_layout() if self._step().asks_layout else None
        if own is not None:
            report.layouts[layout.place(self._vllm_config.parallel_config)] = own
        return report

    # ---- scheduler -------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Make the store when all ranks have told their layout, before the first request. An error
        here ends the engine's start."""
        ranks = {place: rank for place, rank in metadata.items() if isinstance(rank, RankLayout)}
        if ranks:
            self._begin(ranks)

    def _begin(
        self, ranks: dict[tuple[int, int], RankLayout], *, among_others: bool = False
    ) -> None:
        """Make the store and the scheduler's half. ``among_others``: a MultiConnector's engine may
        end a request whose load was cut."""
        whys = {why_no_prefixes(self._vllm_config, self._kv_cache_config)}
        whys |= {rank.why_no_prefixes for rank in ranks.values()}
        if why := max(whys):
            logger.warning("%s: kvtier keeps and serves nothing in this engine", why)
            self._scheduler = IdleHalf()
            return
        from kvtier.autoconfig.explain import configuration_text
        from kvtier.connectors.vllm.extension import Tools
        from kvtier.connectors.vllm.scheduler_side.jobs import Jobs
        from kvtier.connectors.vllm.scheduler_side.scheduler import SchedulerHalf
        from kvtier.connectors.vllm.stats import Figures
        from kvtier.started import Started

        chunks, geometry, parts = layout.chunk_layout(
            self._vllm_config, self._kv_cache_config, self._kept, ranks, self._chunk_tokens
        )
        config, planned = self._planned()
        started = Started(config)
        logger.info("configuration: %s", configuration_text(config, self._chunk_tokens))
        if config.engine.namespace is not None:
            chunks = layout.of_namespace(chunks, config.engine.namespace)
        for away in started.try_engine_start().values():
            logger.warning("%s", away)
        if self._hosts.number > 1:
            same = layout.replicas(self._vllm_config, self._kv_cache_config)
            each, parts = layout.by_host(chunks, geometry, ranks, self._hosts, replicated=same)
            store, chunks = self._opened_at_all(started, each, ranks), each[0]
        else:
            store = self._opened(started, chunks)
        self._figures = Figures(store)
        on_cpu = layout.on_cpu(ranks)
        learning = self._learning(started, chunks, store)
        load_policy = self._load_policy(learning, planned, chunks, on_cpu=on_cpu)
        tools = Tools(store, chunks, geometry, Jobs(parts, load_policy.clock), load_policy)
        duty = self._duty(geometry, among_others=among_others)
        own = self._extensions(tools, duty, ranks)
        self._scheduler = SchedulerHalf(tools, duty, (*own, *([learning] if learning else [])))
        vllm = self._vllm_config
        step = min(vllm.scheduler_config.max_num_batched_tokens, vllm.model_config.max_model_len)
        if few := layout.few_slots(store.most_held, self._chunk_tokens, step):
            logger.warning("%s", few)

    def _learning(self, started: Started, chunks: ChunkLayout, store: KVStore) -> Learning | None:
        from vllm.platforms import current_platform

        from kvtier.assemble import paces
        from kvtier.connectors.vllm.extensions.learning import Learning, engine_name

        folders = started.nvme_folders(self._vllm_config.parallel_config.data_parallel_index)
        if not folders:
            return None
        device = current_platform.device_type
        with suppress(NotImplementedError):  # a platform of another package may not say more
            device = current_platform.get_device_name()
        device = f"{device}, {os.cpu_count()} CPUs"
        engine = engine_name(chunks.fingerprint, device)
        return Learning(folders[0], engine, paces(store, started.config), time.monotonic)

    def _load_policy(
        self, learning: Learning | None, planned: Prefill, chunks: ChunkLayout, *, on_cpu: bool
    ) -> LoadPolicy:
        from kvtier.load_policy.decide import (
            BUSY_COPY_PART,
            BUSY_COPY_S,
            LoadPolicy,
            slowest_token_s,
        )

        more = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        return LoadPolicy(
            self._config.engine.load_timeout_ms / 1000,
            always=bool(more.get(LOAD_EVERY_HIT)),
            prefill=planned if learning is None else learning.begin_with(planned),
            slowest_s=slowest_token_s(chunks.chunk_tokens, chunks.slot_bytes),
            slice_s=(BUSY_COPY_S, BUSY_COPY_PART) if on_cpu else None,
        )

    def _duty(self, geometry: Geometry, *, among_others: bool) -> Duty:
        from kvtier.connectors.vllm.extension import Duty
        from kvtier.connectors.vllm.scheduler_side.partial_tails import hit_unit

        transfer = self._vllm_config.kv_transfer_config
        speculative = getattr(self._vllm_config, "speculative_config", None)
        return Duty(
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
            save_decode=self._config.engine.save_decode,
            answer_tokens=1 + (speculative.num_speculative_tokens if speculative else 0),
            shares_blocks=bool(self._vllm_config.cache_config.enable_prefix_caching),
            blocks=self._kv_cache_config.num_blocks - 1,  # one is the null block
            in_flight=versions.in_flight_tokens(self._vllm_config),
            steps_alone=self._vllm_config.parallel_config.data_parallel_size == 1,
            hit_unit=hit_unit(self._vllm_config, self._kv_cache_config, geometry),
            in_parts=not among_others and self._keeps_what_arrived,
        )

    @property
    def _keeps_what_arrived(self) -> bool:
        """Whether this vLLM keeps the blocks of a load before those that it is told to compute.
        Tested with one cache group, whose blocks no ranks divide, on one host."""
        parallel, groups = self._vllm_config.parallel_config, self._kv_cache_config.kv_cache_groups
        whole = layout.ContextRanks.of(parallel) == layout.UNSHARED
        return _NAMES_FAILED_LOADS and len(groups) == 1 and whole and self._hosts.number == 1

    def _extensions(
        self, tools: Tools, duty: Duty, ranks: dict[tuple[int, int], RankLayout]
    ) -> tuple[Extension, ...]:
        """Make the extensions. Raises ConfigError for another package's that cannot be made."""
        from kvtier.connectors.vllm.extension import EngineFacts
        from kvtier.connectors.vllm.extensions.installed import installed, shipped

        named = self._vllm_config.kv_transfer_config.kv_connector_extra_config.get(EXTENSIONS, {})
        try:
            others = installed(named, tools)
        except ConfigError:
            tools.store.close()
            raise
        facts = EngineFacts(
            duty,
            self._vllm_config,
            self._kv_cache_config,
            [*ranks.values()],
            self._config.engine.spans,
        )
        return (*shipped(tools, facts), *others)

    def _opened(self, started: Started, chunks: ChunkLayout) -> KVStore:
        """Open the store. Raises ConfigError or TierError for what waiting does not repair."""
        from kvtier.assemble import assemble
        from kvtier.autoconfig.start import compute_for_engine
        from kvtier.tiers.nvme.folder import wait_until_free

        replica = self._vllm_config.parallel_config.data_parallel_index
        wait_until_free(started.nvme_folders(replica))
        compute = compute_for_engine(self._vllm_config, chunks.chunk_tokens)
        return assemble(started, chunks, replica, compute)

    def _opened_at_all(
        self,
        started: Started,
        chunks: Sequence[ChunkLayout],
        ranks: dict[tuple[int, int], RankLayout],
    ) -> KVStore:
        from kvtier.assemble import assemble_hosts

        told = [
            {rank.server for rank in own.values()} for own in layout.of_each(ranks, self._hosts)
        ]
        return assemble_hosts(started, chunks, told)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether groups' hits may begin apart. False: a hit begins where all groups end in vLLM's
        own cache. Else vLLM would tell where full attention ends, and earlier parts of a window or
        state could not be loaded."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all kept groups. Others need nothing: vLLM computes a replayed window again, and a
        hit ends where a ring is empty."""
        return tuple(group.number for group in self._kept.groups)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._scheduler.report(report)
            if self._scheduler is self._starting and self._starting.complete:
                self._begin_late()

    def _begin_late(self) -> None:
        """Make the store after a first step. An error turns the cache off and ends no request."""
        try:
            self._begin(self._starting.layouts, among_others=True)
        except KVTierError as error:
            logger.error("kvtier keeps and serves nothing in this engine: %s", error)  # noqa: TRY400 it says what to do
            self._scheduler = IdleHalf()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        return versions.hit_sources(self._scheduler.sources(request))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return counts. vLLM asks both halves after every step, or the scheduler's half only after
        a worker gave some: a worker gives an empty one then."""
        counts = self._scheduler.counts()
        if self._figures is not None:
            counts |= self._figures.new()
        opens = _WORKERS_FIRST and self.role == KVConnectorRole.WORKER
        return TierStats(data=counts) if counts or opens else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return TierStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return TierMetrics(*arguments)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.expects_reports()

    def reset_cache(self) -> bool | None:
        self._scheduler.clear()
        return True

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.events()

    def shutdown(self) -> None:
        self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def _tell(self, engine: str) -> None:
        mode = versions.mode(self._vllm_config)
        logger.info("kvtier %s, %s, %s", kvtier.__version__, engine, mode)
        for line in versions.limits(KVConnectorBase_V1):
            logger.info("%s", line)
        tell(self._config.remarks)

    def _planned(self) -> tuple[Config, Prefill]:
        """Return the configuration with auto-config's values, and an estimate of the prefill speed
        until the engine's own steps are known. A server's tiers are not planned."""
        from kvtier.autoconfig.start import plan_for_engine, prefill_for_engine, settled
        from kvtier.load_policy.prefill import Certainty, Prefill

        given = self._config
        if given.engine.auto and not given.server.here:
            plan = plan_for_engine(self._vllm_config, given)
            return settled(given, plan), Prefill(plan.prefill, Certainty.GUESSED)
        if given.engine.auto:
            logger.info("auto-config: the tiers are the server's (%s)", given.server.here)
        return given, Prefill(prefill_for_engine(self._vllm_config), Certainty.GUESSED)

    # ---- steps -----------------------------------------------------------------------------------

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
