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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import future_of
from kvtier.extensions.cache_server import CacheServer, connect, settings, tenant
from kvtier.extensions.sglang.engine_identity import identity
from kvtier.extensions.sglang.moves import Bounded, Copy, FlatPages, Pieces, Transfer
from kvtier.extensions.sglang.pages import PoolPages, Ranks, head_groups, legal_ends
from kvtier.server.listening.strangers import LogLimit

logger = logging.getLogger("kvtier.sglang")

_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
_SCHEDULER_S, _FIND_S, _BATCH_S, _ATTACH_S = 0.1, 1.0, 5.0, 10.0
_SPARE_S, _POLL_S, _LOG_S = 0.5, 0.02, 60.0
"""A batch stops waiting for the server ``_SPARE_S`` before its end."""
_LOG_LINES, _FEW_TOKENS, _COUNTED_BATCHES = 20, 16, 4096


class StoredPool:
    """A host pool of SGLang with its chunks at the server. Without ``server`` all is a miss.
    ``pages`` is None for a pool without bytes, on which only other pools' pages hang."""

    def __init__(self, pool: Any, pages: PoolPages | None) -> None:
        self.pool, self.pages = pool, pages
        self.server: CacheServer | None = None
        self.own = b""
        self.opening: Future[None] | None = None

    @property
    def is_ready(self) -> bool:
        done = self.opening is None or self.opening.done()
        return done and (self.server is None or self.server.is_ready)

    def keys(self, hashes: Sequence[str]) -> list[ChunkKey]:
        assert self.pages is not None
        return self.pages.keys(self.own, hashes)

    def copies(self, indices: Any) -> Copy:
        """The pages that begin at every ``page_tokens``-th index."""
        assert self.pages is not None
        if self.pages.form == "flat":
            return FlatPages(self.pool, indices[:: self.pages.page_tokens].tolist())
        if self.pages.form == "heads":
            found = self.pool.get_split_heads_page_buffer_meta(indices, self.pages.groups)
        else:
            found = self.pool.get_page_buffer_meta(indices)
        pieces, count = list(zip(*found, strict=True)), len(self.pages.sizes)
        return Pieces([pieces[at : at + count] for at in range(0, len(pieces), count)])


class HiCachePages(HiCacheStorage):
    """One rank's pages. Raises ConfigError for settings that kvtier does not know."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        if not logger.filters:
            logger.addFilter(LogLimit(_LOG_LINES, _LOG_S))
        extra = storage_config.extra_config or {}
        given = {key: value for key, value in extra.items() if key not in _SGLANGS}
        self._config = settings(given, where="--hicache-storage-backend-extra-config")
        self._ranks = Ranks.of(storage_config)
        self._by_pieces = bool(extra.get("interface_v1"))
        self._scheduler = threading.get_ident()
        self._pools: dict[str, StoredPool] = {}
        self._lock, self._closed = threading.Lock(), False
        self._stats: dict[str, list[float]] | None = (
            {} if storage_config.enable_storage_metrics else None
        )
        self._bounded = Bounded()
        self._updates = _updates()
        changed = "weights were replaced in the running engine" if self._updates else ""
        self._engine = future_of(self._bounded.opens, partial(identity, _arguments(), changed))

    # ---- pools -----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._register(mem_pool_host, "kv")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, _name(host_pool_name))

    def _register(self, pool: Any, name: str) -> None:
        """Raises ConfigError where a page cannot be divided as ``tp_lcm_size`` asks."""
        if name in self._pools:
            return
        by_pieces = self._by_pieces or name != "kv"
        pages = _pages_of(pool, name, self._ranks, by_pieces=by_pieces)
        stored = self._pools[name] = StoredPool(pool, pages)
        if pages is None:
            return
        if name == "kv" and pages.page_tokens < _FEW_TOKENS:
            words = (
                "--page-size %d: a page is a chunk, and small ones are slow; give --page-size 64"
            )
            logger.warning(words, pages.page_tokens)
        stored.opening = future_of(self._bounded.opens, partial(self._open, stored, pages))

    def _open(self, stored: StoredPool, pages: PoolPages) -> None:
        """On a lane: the server makes room for the pool's size of chunks."""
        assert self._engine is not None
        kinds = [kind.__name__ for kind in type(stored.pool).__mro__]
        engine = self._engine.result() | tenant(self._config)
        layout = pages.chunks(engine, self._ranks, kinds)
        stored.own = layout.fingerprint
        try:
            server = connect(self._config, layout)
        except ConfigError as error:
            logger.warning("pool %s is not kept: %s", pages.pool, error)
            return
        with self._lock:
            if not self._closed:
                stored.server = server
                return
        server.close()

    def on_host_pools_registered(self) -> None:
        """Wait for the server, ten seconds at most: until all pools have their room, no prefix can
        be found."""
        until, pause = time.monotonic() + _ATTACH_S, threading.Event()
        while waiting := [name for name, one in self._pools.items() if not one.is_ready]:
            if time.monotonic() > until:
                logger.warning("%s: misses until the kvtier server is ready", ", ".join(waiting))
                return
            pause.wait(_POLL_S)

    def _stored(self, name: str) -> StoredPool | None:
        """The pool, once its server is there. None also after weights were replaced: pages of
        both are under way then, and none tells of which it is."""
        stored = self._pools.get(name)
        if stored is None or (stored.server is None and stored.pages is not None):
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
        stored = self._stored("kv")
        if stored is None or stored.pages is None:
            return 0
        return int(self._ask(lambda: self._found(stored, keys), 0))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        transfers = pool_transfers or []
        return self._ask(lambda: self._found_by_all(keys, transfers), PoolTransferResult.empty())

    def _ask(self, work: Callable[[], Any], otherwise: Any) -> Any:
        is_scheduler = threading.get_ident() == self._scheduler
        within_s = _SCHEDULER_S if is_scheduler else _FIND_S
        return self._bounded.call(self._bounded.finds, work, otherwise, within_s)

    def _found(self, stored: StoredPool, keys: Sequence[str]) -> int:
        if stored.pages is None:
            return len(keys)
        assert stored.server is not None
        return stored.server.find(stored.keys(keys)) // stored.pages.groups

    def _found_by_all(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        """The longest prefix of which each pool has what it needs, and the set of all such."""
        stored = self._stored("kv")
        count = 0 if stored is None else self._found(stored, keys)
        if stored is None or (stored.pages is None and not transfers):
            return PoolTransferResult.empty()
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
        stored, policy = self._stored(_name(transfer.name)), _name(transfer.hit_policy)
        if stored is None or stored.server is None or stored.pages is None:
            return set()
        # From the end where only the end counts: over TCP only so many gaps are looked behind.
        step = 1 if policy == "all_pages" else -1
        held = stored.pages.whole(stored.server.known(stored.keys(keys[::step])))[::step]
        ends = legal_ends(policy, held, len(transfer.keys or ()))
        if ends is None:
            logger.warning("hit policy %s of pool %s is unknown: no hits", policy, transfer.name)
        return ends or set()

    # ---- moves -----------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._move("kv", keys, host_indices, saves=False)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._move("kv", keys, host_indices, saves=True)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_each(transfers, saves=False)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_each(transfers, saves=True)

    def _move_each(self, transfers: Sequence[Any], *, saves: bool) -> dict[str, list[bool]]:
        """All of a call's pools within one bound."""
        until, moved = time.monotonic() + _BATCH_S, {}
        for one in transfers:
            keys, left = one.keys or [], max(0.0, until - time.monotonic())
            name, indices = _name(one.name), one.host_indices
            moved[one.name] = self._move(name, keys, indices, saves=saves, within_s=left)
        return moved

    def _move(
        self, name: str, keys: list[str], indices: Any, *, saves: bool, within_s: float = _BATCH_S
    ) -> list[bool]:
        stored = self._stored(name)
        if stored is None or stored.pages is None or not keys:
            return [stored is not None] * len(keys)
        if indices is None or len(indices) != len(keys) * stored.pages.page_tokens:
            logger.warning("pool %s: %d pages, but not their indices", name, len(keys))
            return [False] * len(keys)
        copies = partial(stored.copies, indices)
        return self._moved(stored, keys, copies, saves=saves, within_s=within_s)

    def _moved(
        self,
        stored: StoredPool,
        hashes: Sequence[str],
        copies: Callable[[], Copy],
        *,
        saves: bool,
        within_s: float = _BATCH_S,
    ) -> list[bool]:
        """Of each page, whether it is held (``saves``), or was read."""
        assert stored.server is not None and stored.pages is not None
        begun, server, keys = time.monotonic(), stored.server, stored.keys(hashes)
        transfer, until, nothing = (
            Transfer(len(keys)),
            begun + within_s - _SPARE_S,
            [False] * len(keys),
        )

        def move() -> list[bool]:
            transfer.copies = copies()
            if saves:
                return server.save(keys, transfer.fill, until)
            server.load(keys, transfer.take, until)
            return transfer.taken

        lane = self._bounded.saves if saves else self._bounded.loads
        done = self._bounded.call(lane, move, nothing, within_s)
        transfer.end()
        pages = stored.pages.whole(done if saves else transfer.taken)
        if stored.pages.pool == "kv":
            size = sum(pages) * sum(stored.pages.sizes) * stored.pages.groups
            self._count("backup" if saves else "prefetch", sum(pages), size, begun)
        return pages

    # ---- SGLang's older calls, of tensors --------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        done = self._move_tensors(keys, target_locations or [], saves=False)
        if not any(done):
            return [None] * len(keys)
        return [one if has else None for one, has in zip(target_locations, done, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        return all(self._move_tensors(keys, values or [], saves=True))

    def _move_tensors(self, keys: list[str], tensors: list[Any], *, saves: bool) -> list[bool]:
        """Flat pages, as the pool makes them. Others would have another order of bytes."""
        stored = self._stored("kv")
        pages = None if stored is None else stored.pages
        if stored is None or pages is None or pages.form != "flat":
            return [False] * len(keys)
        size = pages.sizes[0]
        fit = [one for one in tensors if isinstance(one, torch.Tensor) and one.nbytes == size]
        flat = [one.contiguous() for one in fit] if saves else fit
        if not len(fit) == len(tensors) == len(keys) or not all(t.is_contiguous() for t in flat):
            return [False] * len(keys)
        return self._moved(stored, keys, lambda: Pieces.of_tensors(flat), saves=saves)

    # ---- the rest --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget this engine's pages at the server, those that other engines share with it too."""
        for stored in self._pools.values():
            if stored.server is not None:
                self._bounded.call(self._bounded.finds, stored.server.clear, None, _FIND_S)

    def get_stats(self) -> Any:
        """Batches since the last call, for SGLang's metrics. None: they are off."""
        if self._stats is None:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            stats, self._stats = self._stats, {}
        return StorageMetrics(**stats)

    def _count(self, kind: str, pages: int, size: int, begun: float) -> None:
        if self._stats is None or not pages:
            return
        pace = size / 1e9 / max(time.monotonic() - begun, 1e-9)
        with self._lock:
            for name, value in ((f"{kind}_pgs", pages), (f"{kind}_bandwidth", pace)):
                self._stats[name] = [*self._stats.get(name, ()), value][-_COUNTED_BATCHES:]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._bounded.close()
        for stored in self._pools.values():
            if stored.server is not None:
                stored.server.close()


def _name(name: Any) -> str:
    return str(getattr(name, "value", name))


def _arguments() -> dict[str, Any]:
    """SGLang's resolved server arguments. Empty: this process has none."""
    from sglang.srt.runtime_context import get_context

    try:
        return dict(get_context().resolved_server_args_dict())
    except (AttributeError, ValueError):
        return {}


def _updates() -> int:
    """How often weights, or their version, were replaced since the engine started."""
    from sglang.srt.runtime_context import get_context

    log = get_context().overrides_log()
    return sum("weight_version" in fields or "model_path" in fields for _, fields in log)


def _pages_of(pool: Any, name: str, ranks: Ranks, *, by_pieces: bool) -> PoolPages | None:
    """The pool's pages. None: it has no bytes. Raises ConfigError where heads cannot be divided."""
    tokens, layout = getattr(pool, "page_size", 1) or 1, str(getattr(pool, "layout", ""))
    common = name, layout, str(getattr(pool, "dtype", "")), tokens
    zeros = torch.zeros(tokens, dtype=torch.int64)
    try:
        found = pool.get_page_buffer_meta(zeros)
        if not found or not found[1]:
            return None
    except (AssertionError, NotImplementedError, ValueError):  # not in this layout
        by_pieces = False
    if not by_pieces:
        return PoolPages(*common, "flat", (pool.get_dummy_flat_data_page().nbytes,))
    groups, first = head_groups(ranks, layout, name, getattr(pool, "head_num", 0))
    if groups:
        sizes = pool.get_split_heads_page_buffer_meta(zeros, groups)[1]
        return PoolPages(*common, "heads", tuple(sizes[: len(sizes) // groups]), groups, first)
    return PoolPages(*common, "pieces", tuple(found[1]))
