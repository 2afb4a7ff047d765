"""The real HiCache of SGLang on CPU tensors: host pools, controllers, storage factory, HiCacheFile.

Fakes, because there is no GPU: torchvision, the device's pool and allocator, CUDA events and
streams, the copies between device and host, and the parallel state of SGLang's ranks.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for torchvision, of which PyPI has no build for this torch."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def _no_torchvision() -> None:
    import transformers.utils.import_utils as looks

    for name in dir(looks):  # transformers looks first, and does without
        if "torchvision" in name and name.startswith("is_"):
            with contextlib.suppress(Exception):
                getattr(looks, name)()
    sys.meta_path.append(_Finder())


_no_torchvision()

import sglang.srt.managers.cache_controller as cc  # noqa: E402
import sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller as hybrids  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry, base  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.runtime_context import publish as publish_context  # noqa: E402
from sglang.srt.utils import kill_process_tree  # noqa: E402

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 28
PAGE, LAYERS, HEADS, DIM = 64, 2, 4, 16
WAIT_S = 120.0
REQUEST = CacheRequestHandle("request", 0)
PLUGIN = json.loads(Path("examples/sglang.json").read_text())


class _Device(Mock):
    device, layer_num = torch.device("cpu"), LAYERS


class _Replicated(_Device, MLATokenToKVPool):  # type: ignore[misc]
    pass


def parallel(rank: int = 0, size: int = 1) -> types.SimpleNamespace:
    ranks = {"tp": (rank, size), "attn_tp": (rank, size), "pp": (0, 1), "attn_dcp": (0, 1)}
    told = {f"{of}_rank": one for of, (one, _) in ranks.items()}
    told |= {f"{of}_size": one for of, (_, one) in ranks.items()}
    return types.SimpleNamespace(attn_dp_rank=0, **told)


cc.device_module, cc.L2TransferEngine = Mock(), Mock()
cc.is_dp_attention_enabled = lambda: False
cc.get_parallel = parallel


def publish(model: Path | str, **arguments: Any) -> Any:
    """SGLang's server arguments of this process. ``restore()`` takes them back."""
    published = get_context().override_server_args(model_path=str(model), **arguments)
    published.install()
    return published


# ---- pools ---------------------------------------------------------------------------------------


def _pointers(tensors):
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)


def mha(layout, pages=34, *, page=PAGE, heads=HEADS, layers=LAYERS, dim=DIM, dtype=torch.bfloat16):
    k, v = (
        tuple(torch.zeros((page, heads, dim), dtype=dtype) for _ in range(layers)) for _ in "kv"
    )
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return _host(MHATokenToKVPoolHost, info, layout, pages, layers)


def _host(kind, info, layout, pages, layers, **more):
    return kind(
        info, 1.0, 0, info.page_size, layout, pin_memory=False, device="cpu", start_layer=0,
        device_capacity_tokens=0, end_layer=layers, host_token_capacity=pages * info.page_size,
        **more,
    )  # fmt: skip


def mla(layout, pages=34, *, page=PAGE, layers=LAYERS, rank=24, rope=8, dtype=torch.bfloat16):
    rows = tuple(torch.zeros((page, 1, rank + rope), dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return _host(MLATokenToKVPoolHost, info, layout, pages, layers, target_layer_num=layers)


def scramble(pool, seed=0):
    """Random bytes in all of the pool's memory."""
    one = torch.Generator().manual_seed(seed)
    memory = pool.kv_buffer.view(torch.int16)
    memory.copy_(torch.randint(-30000, 30000, memory.shape, dtype=torch.int16, generator=one))


def equal(pool, indices, other, others):
    pages = range(0, len(indices), pool.page_size)
    return all(
        torch.equal(
            pool.get_data_page(int(indices[at])).view(torch.int16),
            other.get_data_page(int(others[at])).view(torch.int16),
        )
        for at in pages
    )


# ---- controllers ---------------------------------------------------------------------------------


def _allocator(device):
    return types.SimpleNamespace(device=device, get_kvcache=lambda: device)


def _group():
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.group.WORLD


def controller(pool, kind, extra, *, tp=(0, 1), replicated=False, model="M"):
    """SGLang's HiCacheController with its threads. ``kind``: ``file`` or ``dynamic``."""
    cc.get_parallel = lambda: parallel(*tp)
    allocator = _allocator(_Replicated() if replicated else _Device())
    more, page = _storage(kind, extra, model), pool.page_size
    return cc.HiCacheController(allocator, pool, page, **more, prefetch_threshold=page)


def _storage(kind, extra, model="M"):
    shared = {"tp_group": _group(), "load_cache_event": threading.Event(), "model_name": model}
    shared |= {"write_policy": "write_through", "io_backend": "direct", "storage_backend": kind}
    return shared | {"storage_backend_extra_config": dict(extra)}


def hybrid(pools, kind, extra, *, page=PAGE, tp=(0, 1)):
    """SGLang's HybridCacheController over ``pools``, of which the one called KV leads."""
    cc.get_parallel = lambda: parallel(*tp)
    entries = [
        PoolEntry(name, pool, _Device(), lambda layer: layer,
                  is_primary_index_anchor=name == PoolName.KV)
        for name, pool in pools.items()
    ]  # fmt: skip
    allocator, group = _allocator(_Device()), HostPoolGroup(entries)
    more = _storage(kind, extra)
    return hybrids.HybridCacheController(allocator, group, page, **more, prefetch_threshold=page)


def hashes_of(tokens, page=PAGE, prior=None):
    return get_storage_hash_str(tokens, prior, page_size=page)


def backup(one, tokens, indices, **more):
    """Pages that were written."""
    page = one.page_size
    one.write_storage(indices, tokens, hash_value=hashes_of(tokens, page), **more)
    return one.ack_backup_queue.get(timeout=WAIT_S).completed_tokens // page


def prefetch(one, tokens, pools=None):
    """Pages that were found and pages that were read, and their host indices."""
    if pools is None:
        one.prefetch("request", tokens)
    else:
        one.prefetch(REQUEST, tokens, None, None, extra_pools=pools)
    operation = one.prefetch_hit_queue.get(timeout=WAIT_S)
    hit = operation.storage_hit_count
    if not hit:
        return 0, 0, None
    if pools is None:
        operation.host_indices = one.mem_pool_host.alloc(hit)
    else:
        operation.host_indices = one.alloc_prefetch_host_buffers(operation, hit)
        one._resolve_sidecar_kv_derived_pool_transfers(operation)
    one.prefetch_buffer.put(operation)
    got = 0
    while True:
        ack = one.ack_prefetch_queue.get(timeout=WAIT_S)
        got = got if ack.completed_tokens is None else ack.completed_tokens
        if ack.completed_req:
            return hit // one.page_size, got // one.page_size, operation.host_indices


def sidecar(name):
    return PoolTransfer(name, indices_from_pool=PoolName.KV)


# ---- what launch_server starts -------------------------------------------------------------------

TWO_MIB = {"layers": 8, "heads": 8, "dim": 128}


def launch_server(arguments: Any) -> None:
    """In the place of SGLang's HTTP server and scheduler, with its own arguments, context and
    controller: 1,000 pages into the storage, and some back. Prints what became of them, and ends
    as SGLang does."""
    publish_context(arguments, role="scheduler")
    parse = hybrids.HybridCacheController.parse_storage_backend_extra_config
    extra = parse(arguments.hicache_storage_backend_extra_config)[0]
    pool = mha(arguments.hicache_mem_layout, 250, page=arguments.page_size, **TWO_MIB)
    scramble(pool)
    one = controller(pool, arguments.hicache_storage_backend, extra)
    prompts = [[begin, *range(125 * PAGE - 1)] for begin in range(1000, 1008)]
    begin = pool.alloc(125 * PAGE)
    stored = sum(backup(one, tokens, begin) for tokens in prompts)
    _, read, indices = prefetch(one, prompts[-1])
    ram = one.storage_backend._pools["kv"].server._client.pool
    told = {"stored": stored, "read": read, "equal": equal(pool, begin, pool, indices)}
    told |= {"ram_bytes": ram.slots * ram.slot_bytes, "server": extra["server"]}
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()
    kill_process_tree(os.getpid())
