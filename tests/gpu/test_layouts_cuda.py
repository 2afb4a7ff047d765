"""Each order of vLLM's one KV allocation with each of its quantisation modes, on a CUDA device: the
cases of ``tests/unit`` with the compiled kernel and with torch's copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier.gpu.rows import TorchRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
pytest.importorskip("vllm.v1.kv_cache_interface")
layouts: Any = pytest.importorskip("tests.unit.gpu.test_vllm_layouts")

WAYS: dict[str, dict[str, Any]] = {
    "kernel, locked": {"locked": lambda _: ()},
    "kernel, not locked": {},
    "torch": {"make_rows": TorchRows},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", layouts.MODES)
@pytest.mark.parametrize("layout", [one for one in layouts.LAYOUTS if one != layouts.REFUSED])
def test_every_byte_of_a_block_is_copied_on_the_device(layout, mode, way):
    layouts.copied(layouts.caches_of(layouts.spec_of(mode), layout, "cuda"), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["NONE", "INT8_PER_TOKEN_HEAD", "NVFP4"])
def test_what_pads_a_page_is_not_copied_on_the_device(mode, way):
    layouts.copied(layouts.caches_of(layouts.spec_of(mode, True), "LBHNC", "cuda"), WAYS[way])
