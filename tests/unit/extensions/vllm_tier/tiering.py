"""vLLM's own tiering over real tiers, without an engine: its spec, its primary tier in shared
memory, and steps of a scheduler."""

import json
import re
import shlex
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kvtier.core.chunk import ChunkLayout
from tests.child_process import wait_for

BLOCK = 16
ROOT = Path(__file__).parents[4]


def of_the_page():
    """The entry that the page gives, without its server."""
    (block,) = re.findall(r"<!-- entry -->\n```bash\n(.*?)```", PAGE, re.DOTALL)
    extra = json.loads(shlex.split(block)[-1])["kv_connector_extra_config"]
    (entry,) = extra["secondary_tiers"]
    assert extra["spec_name"] == SPEC and entry.pop("server").startswith("unix://")
    return dict(entry)


def counted(tier):
    """Chunks by their outcomes, which the page names, since the last time."""
    found = tier.get_stats()
    told = {} if found is None else dict(found.reduce())
    names = {f"{COUNTER}:('{one}',)": one for one in re.findall(r"`(\w+)`", OUTCOMES)}
    return {names[name]: count for name, count in told.items()}


PAGE = (ROOT / "kvtier/extensions/vllm_tier/README.md").read_text(encoding="utf-8")
((COUNTER, OUTCOMES),) = re.findall(r"`(kvtier_\w+)_total` counts by `outcome`:([^.]+)\.", PAGE)
SPEC = "TieringOffloadingSpec"
OURS = of_the_page()
PATIENT = {"server_timeout_ms": 5000, "load_timeout_ms": 30000}


def engine_config(model, tiers, chunks=16, **more):
    """vLLM's configuration of an engine with these secondary tiers."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    extra = {"spec_name": SPEC, "blocks_per_chunk": 2}
    extra |= {"cpu_bytes_to_use": chunks * 2 * BLOCK * 512, "secondary_tiers": [*tiers]}
    extra |= more.pop("extra", {})
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 736} | more
    found = EngineArgs(
        model=str(model), block_size=BLOCK, kv_transfer_config=transfer, **arguments
    ).create_engine_config()
    found.kv_transfer_config.engine_id = uuid.uuid4().hex
    return found


def make_spec(vllm_config):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    heads = 2 // vllm_config.parallel_config.tensor_parallel_size
    shape = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=32, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer"], shape)]
    cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    return TieringOffloadingSpec(build_offloading_config(vllm_config, cache))


@contextmanager
def tiering(vllm_config):
    """vLLM's manager of tiers, as the scheduler's half of the OffloadingConnector makes it."""
    steps = Steps(make_spec(vllm_config).get_manager())
    try:
        yield steps
    finally:
        steps.rows = None
        with patch("vllm.v1.kv_offload.cpu.shared_offload_region.logger.warning") as warned:
            steps.manager.shutdown()
        assert not warned.called, "the tier has let go of vLLM's memory"


class Steps:
    """A scheduler's steps over the manager. ``tier``: the first secondary one."""

    def __init__(self, manager):
        self.manager = manager
        self.primary = manager.primary_tier
        self.tier = manager.secondary_tiers[0]
        self.rows: Any = np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)
        self._number = 0

    def context(self):
        """A new request."""
        from vllm.v1.kv_offload.base import ReqContext

        self._number += 1
        context = ReqContext(f"request {self._number}")
        self.manager.on_new_request(context)
        return context

    def step(self):
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self):
        def is_idle():
            self.step()
            return not self.manager.has_pending_work()

        wait_for(is_idle, "every job is reported")

    def store(self, context, keys):
        """Chunks arrive from the GPU: what was stored. Each byte is the key's first."""
        planned = self.manager.prepare_store(keys, context)
        if planned is None:
            return []
        for key, place in zip(planned.keys_to_store, planned.store_spec.chunk_ids, strict=True):
            self.rows[int(place)] = key[0]
        if planned.keys_to_store:
            self.manager.complete_store(planned.keys_to_store, context)
        return list(planned.keys_to_store)

    def found(self, context, keys):
        """Leading chunks that a request gets, with every byte right, and is done with."""
        count = self.leading(context, keys)
        if count:
            spec = self.manager.prepare_load(keys[:count], context)
            for key, place in zip(keys, spec.chunk_ids, strict=False):
                assert (self.rows[int(place)] == key[0]).all()
            self.manager.complete_load(keys[:count], context)
        return count

    def leading(self, context, keys):
        """Leading chunks that are in vLLM's RAM, or came there."""
        from vllm.v1.kv_offload.base import LookupResult

        waits = {LookupResult.RETRY, LookupResult.HIT_PENDING}
        answers: list[Any] = []

        def decided():
            answers[:] = [self.manager.lookup(key, context) for key in keys]
            if waits.isdisjoint(answers):
                return True
            self.step()
            return False

        wait_for(decided, "no answer is deferred any more")
        hits = [one is LookupResult.HIT for one in answers]
        return hits.index(False) if False in hits else len(hits)

    def pinned(self):
        """Chunks of the primary tier that vLLM cannot evict."""
        chunks = self.primary._policy.chunks.values()
        return sum(chunk.ref_cnt != 0 for chunk in chunks)


def chunk_keys(prompt, count):
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(bytes([prompt, at]) + bytes(30), 0) for at in range(count)]


LAYOUT = ChunkLayout(bytes(32), 1, 1, (2 * BLOCK * 512,))
