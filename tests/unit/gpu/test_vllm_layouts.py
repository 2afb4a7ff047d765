"""Each order of vLLM's one KV allocation with each of its quantisation modes, as vLLM's own planner
and allocator make them: what is copied to a slot and back is every byte of a block and no other.

No CPU kernel writes most of these. To a copier a block is bytes, so numbers stand for them.
"""

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.core.errors import LayoutError
from kvtier.gpu import PagedBlocks, regions_of
from tests.unit.gpu.test_gpu_copy import held
from tests.unit.paged_streams import Inline
from tests.unit.triton_interpreter import interpreted

pytestmark = pytest.mark.vllm
interface = pytest.importorskip("vllm.v1.kv_cache_interface")

BLOCKS, CHUNK_BLOCKS, LAYERS = 7, 2, ("a", "b", "c")
LAYOUTS = [one.name for one in interface.KVCacheLayout]
REFUSED = "BHLNC"
LATENT = ("NVFP4_DS_MLA",)
"""Modes of latent attention alone."""
MODES = [one.name for one in interface.KVQuantMode]
BACKENDS = {
    "INT8_PER_TOKEN_HEAD": "triton_attn.TritonAttentionBackend",
    "FP8_PER_TOKEN_HEAD": "triton_attn.TritonAttentionBackend",
    "INT4_PER_TOKEN_HEAD": "triton_attn.TritonAttentionBackend",
    "TURBOQUANT_K8V4": "turboquant_attn.TurboQuantAttentionBackend",
    "TURBOQUANT_4BIT_NC": "turboquant_attn.TurboQuantAttentionBackend",
    "TURBOQUANT_K3V4_NC": "turboquant_attn.TurboQuantAttentionBackend",
    "TURBOQUANT_3BIT_NC": "turboquant_attn.TurboQuantAttentionBackend",
}
"""Mode -> the backend of vLLM's that says how its heads and states are packed."""
WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "host": dict,
    "staged": lambda: {"streams": held(3, 40000), "locked": lambda _: ()},
    "kernel": lambda: {
        "streams": Inline(),
        "locked": lambda _: (),
        "make_rows": interpreted().KernelRows,
    },
}


def spec_of(mode, padded=False):
    """A layer of two heads (one where attention is latent), packed as its backend packs it."""
    quantised = interface.KVQuantMode[mode]
    given: dict[str, Any] = {"block_size": 4, "dtype": torch.bfloat16, "kv_quant_mode": quantised}
    if mode in LATENT:
        spec: Any = interface.MLAAttentionSpec(
            num_kv_heads=1, head_size=576, state_content_bytes=352, **given
        )
    else:
        if quantised is not interface.KVQuantMode.NONE:
            given["dtype"] = torch.uint8
        spec = interface.FullAttentionSpec(num_kv_heads=2, head_size=64, **given)
        if mode in BACKENDS:
            module, _, name = BACKENDS[mode].partition(".")
            found = importlib.import_module(f"vllm.v1.attention.backends.{module}")
            spec = getattr(found, name).customize_spec(spec)
        elif quantised.is_nvfp4:  # FlashInfer's, which imports CUDA's packages
            from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim

            spec = replace(spec, num_head_slots=4, state_content_bytes=nvfp4_kv_cache_full_dim(64))
        elif quantised.is_ultraquant:  # its backend needs a Triton that is in force
            from vllm.v1.attention.ops.ultraquant.format import slot_size

            spec = replace(spec, state_content_bytes=slot_size(64))
    if padded:
        spec = replace(spec, page_size_padded=spec.unpadded_page_size_bytes + 48)
    return spec


def caches_of(spec, layout, device="cpu"):
    """vLLM's tensors by layer, over one allocation of its own on the device."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.worker.utils import allocate_kv_cache

    order = interface.KVCacheLayout[layout]
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: order,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    config: Any = SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None)
    )
    groups = [interface.KVCacheGroupSpec(list(LAYERS), spec)]
    memory = spec.page_size_bytes * len(LAYERS) * BLOCKS
    plan = get_kv_cache_config_from_groups(config, groups, memory)
    assert plan.num_blocks == BLOCKS
    made: dict[str, torch.Tensor] = allocate_kv_cache(plan, torch.device(device), order)
    return made


def copied(caches, way):
    """Saves two blocks and loads them elsewhere. No byte differs from a copy by vLLM's views."""
    memory = next(iter(caches.values())).untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    dice = random.Random(5)
    whole.copy_(torch.tensor(dice.choices(range(256), k=len(whole)), dtype=torch.uint8))
    before = whole.clone()
    saved, loaded = [5, 1], [2, 6]
    paged = PagedBlocks(regions_of(caches, BLOCKS), CHUNK_BLOCKS, **way)
    part = torch.zeros(paged.block_bytes * CHUNK_BLOCKS, dtype=torch.uint8)

    paged.save([(part, 0, saved)]).wait()
    assert torch.equal(whole, before), "a save writes nothing"
    paged.load([(part, 0, loaded)]).wait()

    result = whole.clone()
    whole.copy_(before)
    for cache in caches.values():
        for source, target in zip(saved, loaded, strict=True):
            cache[target] = cache[source].clone()
    assert not torch.equal(whole, before)
    assert torch.equal(result, whole)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != REFUSED])
def test_every_byte_of_a_block_is_copied_and_no_other(layout, mode, way):
    copied(caches_of(spec_of(mode), layout), WAYS[way]())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["NONE", "INT8_PER_TOKEN_HEAD", "NVFP4"])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_what_pads_a_page_is_not_copied(layout, mode, way):
    spec = spec_of(mode, padded=True)
    caches = caches_of(spec, layout)
    copied(caches, WAYS[way]())
    rows = regions_of(caches, BLOCKS)
    assert {region.rows.shape[1] for region in rows} == {spec.unpadded_page_size_bytes}


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in LATENT])
def test_layers_inside_a_head_are_refused_by_name(mode):
    with pytest.raises(LayoutError, match=r"(?s)layer a .*not dense.*KV cache layout"):
        regions_of(caches_of(spec_of(mode), REFUSED), BLOCKS)


def test_each_mode_has_the_bytes_that_vllm_counts():
    for mode in MODES:
        spec = spec_of(mode)
        regions = regions_of(caches_of(spec, "LBHNC"), BLOCKS)
        assert [region.rows.shape[1] for region in regions] == [spec.page_size_bytes] * len(LAYERS)
        packed = spec.state_content_bytes is not None
        assert packed == (mode not in ("NONE", "FP8_PER_TENSOR")), mode
