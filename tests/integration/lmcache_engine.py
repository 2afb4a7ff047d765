"""Real LMCache engines that a test leads, without CUDA: ``python -m
tests.integration.lmcache_engine``.

The "GPU" is one CPU tensor, filled from a seed. A line on standard input, a JSON line back: ``start
NAME CONFIG`` makes an engine from an LMCache YAML, ``close NAME`` ends it. ``store NAME SEED
TOKENS`` saves a prompt. ``hold NAME SEED TOKENS`` waits until its last chunk can be looked up.
``load NAME SEED TOKENS`` looks it up and retrieves it into an empty tensor: how many tokens were
found and retrieved, and whether every byte of those is what was stored. ``counts NAME`` are the
connector's own. ``give_up NAME SEED TOKENS`` see there. It ends with its input.
"""

import asyncio
import json
import os
import sys
import threading
import time

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, HEAD_SIZE, CHUNK = 2, 2, 16, 64
LONGEST = 16 * CHUNK
HOLD_S = 120.0


class TensorCopies(GPUConnectorInterface):  # type: ignore[misc]  # derives from Any here
    """``kv``: (2, layers, tokens, hidden), token by token in order: the paging is not what is
    tested."""

    def __init__(self):
        self.kv = torch.zeros(self.get_shape(LONGEST), dtype=torch.bfloat16)

    def to_gpu(self, memory_obj, start, end, **_):
        self.kv[:, :, start:end] = memory_obj.tensor

    def from_gpu(self, memory_obj, start, end, **_):
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **more):
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **more)

    def batched_from_gpu(self, memory_objs, starts, ends, **more):
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **more)

    def get_shape(self, num_tokens):
        return torch.Size([2, LAYERS, num_tokens, HEADS * HEAD_SIZE])

    def initialize_kvcaches_ptr(self, **_):
        """It has them."""


class Engine:
    def __init__(self, name, config):
        self._name = name
        self._copies = TensorCopies()
        about = LMCacheMetadata(
            model_name="tiny",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, CHUNK, HEADS, HEAD_SIZE),
            role="worker",
            chunk_size=CHUNK,
        )
        own = LMCacheEngineConfig.from_file(config)
        self._cache = LMCacheEngineBuilder.get_or_create(
            name, own, about, self._copies, lambda *_: None, lambda given, *_: given
        )
        self._cache.post_init()

    def store(self, seed, length):
        self._copies.kv.copy_(content(seed))
        self._cache.store(torch.tensor(prompt(seed, length)), slot_mapping=torch.arange(length))
        return {}

    def hold(self, seed, length):
        until = time.monotonic() + HOLD_S
        while (
            found := self._cache.lookup(prompt(seed, length))
        ) < length and time.monotonic() < until:
            time.sleep(0.01)
        return {"found": found}

    def load(self, seed, length):
        tokens = prompt(seed, length)
        self._copies.kv.zero_()
        found = self._cache.lookup(tokens, lookup_id="one", pin=True)
        mask = self._cache.retrieve(
            torch.tensor(tokens), slot_mapping=torch.arange(length), req_id="one"
        )
        self._cache.lookup_unpin("one")
        got = int(mask.sum())
        same = torch.equal(self._copies.kv[:, :, :got], content(seed)[:, :, :got])
        return {"found": found, "retrieved": got, "equal": same}

    def close(self):
        LMCacheEngineBuilder.destroy(self._name)
        return {}

    def counts(self):
        remote = self._remote()
        return {"made": remote is not None} | dict(remote.counts if remote else {})

    def give_up(self, seed, length):
        """Cancel a get and a put that the lanes have not begun, as LMCache does after its
        time-out."""
        storage, remote, lane = (self._cache.storage_manager, self._remote(), self._remote()._moves)
        keys = [
            key for _, _, key in self._cache.token_database.process_tokens(prompt(seed, length))
        ]
        memory = storage.local_cpu_backend.allocate(self.get_shape(CHUNK), torch.bfloat16)
        held = [self._free_bytes(), memory.get_ref_count()]
        resume, ended = threading.Event(), threading.Barrier(3)
        for _ in range(2):
            lane.submit(resume.wait, urgent=True)
        asked = [remote.batched_get(keys), remote.batched_put(keys[:1], [memory])]
        futures = [asyncio.run_coroutine_threadsafe(one, storage.loop) for one in asked]
        asyncio.run_coroutine_threadsafe(
            asyncio.sleep(0), storage.loop
        ).result()  # both wait for the lane
        references = memory.get_ref_count()
        for future in futures:
            future.cancel()
        for _ in range(2):
            lane.submit(ended.wait)
        resume.set()
        ended.wait()  # both of the lane's threads are here: they have done what was asked before
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), storage.loop).result()
        after = [self._free_bytes(), memory.get_ref_count()]
        memory.ref_count_down()
        return {"before": held, "meanwhile": references, "after": after}

    def get_shape(self, tokens):
        return self._copies.get_shape(tokens)

    def _remote(self):
        remote = self._cache.storage_manager.storage_backends["RemoteBackend-kvtier"].connection
        return remote and remote.getWrappedConnector()

    def _free_bytes(self):
        allocator = self._cache.storage_manager.local_cpu_backend.memory_allocator
        return int(allocator.pin_allocator.address_manager.get_free_size())


def prompt(seed, length):
    return [seed, *range(1, length)]


def content(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn([2, LAYERS, LONGEST, HEADS * HEAD_SIZE], generator=generator).to(
        torch.bfloat16
    )


def main():
    engines: dict[str, Engine] = {}
    for line in sys.stdin:
        verb, name, *more = line.split()
        if verb == "start":
            engines[name] = Engine(name, *more)
            say({})
        else:
            say(getattr(engines[name], verb)(*map(int, more)))
    os._exit(0)  # LMCache's threads do not all end by themselves


def say(answer):
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
