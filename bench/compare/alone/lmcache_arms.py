"""LMCache's arms of :mod:`kvtier.bench.compare.alone`: its engine in one process, in its own
environment.

It has the settings with which it is fastest: its quickest hash (``builtin``, PYTHONHASHSEED=0),
direct I/O, and torch on all cores. The copier is this benchmark's, because LMCache has none for CPU
tensors.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

from kvtier.bench.compare.alone.arm import GIB, Prompt, Setting, WrongError, serve
from kvtier.bench.compare.peers.lmcache_cpu import BlockCopies

RAM, DISK, REDIS = "ram", "disk", "redis"
_SPARE_CHUNKS = 8
_DISK_GIB = 1024.0
"""LMCache reserves nothing. It counts what is removed as still there (0.5.6), so that a tight bound
evicts."""
_REDIS_NAMES = ("kv_bytes", "metadata")
"""The ends of the two names that a chunk has in Redis."""


class LMCache:
    """A :class:`~kvtier.bench.compare.alone.arm.Cache`."""

    def __init__(self, engine: Any, kv: torch.Tensor, setting: Setting) -> None:
        self._engine, self._sizes, self._place = engine, setting.sizes, setting.place
        self._layers = list(kv)
        self.keeps_below = setting.place != RAM
        self.looks_up = setting.place == RAM
        self._redis = redis.Redis.from_url(setting.at) if setting.place == REDIS else None
        self._names = 0

    def save(self, prompt: Prompt, start: int, end: int) -> None:
        mask = torch.ones(end, dtype=torch.bool)
        mask[:start] = False
        self._engine.store(
            prompt.tokens[:end],
            mask=mask,
            kvcaches=self._layers,
            slot_mapping=prompt.slots[:end],
            offset=start,
        )
        self._names += len(_REDIS_NAMES) * (end - start) // self._sizes.chunk_tokens

    def settled(self) -> bool:
        backends = self._engine.storage_manager.storage_backends
        if self._redis is not None:
            return bool(self._redis.dbsize() == self._names)
        return not (self._place == DISK and backends["LocalDiskBackend"].disk_worker.put_tasks)

    def announce(self, prompt: Prompt) -> None:
        """Its retrieve takes the places of the chunks from a lookup."""
        if self._engine.lookup(prompt.tokens, lookup_id=_name(prompt), pin=True) != len(
            prompt.tokens
        ):
            raise WrongError("not all that was saved is found")

    def load(self, prompt: Prompt) -> None:
        backends = self._engine.storage_manager.storage_backends
        if (
            self.keeps_below
            and "LocalCPUBackend" in backends
            and backends["LocalCPUBackend"].hot_cache
        ):
            raise WrongError("chunks lie in RAM that shall come from below")
        found = self._engine.retrieve(
            prompt.tokens, kvcaches=self._layers, slot_mapping=prompt.slots, req_id=_name(prompt)
        )
        self._engine.lookup_unpin(_name(prompt))
        if int(found.sum()) != len(prompt.tokens):
            raise WrongError(f"{int(found.sum()):,} tokens of {len(prompt.tokens):,} came")

    def forget(self, prompt: Prompt) -> None:
        if self._redis is None:
            self._engine.clear(prompt.tokens)
            return
        keys = [
            key.to_string()
            for _, _, key in self._engine.token_database.process_tokens(prompt.tokens)
        ]
        self._names -= self._redis.delete(*(key + end for key in keys for end in _REDIS_NAMES))

    def look_up(self, tokens: Sequence[int]) -> tuple[float, float | None]:
        """Pins what it finds, as LMCache's vLLM connector does."""
        held = self._engine.lookup(tokens, lookup_id="alone", pin=True)
        return held, None

    def end_look_up(self) -> None:
        self._engine.lookup_unpin("alone")


def _name(prompt: Prompt) -> str:
    return f"{prompt.tokens[0]} {prompt.tokens[-1]}"


@contextmanager
def opened(setting: Setting, kv: torch.Tensor) -> Iterator[tuple[LMCache, Path | None]]:
    config = LMCacheEngineConfig.from_defaults(**_keys(setting))
    sizes = setting.sizes
    metadata = LMCacheMetadata(
        model_name="alone",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(sizes.layers, 2, sizes.chunk_tokens, sizes.heads, sizes.head_size),
        use_mla=False,
        role="worker",
    )
    copies = BlockCopies(metadata)
    engine = LMCacheEngineBuilder.get_or_create(
        "alone", config, metadata, copies, lambda *_: None, lambda one, *_: one
    )
    engine.post_init()
    yield LMCache(engine, kv, setting), Path(setting.at) if setting.place == DISK else None


def _keys(setting: Setting) -> dict[str, Any]:
    sizes = setting.sizes
    room = sizes.chunks + _SPARE_CHUNKS + (sizes.looked_up if setting.place == RAM else 0)
    keys: dict[str, Any] = {
        "chunk_size": sizes.chunk_tokens,
        "local_cpu": setting.place == RAM,
        "max_local_cpu_size": room * sizes.chunk_bytes / GIB,
        "pre_caching_hash_algorithm": "builtin",
    }
    if setting.place == DISK:
        keys |= {"local_disk": f"{setting.at}/", "max_local_disk_size": _DISK_GIB}
        keys["extra_config"] = {"use_odirect": True}
    if setting.place == REDIS:
        keys |= {"remote_url": setting.at, "remote_serde": "naive"}
    return keys


if __name__ == "__main__":
    status = 1
    try:
        serve(opened)
        status = 0
    except Exception:  # noqa: BLE001 - told as the interpreter would
        traceback.print_exc()
    finally:
        os._exit(status)  # its threads do not end
