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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as LateError
from functools import cache, partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult
from sglang.srt.runtime_context import get_context

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane, future_of
from kvtier.extensions.cache_server import CacheServer, connect, safely, settings, tenant
from kvtier.extensions.sglang.engine_identity import identity
from kvtier.extensions.sglang.moves import Piece, Transfer
from kvtier.extensions.sglang.pages import Form, PoolPages, head_groups, legal_ends
from kvtier.server.listening.strangers import LogLimit

logger = logging.getLogger("kvtier.sglang")
logger.addFilter(LogLimit(20, 60.0))

_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
_SCHEDULER_S, _FIND_S, _BATCH_S, _ATTACH_S, _CLOSE_S = 0.1, 1.0, 5.0, 10.0, 2.0
_SPARE_S, _POLL_S = 0.5, 0.02
"""A batch stops waiting for the server ``_SPARE_S`` before its end."""
_FEW_TOKENS, _QUEUED_CALLS, _COUNTED_BATCHES = 16, 64, 4096
_THREADS = {"find": 2, "load": 1, "save": 1, "open": 2}
"""A lane each: a lookup never queues behind copies, nor a load behind saves."""


class StoredPool:
    """A host pool of SGLang with its chunks at the server. Without ``server`` all is a miss. A pool
    without bytes, on which only other pools' pages hang, has no ``pages.sizes``."""

    def __init__(self, pool: Any, pages: PoolPages) -> None:
        self.pool, self.pages, self.own = pool, pages, b""
        self.opening: Future[CacheServer | None] | None = None

    @property
    def server(self) -> CacheServer | None:
        """None before it has made room for the pool, and where it refuses."""
        opening = self.opening
        return opening.result() if opening is not None and opening.done() else None

    def keys(self, hashes: Sequence[str]) -> list[ChunkKey]:
        return self.pages.keys(self.own, hashes)

    def pieces(self, indices: Any, flat: Sequence[Any]) -> list[list[Piece]]:
        """Of the chunks of the pages that begin at every ``page_tokens``-th index."""
        if self.pages.form == "flat":
            return [[(page.data_ptr(), page.nbytes)] for page in flat]
        split = self.pages.groups if self.pages.form == "heads" else 0
        pieces = list(zip(*_pieces(self.pool, indices, split), strict=True))
        count = len(self.pages.sizes)
        return [pieces[at : at + count] for at in range(0, len(pieces), count)]

    def flat(self, indices: Any, *, saves: bool) -> list[Any]:
        """Tensors of the pages, where they have no pieces in the pool to point at."""
        firsts = indices[:: self.pages.page_tokens].tolist() if self.pages.form == "flat" else ()
        if saves:
            return [self.pool.get_data_page(one, flat=True).contiguous() for one in firsts]
        return [self.pool.get_dummy_flat_data_page() for _ in firsts]


class HiCachePages(HiCacheStorage):
    """One rank's pages. Raises ConfigError for settings that kvtier does not know."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        given = {key: value for key, value in extra.items() if key not in _SGLANGS}
        self._config = settings(given, where="--hicache-storage-backend-extra-config")
        extra["interface_v1"] = 1  # SGLang looks next: by its older calls pages are copied twice
        self._ranks, self._scheduler = storage_config, threading.get_ident()
        self._pools: dict[str, StoredPool] = {}
        self._stats = _metrics() if storage_config.enable_storage_metrics else None
        self._lanes = {
            name: Lane(f"sglang-{name}", threads, urgent_bound=0, bound=_QUEUED_CALLS)
            for name, threads in _THREADS.items()
        }
        self._updates = _updates()
        changed = "weights were replaced in the running engine" if self._updates else ""
        arguments = dict(get_context().resolved_server_args_dict())
        self._engine = future_of(self._lanes["open"], partial(identity, arguments, changed))

    # ---- pools -----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._register(mem_pool_host, "kv")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, pool: Any, name: str) -> None:
        """Raises ConfigError where a page cannot be divided as ``tp_lcm_size`` asks."""
        if name in self._pools:
            return
        pages = _pages_of(pool, name, self._ranks)
        stored = self._pools[name] = StoredPool(pool, pages)
        if not pages.sizes:
            return
        if name == "kv" and pages.page_tokens < _FEW_TOKENS:
            logger.warning(
                "--page-size %d: a page is a chunk, and small ones are slow; give --page-size 64",
                pages.page_tokens,
            )
        opens = partial(safely, Counter[str](), partial(self._open, stored, pages), None)
        stored.opening = future_of(self._lanes["open"], opens)

    def _open(self, stored: StoredPool, pages: PoolPages) -> CacheServer | None:
        """On a lane: the server makes room for the pool's size of chunks."""
        assert self._engine is not None
        kinds = [kind.__name__ for kind in type(stored.pool).__mro__]
        layout = pages.chunks(self._engine.result() | tenant(self._config), self._ranks, kinds)
        stored.own = layout.fingerprint
        try:
            server, until = connect(self._config, layout), time.monotonic() + _ATTACH_S
        except ConfigError as error:
            logger.warning("pool %s is not kept: %s", pages.pool, error)
            return None
        while not server.is_ready and time.monotonic() < until:
            time.sleep(_POLL_S)
        return server

    def on_host_pools_registered(self) -> None:
        """Wait for the server, ten seconds at most: until all pools have their room, no prefix can
        be found."""
        opening = {one.opening: name for name, one in self._pools.items() if one.opening}
        if late := wait(opening, _ATTACH_S).not_done:
            names = ", ".join(opening[one] for one in late)
            logger.warning("%s: misses until the kvtier server is ready", names)

    def _stored(self, name: str) -> StoredPool | None:
        """The pool, once its server is there. None also after weights were replaced: pages of
        both are under way then, and none tells of which it is."""
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

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        within_s = _SCHEDULER_S if threading.get_ident() == self._scheduler else _FIND_S
        find = partial(self._found_by_all, keys, pool_transfers or [])
        found = self._bounded("find", find, PoolTransferResult.empty(), within_s)
        self._count(hit=found.kv_hit_pages, miss=len(keys) - found.kv_hit_pages)
        return found

    def _found_by_all(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        """The longest prefix of which each pool has what it needs, and the set of all such."""
        stored = self._stored("kv")
        if stored is None or not (stored.server or transfers):
            return PoolTransferResult.empty()
        count = len(keys)
        if stored.server is not None:
            count = stored.server.find(stored.keys(keys)) // stored.pages.groups
        hits, ends = ({PoolName.KV: count} if count else {}), set(range(1, count + 1))
        for one in transfers:
            if not ends:
                break
            own = self._ends(one, keys[:count])
            if own:
                hits[one.name] = max(own)
            ends &= own
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def _ends(self, transfer: Any, keys: Sequence[str]) -> set[int]:
        stored, policy = self._stored(transfer.name), transfer.hit_policy
        if stored is None or stored.server is None:
            return set()
        # From the end where only the end counts: over TCP only so many gaps are looked behind.
        step = 1 if policy == "all_pages" else -1
        held = stored.pages.whole(stored.server.known(stored.keys(keys[::step])))[::step]
        ends = legal_ends(policy, held, len(transfer.keys or ()))
        if ends is None:
            logger.warning("hit policy %s of pool %s is unknown: no hits", policy, transfer.name)
        return ends or set()

    # ---- moves -----------------------------------------------------------------------------------

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move("kv", keys, host_indices, time.monotonic() + _BATCH_S, saves=False)

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move("kv", keys, host_indices, time.monotonic() + _BATCH_S, saves=True)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_each(transfers, saves=False)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_each(transfers, saves=True)

    def _move_each(self, transfers: Sequence[Any], *, saves: bool) -> dict[str, list[bool]]:
        """All of a call's pools within one bound."""
        until, each = time.monotonic() + _BATCH_S, partial(self._move, saves=saves)
        return {one.name: each(one.name, one.keys or [], one.host_indices, until)
                for one in transfers}  # fmt: skip

    def _move(
        self, name: str, hashes: list[str], indices: Any, until: float, *, saves: bool
    ) -> list[bool]:
        """Of each page, whether it is held (``saves``), or was read."""
        stored, begun = self._stored(name), time.monotonic()
        if stored is None or stored.server is None or not hashes:
            return [stored is not None] * len(hashes)
        if indices is None or len(indices) != len(hashes) * stored.pages.page_tokens:
            logger.warning("pool %s: %d pages, but not their indices", name, len(hashes))
            return [False] * len(hashes)
        server, keys, pool = stored.server, stored.keys(hashes), stored
        transfer, flat = Transfer(len(keys)), stored.flat(indices, saves=saves)

        def move() -> list[bool]:
            transfer.pieces = pool.pieces(indices, flat)
            if saves:
                return server.save(keys, transfer.fill, until - _SPARE_S)
            server.load(keys, transfer.take, until - _SPARE_S)
            return transfer.taken

        lane, nothing = "save" if saves else "load", [False] * len(keys)
        held = self._bounded(lane, move, nothing, until - begun)
        transfer.end()
        for place, page in enumerate(() if saves else flat):
            if transfer.taken[place]:
                pool.pool.set_from_flat_data_page(indices[place * pool.pages.page_tokens], page)
        pages = stored.pages.whole(held if saves else transfer.taken)
        moved, outcome = sum(pages), "stored" if saves else "loaded"
        self._count(**{outcome: moved, f"not_{outcome}": len(pages) - moved})
        if name == "kv" and moved and self._stats is not None:
            kind, seconds = "backup" if saves else "prefetch", time.monotonic() - begun
            size = moved * sum(stored.pages.sizes) * stored.pages.groups
            for field, value in (("pgs", moved), ("bandwidth", size / 1e9 / max(seconds, 1e-9))):
                told = getattr(self._stats, f"{kind}_{field}")
                told[:] = [*told, value][-_COUNTED_BATCHES:]
        return pages

    def _bounded(self, lane: str, work: Callable[[], Any], otherwise: Any, within_s: float) -> Any:
        """Result of ``work`` on the lane, or ``otherwise`` where it fails or takes longer."""
        failed: Counter[str] = Counter()
        answer = future_of(self._lanes[lane], lambda: safely(failed, work, otherwise))
        if answer is None:
            return otherwise
        try:
            return answer.result(max(0.0, within_s))
        except LateError:
            logger.warning("no answer of the kvtier server within %.3g s: misses", within_s)
            failed["late_calls"] += 1
            answer.cancel()
            return otherwise
        finally:
            self._count(**failed)

    # ---- SGLang's older calls, which it does not make where interface_v1 is on -------------------

    def batch_get(self, *_: Any, **__: Any) -> None:
        return None

    def batch_set(self, *_: Any, **__: Any) -> bool:
        return False

    get, set = batch_get, batch_set

    # ---- the rest --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget this engine's pages at the server, those that other engines share with it too."""
        for stored in self._pools.values():
            if stored.server is not None:
                self._bounded("find", stored.server.clear, None, _FIND_S)

    def get_stats(self) -> Any:
        """Batches since the last call, for SGLang's metrics. None: they are off."""
        told = self._stats
        if told is not None:
            self._stats = _metrics()
        return told

    def _count(self, **pages: int) -> None:
        for outcome, count in pages.items() if self._stats is not None else ():
            _metric().labels(outcome).inc(count)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close(_CLOSE_S)
        for stored in self._pools.values():
            if stored.opening is not None:
                stored.opening.add_done_callback(_close)


def _metrics() -> Any:
    from sglang.srt.observability.metrics_collector import StorageMetrics  # it imports all models

    return StorageMetrics()


@cache
def _metric() -> Any:
    from prometheus_client import Counter as Counted  # SGLang has told it by now where to count

    return Counted("kvtier_sglang_pages", "Pages by what became of them", ["outcome"])


def _close(opened: Future[CacheServer | None]) -> None:
    if server := opened.result():
        server.close()


def _updates() -> int:
    """How often weights, or their version, were replaced since the engine started."""
    log = get_context().overrides_log()
    return sum("weight_version" in fields or "model_path" in fields for _, fields in log)


def _pages_of(pool: Any, name: str, ranks: Any) -> PoolPages:
    """Raises ConfigError where heads cannot be divided."""
    tokens, layout = getattr(pool, "page_size", 1) or 1, str(getattr(pool, "layout", ""))
    common = name, layout, str(getattr(pool, "dtype", "")), tokens
    groups, first = head_groups(ranks, layout, name, getattr(pool, "head_num", 0))
    try:
        found = _pieces(pool, torch.zeros(tokens, dtype=torch.int64), groups)
    except (AssertionError, NotImplementedError, ValueError):  # not in this layout
        return PoolPages(*common, "flat", (pool.get_dummy_flat_data_page().nbytes,))
    sizes, count = tuple(found[1]) if found else (), max(1, groups)
    form: Form = "heads" if groups else "pieces"
    return PoolPages(*common, form, sizes[: len(sizes) // count], count, first)


def _pieces(pool: Any, indices: Any, groups: int) -> Any:
    """Addresses and sizes, page by page, of each its ``groups`` of heads one after another."""
    if groups:
        return pool.get_split_heads_page_buffer_meta(indices, groups)
    return pool.get_page_buffer_meta(indices)
