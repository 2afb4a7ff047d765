"""Pages that vLLM has written in its canonical layout on one GPU are read on two, and the other way
round, by vLLM's own mapping."""

from contextlib import ExitStack

import numpy as np
import torch

from tests.unit.extensions.vllm_tier.tiering import (
    BLOCK,
    OURS,
    PATIENT,
    chunk_keys,
    engine_config,
    tiering,
)

HEADS, HEAD, BLOCKS = 2, 32, 4


def mappings(model, size):
    """vLLM's mapping of each rank of ``size``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
        derive_canonical_mappings,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    config = engine_config(model, [], tensor_parallel_size=size)
    heads = HEADS // size
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=HEAD, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    tensor = torch.zeros((BLOCKS, heads, BLOCK, 2 * HEAD))
    found = []
    for rank in range(size):
        config.parallel_config.rank = rank
        found.append(derive_canonical_mappings(config, cache, {"layer": tensor})["layer"])
    return found


def scatter(mapping, local, page, *, read=False):
    """What a worker does with each fragment of a page."""
    for run in mapping.runs:
        for at in range(run.num_fragments):
            here = run.local_offset + at * run.local_stride
            there = run.canonical_offset + at * run.canonical_stride
            size = run.fragment_size
            if read:
                local[here : here + size] = page[there : there + size]
            else:
                page[there : there + size] = local[here : here + size]


def test_a_page_goes_from_one_gpu_to_two_and_back(model, server):
    one, two = mappings(model, 1), mappings(model, 2)
    assert all(each.parallelism_agnostic for each in (*one, *two))
    page = np.random.default_rng(1).integers(0, 256, 2 * HEADS * HEAD * BLOCK * 4, np.uint8)
    ours = OURS | {"server": str(server.address)} | PATIENT
    keys = [chunk_keys(60, 1), chunk_keys(61, 1)]
    with ExitStack() as ends:
        of_one, of_two = (
            ends.enter_context(
                tiering(
                    engine_config(
                        model,
                        [ours],
                        extra={"canonical_layout": True},
                        tensor_parallel_size=size,
                        distributed_executor_backend="mp",
                    )
                )
            )
            for size in (1, 2)
        )
        assert of_one.tier.block_size_bytes == of_two.tier.block_size_bytes
        assert of_one.tier._name == of_two.tier._name
        # TP 1 writes, TP 2 reads each rank's half, and writes it under another key.
        carry(of_one, keys[0], lambda row: scatter(one[0], page, row))
        halves = [np.zeros(page.size // 2, np.uint8) for _ in two]
        for mapping, half in zip(two, halves, strict=True):
            carry(of_two, keys[0], lambda row, m=mapping, h=half: scatter(m, h, row, read=True))
        assert not any((half == 0).all() for half in halves)

        def both(row):
            for mapping, half in zip(two, halves, strict=True):
                scatter(mapping, half, row)

        carry(of_two, keys[1], both)
        back = np.zeros_like(page)
        carry(of_one, keys[1], lambda row: scatter(one[0], back, row, read=True))
    assert (back == page).all()


def carry(steps, keys, work):
    """``work`` on the chunk's row of vLLM's RAM: before it is stored where it is new, else after it
    has come."""
    context = steps.context()
    is_there = steps.leading(context, keys)
    planned = None if is_there else steps.manager.prepare_store(keys, context)
    if planned is not None:
        work(steps.rows[int(planned.store_spec.chunk_ids[0])])
        steps.manager.complete_store(keys, context)
        steps.settle()
    else:
        work(steps.rows[int(steps.manager.prepare_load(keys, context).chunk_ids[0])])
        steps.manager.complete_load(keys, context)
    steps.manager.on_request_finished(context)
