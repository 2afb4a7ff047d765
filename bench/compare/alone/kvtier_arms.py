"""kvtier's arms of :mod:`kvtier.bench.compare.alone`. They are what ``assemble`` makes of a
configuration, used in one process as the vLLM connector uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvtier.api import KVStore
from kvtier.assemble import assemble, assemble_store
from kvtier.bench.compare.alone.arm import PATIENCE_S, Prompt, Setting, Sizes, WrongError, serve
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkKey, ChunkLayout, KeyChain, fingerprint
from kvtier.core.steps import whole
from kvtier.gpu import PagedBlocks, regions_of, slot_tensor
from kvtier.gpu.slots import Job

RAM, NVME, REDIS, SERVER = "ram", "nvme", "redis", "server"
_TIERS = {NVME: "nvme", REDIS: "redis"}
_WAIT_S = 0.05
_SPARE_BYTES = 8 << 20


class Kvtier:
    """A :class:`~kvtier.bench.compare.alone.arm.Cache`. ``tier``: name of the one below RAM; None:
    there is none. ``unfinished``: how many of these chunks, dropped before, are not yet deleted."""

    def __init__(
        self,
        cache: KVStore,
        layout: ChunkLayout,
        paged: PagedBlocks,
        tier: str | None,
        unfinished: Callable[[Sequence[ChunkKey]], int],
    ) -> None:
        self._cache, self._layout, self._paged, self._tier = cache, layout, paged, tier
        self._unfinished = unfinished
        self.keeps_below = tier is not None
        self.looks_up = tier is None
        self._chain: KeyChain = layout.chain()
        self._saved = 0

    def save(self, prompt: Prompt, start: int, end: int) -> None:
        if not start:
            self._chain = self._layout.chain()
        keys = self._chain.extend(prompt.tokens[:end])
        first = start // self._layout.chunk_tokens
        with self._cache.save(keys) as lease:
            if list(lease.keys) != keys[first:]:
                raise WrongError(f"{len(lease.keys)} chunks of {len(keys) - first} got a slot")
            self._paged.save(self._jobs(lease.views(), prompt.blocks, first))
            lease.commit()
        self._saved += len(keys) - first

    def settled(self) -> bool:
        return (
            self._tier is None or self._cache.stats().get(f"{self._tier}_stored", 0) == self._saved
        )

    def announce(self, prompt: Prompt) -> None:
        """A load asks by itself."""

    def load(self, prompt: Prompt) -> None:
        """Chunks are copied as they arrive."""
        keys, done = self._layout.keys(prompt.tokens), 0
        with self._cache.load(keys) as lease:
            while True:
                ready, coming = lease.poll()
                if ready > done:
                    self._paged.load(self._jobs(lease.views()[done:], prompt.blocks, done))
                    done = ready
                elif coming:
                    self._cache.wait(_WAIT_S)
                else:
                    break
            places = set(lease.sources)
        if done != len(keys) or places != {self._tier or RAM}:
            raise WrongError(f"{done} chunks of {len(keys)} came, from {sorted(places)}")

    def forget(self, prompt: Prompt) -> None:
        keys, until = self._layout.keys(prompt.tokens), time.monotonic() + PATIENCE_S
        self._cache.invalidate(keys)
        while self._unfinished(keys):
            if time.monotonic() > until:
                raise WrongError(
                    f"what was forgotten is not deleted after {PATIENCE_S:.0f} s: "
                    f"{self._cache.stats()}"
                )
            time.sleep(0.001)

    def look_up(self, tokens: Sequence[int]) -> tuple[float, float | None]:
        keys = self._layout.keys(tokens)
        begun = time.perf_counter()
        ready, _ = self._cache.lookup(keys).progress
        return ready * self._layout.chunk_tokens, time.perf_counter() - begun

    def end_look_up(self) -> None:
        """A match pins nothing."""

    def _jobs(self, views: Sequence[memoryview], blocks: Sequence[int], first: int) -> list[Job]:
        """Chunk number ``first`` of the prompt on."""
        size, step = self._layout.chunk_bytes, self._layout.blocks_per_chunk
        return [
            (slot_tensor(view[:size]), 0, list(blocks[at * step : (at + 1) * step]))
            for at, view in enumerate(views, start=first)
        ]


@contextmanager
def opened(setting: Setting, kv: torch.Tensor) -> Iterator[tuple[Kvtier, Path | None]]:
    """The cache with the product's defaults except for sizes. Where chunks are kept below RAM, RAM
    has room for one prompt only, and the lower tier for two."""
    sizes = setting.sizes
    paged = PagedBlocks(
        regions_of({f"layer.{number}": layer for number, layer in enumerate(kv)}, sizes.blocks),
        sizes.blocks_per_chunk,
    )
    named = fingerprint({"benchmark": "alone"} | paged.describe())
    layout = ChunkLayout(named, sizes.chunk_tokens, sizes.block_tokens, (paged.block_bytes,))
    config = Config(**_keys(setting, layout))
    own = None if setting.place == SERVER else assemble_store(config, layout)
    cache = assemble(config, layout) if own is None else own
    unfinished = _nothing if own is None else lambda keys: whole(own.purge.outliving(keys))
    try:
        tier = _TIERS.get(setting.place)
        yield (
            Kvtier(cache, layout, paged, tier, unfinished),
            Path(setting.at) if setting.place == NVME else None,
        )
    finally:
        cache.close()


def _nothing(_: Sequence[ChunkKey]) -> int:
    """A server does not say what it has yet to delete."""
    return 0


def _keys(setting: Setting, layout: ChunkLayout) -> dict[str, Any]:
    below = 2 * setting.sizes.chunks * layout.slot_bytes + _SPARE_BYTES
    if setting.place == RAM:
        return {"ram_bytes": ram_bytes(setting.sizes, layout.slot_bytes)}
    few: dict[str, Any] = {"ram_bytes": setting.sizes.chunks * layout.slot_bytes}
    if setting.place == NVME:
        return few | {"nvme_path": setting.at, "nvme_bytes": below}
    if setting.place == REDIS:
        return few | {"redis_url": setting.at, "redis_bytes": below + below // 4}
    return {"server": setting.at}


def ram_bytes(sizes: Sizes, slot_bytes: int) -> int:
    """For an arm that has no tier below RAM. Everything fits, also what is looked up."""
    return (sizes.chunks + sizes.looked_up) * slot_bytes


if __name__ == "__main__":
    serve(opened)
