"""HiCachePages: SGLang's HiCacheStorage over a kvtier server.

SGLang calls from its scheduler's thread (which may wait a tenth of a second), from the thread that
asks for prefetches, and from one that reads and one that writes, whose batches take five seconds at
most. Lanes do the work, so nothing raises into SGLang once the storage is attached: what cannot be
had is a miss, what cannot be kept is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import cache, partial, partialmethod
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_context

from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane, future_of
from kvtier.extensions.cache_server import CacheServer, connect, safely, settings, tenant, within
from kvtier.extensions.sglang.engine_identity import identity
from kvtier.extensions.sglang.moves import Transfer
from kvtier.extensions.sglang.pages import PoolPages, head_groups, legal_ends
from kvtier.server.strangers import LogLimit

logger = logging.getLogger("kvtier.sglang")
logger.addFilter(LogLimit(20, 60.0))

_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
_SCHEDULER_S, _FIND_S, _BATCH_S, _ATTACH_S, _CLOSE_S = 0.1, 1.0, 5.0, 10.0, 2.0
_SPARE_S, _POLL_S = 0.5, 0.02
"""Time before a batch's end at which it stops waiting for the server, and of one poll."""
_ANSWER_MS, _FEW_TOKENS, _QUEUED_CALLS = 1000, 16, 64
_LANES, _THREADS = ("find", "load", "save", "open"), 2
"""Lanes by kind of call: a lookup never queues behind copies, nor a load behind saves."""


class StoredPool:
    """A host pool of SGLang with its chunks at the server. Without ``server`` all is a miss. A pool
    without bytes, on which only other pools' pages hang, has no ``pages.sizes``.

    Raises ConfigError where a page cannot be divided as ``tp_lcm_size`` asks, and what SGLang
    raises for a pool whose pages have no addresses in its layout."""

    def __init__(self, pool: Any, name: str, ranks: Any) -> None:
        self.pool = pool
        self.server: CacheServer | None = None
        self.opening: Future[None] | None = None
        tokens, layout = getattr(pool, "page_size", 1) or 1, str(getattr(pool, "layout", ""))
        groups = head_groups(ranks, layout, name, getattr(pool, "head_num", 0))
        dtype, self._groups = str(getattr(pool, "dtype", "")), len(groups)
        _, sizes = self._addresses(torch.zeros(tokens, dtype=torch.int64)) or ((), ())
        sizes = tuple(sizes[: len(sizes) // max(1, self._groups)])
        self.pages = PoolPages(name, layout, dtype, tokens, sizes, groups)

    def pieces(self, indices: Any) -> list[list[tuple[int, int]]]:
        """Return each chunk's pieces (address, bytes), of pages whose tokens lie at ``indices``."""
        pieces = list(zip(*self._addresses(indices), strict=True))
        count = len(self.pages.sizes)
        return [pieces[at : at + count] for at in range(0, len(pieces), count)]

    def _addresses(self, indices: Any) -> Any:
        """Return addresses and sizes, page by page, of each its head groups one after another."""
        if self._groups:
            return self.pool.get_split_heads_page_buffer_meta(indices, self._groups)
        return self.pool.get_page_buffer_meta(indices)

    def close(self, _: object) -> None:
        if self.server is not None:
            self.server.close()


class HiCachePages(HiCacheStorage):
    """Storage of one rank's pages. Raises ConfigError for settings that kvtier does not know."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        given = {key: value for key, value in extra.items() if key not in _SGLANGS}
        given = {"server_timeout_ms": _ANSWER_MS} | given
        self._config = settings(given, where="--hicache-storage-backend-extra-config")
        extra["interface_v1"] = 1  # SGLang looks next: by its older calls pages are copied twice
        self._ranks, self._scheduler = storage_config, threading.get_ident()
        self._pools: dict[str, StoredPool] = {}
        self._stats = _metrics() if storage_config.enable_storage_metrics else None
        self._counts, self._told = Counter[str](), Counter[str]()
        self._lanes = {
            name: Lane(f"sglang-{name}", _THREADS, urgent_bound=0, bound=_QUEUED_CALLS)
            for name in _LANES
        }
        self._updates = _updates()
        arguments = dict(get_context().resolved_server_args_dict())
        identify = partial(identity, arguments, replaced=self._updates)
        self._engine = future_of(self._lanes["open"], identify)

    # ---- pools -----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.register_mem_host_pool_v2(mem_pool_host, "kv")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(host_pool_name)
        if name in self._pools:
            return
        try:
            stored = self._pools[name] = StoredPool(host_pool, name, self._ranks)
        except ConfigError:
            raise
        except (AssertionError, NotImplementedError, ValueError) as error:
            logger.warning("pool %s is not kept, its pages have no address: %s", name, error)
            return
        if not stored.pages.sizes:
            return
        tokens = stored.pages.page_tokens
        if name == "kv" and tokens < _FEW_TOKENS:
            logger.warning("--page-size %d: such chunks are slow; give 64", tokens)
        opens = partial(safely, self._counts, partial(self._open, stored), None)
        stored.opening = future_of(self._lanes["open"], opens)

    def _open(self, stored: StoredPool) -> None:
        """Have the server make room for the pool's chunk size. On a lane."""
        assert self._engine is not None
        engine = self._engine.result() | tenant(self._config)
        kinds = [kind.__name__ for kind in type(stored.pool).__mro__]
        layout = stored.pages.chunks(engine, self._ranks, kinds)
        try:
            server, until = connect(self._config, layout), time.monotonic() + _ATTACH_S
        except ConfigError as error:
            logger.warning("pool %s is not kept: %s", stored.pages.pool, error)
            return
        while not server.is_ready and time.monotonic() < until:
            time.sleep(_POLL_S)
        stored.pages = replace(stored.pages, own=layout.fingerprint)
        stored.server = server

    def on_host_pools_registered(self) -> None:
        """Wait, ten seconds at most: until every pool has its room, no prefix can be found."""
        opening = [one.opening for one in self._pools.values() if one.opening]
        if late := wait(opening, _ATTACH_S).not_done:
            logger.warning("%d pools: misses until the kvtier server is ready", len(late))

    def _stored(self, name: str) -> StoredPool | None:
        """Return the pool, once its server is there. None also after weights were replaced: pages
        of both are on their way then, and none tells of which it is."""
        stored = self._pools.get(name)
        if stored is None or (stored.server is None and stored.pages.sizes):
            return None
        if _updates() == self._updates:
            return stored
        logger.warning(
            "weights were replaced in the running engine: kvtier keeps nothing from now on; detach "
            "the storage and attach it again to go on with the new weights"
        )
        return None

    # ---- lookups ---------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        within_s = _SCHEDULER_S if threading.get_ident() == self._scheduler else _FIND_S
        find = partial(self._found_by_all, keys, pool_transfers or [])
        nothing = PoolTransferResult.empty()
        found = within(self._lanes["find"], self._counts, find, nothing, within_s)
        self._counts.update(hit=found.kv_hit_pages, miss=len(keys) - found.kv_hit_pages)
        return found

    def _found_by_all(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        """Find the longest prefix of which each pool has what it needs, and the set of all such."""
        stored = self._stored("kv")
        count = len(keys) if stored is not None and transfers else 0
        if stored is not None and stored.server is not None:
            count = stored.server.find(stored.pages.keys(keys)) // stored.pages.count
        hits, ends = ({PoolName.KV: count} if count else {}), set(range(1, count + 1))
        for one in transfers:
            own = self._ends(one, keys[:count]) if ends else ends
            if own:
                hits[one.name] = max(own)
            ends &= own
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def _ends(self, transfer: Any, keys: Sequence[str]) -> set[int]:
        stored, policy = self._stored(transfer.name), transfer.hit_policy
        if stored is None or stored.server is None:
            return set()
        # From the end if only the end counts: over TCP only so many gaps are looked behind.
        step = 1 if policy == "all_pages" else -1
        held = stored.pages.whole(stored.server.known(stored.pages.keys(keys[::step])))[::step]
        ends = legal_ends(policy, held, len(transfer.keys or ()))
        if ends is None:
            logger.warning("hit policy %s of pool %s is unknown: no hits", policy, transfer.name)
        return ends or set()

    # ---- moves -----------------------------------------------------------------------------------

    def _move_kv(
        self, keys: Any, host_indices: Any, extra_info: Any = None, *, saves: bool
    ) -> list[bool]:
        one = PoolTransfer(PoolName.KV, host_indices, keys=keys)
        return self._move_each([one], saves=saves)[PoolName.KV]

    def _move_each(
        self, transfers: Any, extra_info: Any = None, *, saves: bool
    ) -> dict[str, list[bool]]:
        """Move the pages of all pools of a call, within one bound. Returns a flag for each page."""
        until = time.monotonic() + _BATCH_S
        return {one.name: self._move(one, until, saves=saves) for one in transfers}

    batch_get_v1 = partialmethod(_move_kv, saves=False)
    batch_set_v1 = partialmethod(_move_kv, saves=True)
    batch_get_v2 = partialmethod(_move_each, saves=False)
    batch_set_v2 = partialmethod(_move_each, saves=True)

    def _move(self, of: Any, until: float, *, saves: bool) -> list[bool]:
        """Save or load pages. Returns for each whether it is held (``saves``), or was read."""
        stored, begun = self._stored(of.name), time.monotonic()
        hashes, indices = of.keys or [], of.host_indices
        if stored is None or stored.server is None or not hashes:
            return [stored is not None] * len(hashes)
        if indices is None or len(indices) != len(hashes) * stored.pages.page_tokens:
            logger.warning("pool %s: %d pages, but not their indices", of.name, len(hashes))
            return [False] * len(hashes)
        server, keys, pool = stored.server, stored.pages.keys(hashes), stored
        transfer, lane = Transfer(len(keys)), self._lanes["save" if saves else "load"]

        def move() -> list[bool]:
            transfer.pieces = pool.pieces(indices)
            if saves:
                return server.save(keys, transfer.fill, until - _SPARE_S)
            server.load(keys, transfer.take, until - _SPARE_S)
            return transfer.copied

        held = within(lane, self._counts, move, [False] * len(keys), until - begun)
        transfer.end()
        pages = stored.pages.whole(held if saves else transfer.copied)
        moved, outcome = sum(pages), "stored" if saves else "loaded"
        self._counts.update({outcome: moved, f"not_{outcome}": len(pages) - moved})
        if of.name == "kv" and moved and self._stats is not None:
            kind, size = "backup" if saves else "prefetch", sum(pool.pages.sizes) * pool.pages.count
            getattr(self._stats, f"{kind}_pgs").append(moved)
            pace = moved * size / 1e9 / (time.monotonic() - begun)
            getattr(self._stats, f"{kind}_bandwidth").append(pace)
        return pages

    def _by_tensors(self, *_: Any, **__: Any) -> None:
        """Do nothing. SGLang calls batch_get and batch_set in _generic_page_* of its
        managers/cache_controller.py alone, which interface_v1 replaces, and the others never."""

    get = set = exists = batch_get = batch_set = _by_tensors

    # ---- the rest --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget this engine's pages at the server, those that other engines share with it too."""
        for stored in self._pools.values():
            if stored.server is not None:
                within(self._lanes["find"], self._counts, stored.server.clear, None, _FIND_S)

    def get_stats(self) -> Any:
        """Take the batches since the last call, for SGLang's metrics. None if those are off."""
        if self._stats is None:
            return None
        counts = self._counts.copy()
        for outcome, count in (counts - self._told).items():
            _metric().labels(outcome).inc(count)
        told, self._stats, self._told = self._stats, _metrics(), counts
        return told

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close(_CLOSE_S)
        for stored in self._pools.values():
            if stored.opening is not None:
                stored.opening.add_done_callback(stored.close)


def _metrics() -> Any:
    from sglang.srt.observability.metrics_collector import StorageMetrics  # it imports all models

    return StorageMetrics()


@cache
def _metric() -> Any:
    from prometheus_client import Counter as Counted  # SGLang has told it by now where to count

    return Counted("kvtier_sglang_pages", "Pages by what became of them", ["outcome"])


def _updates() -> int:
    """Count how often weights, or their version, were replaced since the engine started."""
    log = get_context().overrides_log()
    return sum("weight_version" in fields or "model_path" in fields for _, fields in log)
