"""KVTierRemote: LMCache's RemoteConnector over a kvtier server, and :class:`KVTier`, its factory,
which ``remote_storage_plugin.kvtier.class_name`` names.

LMCache calls it on its event loop (gets and puts, which are coroutines), and on the thread that
answers the engine's lookups. Neither may wait for a server, so lanes do the work, and a lookup
waits at most a second. Nothing raises into LMCache: what cannot be had is a miss, what cannot be
kept is dropped, and both are counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane, future_of
from kvtier.extensions import cache_server
from kvtier.extensions.cache_server import CacheServer, safely, within
from kvtier.extensions.lmcache_remote import packing
from kvtier.extensions.lmcache_remote.packing import HEAD_BYTES, Head

logger = logging.getLogger("kvtier.lmcache")

_FIND_S = 1.0
"""Longest wait of a lookup: the engine's scheduler waits for the answer."""
_FINDS_QUEUED, _BATCHES_QUEUED = 16, 64
_MOVE_THREADS = 2
_CLOSE_S = 5.0
_KIND = "kvtier"
_LMCACHES = ("module_path", "class_name")
R = TypeVar("R")
Found = list[Any]
"""LMCache's memory objects."""


class KVTierRemote(RemoteConnector):
    """LMCache's chunks of one engine. ``fingerprint`` is part of every key. A save or load ends
    after ``timeout_s``."""

    def __init__(
        self,
        context: Any,
        cache_server: CacheServer,
        fingerprint: bytes,
        timeout_s: float,
    ) -> None:
        super().__init__(context.config, context.metadata)
        self.counts: Counter[str] = Counter()
        """Chunks by outcome since the start, and ``failed_calls``."""
        self._safely = partial(safely, self.counts)
        self._memory = context.local_cpu_backend
        self._cache_server = cache_server
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        # A lane of their own: a lookup never queues behind copies.
        self._finds = Lane("lmcache-find", 1, urgent_bound=0, bound=_FINDS_QUEUED)
        self._moves = Lane(
            "lmcache-move", _MOVE_THREADS, urgent_bound=_BATCHES_QUEUED, bound=_BATCHES_QUEUED
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {dict(self.counts)}>"

    # ---- lookup ----------------------------------------------------------------------------------

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Number of leading chunks that are held. 0 when the server does not answer in time."""
        return within(self._finds, self.counts, lambda: self._find(keys), 0, _FIND_S)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        return await self._on(self._finds, lambda: self._find(keys), 0)

    def _find(self, keys: Sequence[Any]) -> int:
        return self._cache_server.find(self._named(keys))

    # ---- get -------------------------------------------------------------------------------------

    async def get(self, key: Any) -> Any:
        found = await self.batched_get_non_blocking("", [key])
        return found[0] if found else None

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> Found:
        """Load as :meth:`batched_get_non_blocking`, with None for each missing object."""
        found = await self.batched_get_non_blocking("", keys)
        return [*found, *[None] * (len(keys) - len(found))]

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> Found:
        """Load the run's objects up to the first miss. The caller owns a reference to each."""
        found: Found = await self._on(
            self._moves, lambda: self._load(keys), [], urgent=True, unwanted=_release
        )
        self.counts["loaded"] += len(found)
        self.counts["missed"] += len(keys) - len(found)
        return found

    def _load(self, keys: Sequence[Any]) -> Found:
        named = self._named(keys)
        found: Found = []
        bad: list[ChunkKey] = []

        def take(place: int, slot: memoryview) -> bool:
            head = packing.head_of(slot)
            if head is None or not _consistent(head):
                bad.append(named[place])
                return False
            one = self._memory_for(head)
            if one is None:
                self.counts["refused"] += 1
                return False
            if not packing.unpack(slot, named[place], _bytes_of(one)):
                one.ref_count_down()
                bad.append(named[place])
                return False
            found.append(one)
            return True

        until = time.monotonic() + self._timeout_s
        self._safely(lambda: self._cache_server.load(named, take, until), 0)
        if bad:
            self.counts["corrupt"] += len(bad)
            logger.warning("chunk %s came back wrong and is dropped", bad[0].hex()[:16])
            self._safely(lambda: self._cache_server.invalidate(bad), None)
        return found

    def _memory_for(self, head: Head) -> Any:
        """Allocate one of LMCache's objects; None, without waiting, if its memory is in use."""
        shapes = [torch.Size(shape) for shape in head.shapes]
        dtypes = [_dtype(name) for name in head.dtypes]
        one = self._memory.allocate(shapes, dtypes, MemoryFormat[head.fmt], busy_loop=False)
        if one is not None and one.get_size() != head.size:
            one.ref_count_down()
            return None
        return one

    # ---- put -------------------------------------------------------------------------------------

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Save a run. The lane's own reference keeps memory from being reused during the copy."""
        for one in memory_objs:
            one.ref_count_up()

        def save() -> bool:
            try:
                self._save(keys, memory_objs)
            finally:
                _release(memory_objs)
            return True

        if not await self._on(self._moves, save, False):
            _release(memory_objs)
            self.counts["refused"] += len(keys)

    def _save(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        heads = [_head(one) for one in objects]
        fit = [place for place, head in enumerate(heads) if head.size <= self.full_chunk_size_bytes]
        named = self._named([keys[place] for place in fit])

        def fill(place: int, slot: memoryview) -> bool:
            one = objects[fit[place]]
            return packing.pack(slot, named[place], heads[fit[place]], _bytes_of(one))

        until = time.monotonic() + self._timeout_s
        self.counts["saved"] += self._safely(
            lambda: sum(self._cache_server.save(named, fill, until)), 0
        )
        self.counts["refused"] += len(keys) - len(fit)

    # ---- the rest --------------------------------------------------------------------------------

    def remove_sync(self, key: Any) -> bool:
        self._moves.submit(
            lambda: self._safely(lambda: self._cache_server.invalidate(self._named([key])), None)
        )
        return True

    async def close(self) -> None:
        """Finish the queued work within five seconds. LMCache waits for that."""
        for lane in (self._finds, self._moves):
            lane.close(_CLOSE_S)
        self._cache_server.close()
        logger.info("closed; chunks since the start: %s", dict(self.counts))

    async def list(self) -> Found:
        """Always empty: a server that many share does not tell who saved what."""
        return []

    # ---- steps -----------------------------------------------------------------------------------

    def _named(self, keys: Sequence[Any]) -> Sequence[ChunkKey]:
        named = []
        for key in keys:
            tags = [[str(part) for part in tag] for tag in key.tags or ()]
            worker = [key.model_name, key.world_size, key.worker_id]
            name = *worker, key.chunk_hash_hex, str(key.dtype), tags
            named.append(packing.chunk_key(self._fingerprint, *name))
        return named

    async def _on(
        self,
        lane: Lane,
        work: Callable[[], R],
        otherwise: R,
        *,
        urgent: bool = False,
        unwanted: Callable[[R], None] = lambda _: None,
    ) -> R:
        """Return the result of ``work`` on the lane, or ``otherwise``. If LMCache has cancelled the
        call, ``unwanted`` gets the result, on the lane."""
        answer = future_of(lane, lambda: self._safely(work, otherwise), urgent=urgent)
        if answer is None:
            return otherwise
        try:
            return await asyncio.shield(asyncio.wrap_future(answer))
        except asyncio.CancelledError:
            answer.add_done_callback(lambda done: unwanted(done.result()))
            raise


def _head(one: Any) -> Head:
    about = one.metadata
    shapes, dtypes = about.shapes or [about.shape], about.dtypes or [about.dtype]
    return Head(
        one.get_size(),
        [[*shape] for shape in shapes],
        [str(dtype) for dtype in dtypes],
        about.fmt.name,
    )


def _consistent(head: Head) -> bool:
    """Whether the head's size fits its shapes. If not, nothing is allocated for it."""
    dtypes = [_dtype(name) for name in head.dtypes]
    if head.fmt not in MemoryFormat.__members__ or None in dtypes:
        return False
    parts = zip(head.shapes, dtypes, strict=True)
    return head.size == sum(math.prod(shape) * int(dtype.itemsize) for shape, dtype in parts)


def _dtype(name: str) -> Any:
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _bytes_of(one: Any) -> memoryview:
    return memoryview(one.byte_array).cast("B")


def _release(objects: Sequence[Any]) -> None:
    for one in objects:
        one.ref_count_down()


# ---- the plug-in ---------------------------------------------------------------------------------


class KVTier(ConnectorAdapter):
    """LMCache's factory of connectors for plug-ins called ``kvtier`` or ``kvtier.<anything>``."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{_KIND}")

    def create_connector(self, context: Any) -> KVTierRemote:
        """Connect. LMCache logs a ConfigError and goes on without the connector."""
        config = settings(context.config.extra_config or {}, context.plugin_name or _KIND)
        _refuse(context.config)
        metadata = context.metadata
        own = fingerprint(_parts(metadata) | cache_server.tenant(config))
        chunk_bytes = sum(
            shape.numel() * dtype.itemsize
            for shape, dtype in zip(metadata.get_shapes(), metadata.get_dtypes(), strict=True)
        )
        layout = ChunkLayout(
            own, metadata.chunk_size, metadata.chunk_size, (HEAD_BYTES + chunk_bytes,)
        )
        server = cache_server.connect(config, layout)
        logger.info(
            "chunks of %d bytes at the kvtier server %s", chunk_bytes, config.server.address
        )
        return KVTierRemote(context, server, own, config.engine.load_timeout_ms / 1000)


def settings(extra: Mapping[str, Any], name: str) -> Config:
    """Return kvtier's configuration from LMCache's ``extra_config`` alone. Raises ConfigError."""
    prefix = f"remote_storage_plugin.{name}."
    given = {
        key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)
    }
    flags = {key: value for key, value in given.items() if key not in _LMCACHES}
    return cache_server.settings(flags, prefix, "extra_config")


def _refuse(config: Any) -> None:
    """Raise ConfigError for settings of LMCache that kvtier does not support."""
    if config.use_layerwise:
        raise ConfigError("use_layerwise=true: kvtier keeps chunks of all layers; set it to false")
    if config.remote_serde not in {None, "naive"}:
        raise ConfigError(
            f"remote_serde={config.remote_serde}: kvtier keeps KV as it is; set it to naive"
        )


def _parts(metadata: Any) -> dict[str, Any]:
    """Return the fingerprint's parts. LMCache's keys do not contain the shape of a whole chunk."""
    return {
        "lmcache": 1,
        "model": metadata.model_name,
        "world_size": metadata.world_size,
        "chunk_tokens": metadata.chunk_size,
        "shapes": [[*shape] for shape in metadata.get_shapes()],
        "dtypes": [str(dtype) for dtype in metadata.get_dtypes()],
        "mla": bool(metadata.use_mla),
    }
