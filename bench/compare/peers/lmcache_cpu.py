"""LMCache's in-engine connector on vLLM's CPU backend, with the copier that LMCache 0.5.6 does not
have.

``CreateGPUConnector`` raises ``No supported cpu connector found`` there. This module puts this
benchmark's copier in its place and changes nothing else. Its speed is torch's and this copier's,
not LMCache's. So it is as quick as possible: one gather and one strided copy for each layer and
chunk, where tokens lie in whole blocks. Only LMCache's own environment imports it.
"""

from __future__ import annotations

from typing import Any

import lmcache.v1.gpu_connector as factory
import torch
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface


class BlockCopies(GPUConnectorInterface):  # type: ignore[misc]  # Any to mypy
    """Copies between LMCache's (2, layers, tokens, hidden) and vLLM's CPU layers (blocks, heads,
    block tokens, keys and values)."""

    def __init__(self, metadata: Any) -> None:
        layers, _, _, heads, size = metadata.kv_shape
        self._layers, self._hidden = layers, heads * size
        self.kvcaches: Any = None

    def get_shape(self, num_tokens: int) -> Any:
        return torch.Size([2, self._layers, num_tokens, self._hidden])

    def initialize_kvcaches_ptr(self, **more: Any) -> None:
        if more.get("kvcaches") is not None:
            self.kvcaches = more["kvcaches"]

    def from_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        self.initialize_kvcaches_ptr(**more)
        tensor = memory_obj.tensor
        blocks, block = _blocks(more["slot_mapping"][start:end], self.kvcaches[0].shape[2])
        for layer, kv in enumerate(self.kvcaches):
            _paged(tensor, layer, kv, len(blocks), block).copy_(_split(kv[blocks]))

    def to_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        """Tokens that vLLM holds itself stay as they are, because other requests read them."""
        self.initialize_kvcaches_ptr(**more)
        tensor = memory_obj.tensor
        blocks, block = _blocks(more["slot_mapping"][start:end], self.kvcaches[0].shape[2])
        own = min(len(blocks), max(0, more.get("vllm_cached_tokens", 0) - start) // block)
        for layer, kv in enumerate(self.kvcaches):
            paged = _paged(tensor, layer, kv, len(blocks), block)[:, own:]
            _, count, heads, _, size = paged.shape
            kv[blocks[own:]] = paged.permute(1, 2, 3, 0, 4).reshape(count, heads, block, 2 * size)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **more: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **more)

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **more: Any
    ) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **more)


class LMCacheOnCPU(LMCacheConnectorV1Dynamic):  # type: ignore[misc]  # Any to mypy
    def __init__(self, *args: Any, **more: Any) -> None:
        factory.CreateGPUConnector = lambda config, metadata, *_, **__: BlockCopies(metadata)
        super().__init__(*args, **more)


def _blocks(slots: Any, block: int) -> tuple[Any, int]:
    """The block ids of tokens that fill whole blocks. Raises ValueError for others. The
    comparison's chunks always do."""
    if len(slots) % block or int(slots[0]) % block:
        raise ValueError(
            f"{len(slots)} tokens from slot {int(slots[0])} are not whole blocks of {block}"
        )
    return slots[::block].to(torch.long) // block, block


def _paged(tensor: Any, layer: int, kv: Any, count: int, block: int) -> Any:
    """One layer of LMCache's tensor as (2, blocks, heads, block tokens, head size)."""
    heads = kv.shape[1]
    return tensor[:, layer].view(2, count, block, heads, -1).transpose(2, 3)


def _split(blocks: Any) -> Any:
    count, heads, block, both = blocks.shape
    return blocks.view(count, heads, block, 2, both // 2).permute(3, 0, 1, 2, 4)
