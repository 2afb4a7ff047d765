"""vLLM's own ``OffloadingConnector`` on its CPU backend, with specs out of the tree and a worker
that copies by memcpy.

The worker in the tree refuses (``CPU Offloading is currently only supported on CUDA-alike and XPU
GPUs``). Lookups, order and tiers are vLLM's. The copies here are this benchmark's: a whole block of
a layer at a time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class BlockCopies(OffloadingWorker):  # type: ignore[misc]  # Any to mypy
    """Copies at once, in the call. It reports the copies at the next :meth:`get_finished`."""

    def __init__(self, caches: Any, blocks_per_chunk: int, chunks: int, region: Any = None) -> None:
        self._groups = caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._device = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors
        ]
        sizes = [one.shape[1] * blocks_per_chunk for one in self._device]
        if region is not None:
            self._host = [region.create_next_worker_view(size) for size in sizes]
        else:
            self._host = [torch.zeros((chunks, size), dtype=torch.int8) for size in sizes]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """All are done."""

    def shutdown(self) -> None:
        self._host.clear()
        self._device.clear()
        if self._region is not None:
            self._region.cleanup()

    def _copy(self, job_id: int, device: Any, host: Any, *, store: bool) -> bool:
        begun, moved, first_block, first_chunk = time.monotonic(), 0, 0, 0
        for group, (count, start) in enumerate(
            zip(device.group_sizes, device.block_indices, strict=True)
        ):
            skip = start % self._blocks_per_chunk
            chunks = -(-(count + skip) // self._blocks_per_chunk) if count else 0
            blocks = device.block_ids[first_block : first_block + count]
            places = host.block_ids[first_chunk : first_chunk + chunks]
            first_block, first_chunk = first_block + count, first_chunk + chunks
            for ref in self._groups[group]:
                moved += self._copy_layer(ref.tensor_idx, blocks, places, skip, store)
        self._done.append(TransferResult(job_id, True, moved, time.monotonic() - begun))
        return True

    def _copy_layer(self, index: int, blocks: Any, places: Any, skip: int, store: bool) -> int:
        device, host = self._device[index], self._host[index]
        page = int(device.shape[1])
        for number, block in enumerate(blocks):
            chunk, part = divmod(number + skip, self._blocks_per_chunk)
            there = host[int(places[chunk]), part * page : (part + 1) * page]
            if store:
                there.copy_(device[int(block)])
            else:
                device[int(block)].copy_(there)
        return page * len(blocks)


class OffloadOnCPU(CPUOffloadingSpec):  # type: ignore[misc]  # Any to mypy
    """RAM."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = BlockCopies(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class TieringOnCPU(TieringOffloadingSpec):  # type: ignore[misc]  # Any to mypy
    """RAM over what ``secondary_tiers`` names."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = BlockCopies(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return self._worker
