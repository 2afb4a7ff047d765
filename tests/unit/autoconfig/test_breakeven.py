"""Break-even lengths, prefill estimates, and LMI's published table for the p4de.24xlarge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.autoconfig.breakeven import (
    break_even,
    estimated_prefill,
    gpu_kind,
    gpu_kv_bytes,
)
from kvtier.autoconfig.model import describe
from kvtier.load_policy.prefill import PrefillTime
from tests.model_configs import MODELS

GIB = 1 << 30


def test_a_fast_tier_pays_after_its_latency_and_a_slow_one_never():
    prefill = PrefillTime(per_token=100e-6)
    assert (
        break_even(10e9, 0.009, 100_000, prefill, 100_000) == 100
    )  # 10 us a token to load: 90 us gained
    assert (
        break_even(1e9, 0.001, 100_000, prefill, 10**9) is None
    )  # 100 us a token: no gain at any length
    assert break_even(10e9, 0.0, 100_000, prefill, 10) == 1


@given(
    st.floats(1e-7, 1e-3),
    st.floats(1e-12, 1e-8),
    st.floats(1e8, 1e11),
    st.floats(0, 0.1),
    st.integers(1, 10**6),
)
def test_from_the_break_even_length_on_loading_beats_computing(
    per_token, per_depth, bandwidth, latency, kv_bytes
):
    prefill = PrefillTime(per_token, per_depth)

    def loading(tokens):
        return latency + tokens * kv_bytes / bandwidth

    tokens = break_even(bandwidth, latency, kv_bytes, prefill, 10**12)
    assert tokens is not None
    assert prefill.seconds(tokens) >= loading(tokens) * (1 - 1e-9)
    if tokens > 1:
        assert prefill.seconds(tokens - 1) <= loading(tokens - 1) * (1 + 1e-9)


def test_prefill_estimates_are_of_the_right_size():
    a100 = gpu_kind("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    model = describe(MODELS["qwen2.5-7b"], "7b")
    assert model.active_parameters.value
    assert model.attention_flops.value == 2 * 28 * 3584
    estimate = estimated_prefill(
        model.active_parameters.value, model.attention_flops.value, a100.flops
    )
    assert 8_000 < 1 / estimate.per_token < 12_000
    assert estimate.seconds(32_768) > 32_768 * estimate.per_token


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA A10G", "A10G"), ("Quadro", None)],
)
def test_gpu_names_are_whole_words(name, kind):
    assert gpu_kind(name) == (gpu_kind(kind) if kind else None)


# LMI's table (djl-serving, lmcache_performance.md) and the layouts of its tests: model, TP, RAM
# from, disk from.
LMI_TABLE = [
    ("qwen2.5-1.5b", 1, 2_000_000, 25_000_000),
    ("qwen3-8b", 1, 250_000, 6_000_000),
    ("qwen2.5-72b", 4, 250_000, 2_500_000),
]
P4DE_AVAILABLE = 1130 * GIB  # of 1152 GiB


@pytest.mark.parametrize(("name", "tensor", "ram_from", "disk_from"), LMI_TABLE)
def test_lmi_table_is_when_the_working_set_outgrows_the_tier_above(
    name, tensor, ram_from, disk_from
):
    model = describe(MODELS[name], name)
    weights, kv_bytes = model.weight_bytes.value, model.kv_bytes_per_token.value
    assert weights and kv_bytes
    from_gpu = gpu_kv_bytes(tensor, 80 * GIB, weights) // kv_bytes
    steps = [250_000 << step for step in range(8)]
    assert max(step for step in steps if step <= from_gpu) == ram_from
    ram = P4DE_AVAILABLE - max(2 * weights, P4DE_AVAILABLE // 5)
    from_ram = ram // kv_bytes
    assert disk_from <= from_ram < 1.4 * disk_from
