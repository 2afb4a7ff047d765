"""Who has turned vLLM's prefix caching off, and whether kvtier serves there."""

from types import SimpleNamespace

import pytest

rule = pytest.importorskip("kvtier.connectors.vllm.layout")
platforms = pytest.importorskip("vllm.platforms")

pytestmark = pytest.mark.vllm


def why(*, on=False, mla=False, supported=True, more=None, **spec):
    """``more``: another layer's spec in the same group, so that vLLM keeps them apart."""
    layers = [SimpleNamespace(**spec)] if more is None else [SimpleNamespace(), more]
    found = layers[0] if more is None else SimpleNamespace(kv_cache_specs=dict(enumerate(layers)))
    groups = [SimpleNamespace(kv_cache_spec=one) for one in (SimpleNamespace(), found)]
    model = SimpleNamespace(
        use_mla=mla, is_prefix_caching_supported=supported, architectures=["Some"]
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=on), model_config=model
    )
    said: str = rule.why_no_prefixes(config, SimpleNamespace(kv_cache_groups=groups))
    return said


@pytest.fixture
def on(monkeypatch):
    """``on(kind)``: a CPU of this kind. "": a GPU. "OOT": another company's plug-in."""

    def at(kind):
        architecture = platforms.CpuArchEnum[kind] if kind not in ("", "OOT") else None
        platform = SimpleNamespace(
            is_cpu=lambda: architecture is not None,
            get_cpu_architecture=lambda: architecture,
            is_out_of_tree=lambda: kind == "OOT",
        )
        monkeypatch.setattr(platforms, "_current_platform", platform)

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    at("")
    return at


@pytest.mark.parametrize("kind", ["", "X86"])
def test_the_users_wish_is_passed_over(on, kind):
    on(kind)
    assert why(on=False) == why(on=True) == ""


@pytest.mark.parametrize(("kind", "mla"), [("X86", True), ("RISCV", False), ("OOT", False)])
def test_nothing_is_served_where_the_platform_turned_prefixes_off(on, kind, mla):
    on(kind)
    assert why(on=False, mla=mla)
    assert not why(on=True, mla=mla)
    on("")
    assert not why(on=False, mla=mla), "on a GPU the platform has no such reason"


def test_nothing_is_served_where_tokens_depend_on_those_behind_them(on):
    for prefix_lm in ({"non_causal": True}, {"more": SimpleNamespace(non_causal=True)}):
        for wished in (False, True):
            assert "a prefix LM" in why(on=wished, **prefix_lm)
    assert not why(non_causal=False)


@pytest.mark.parametrize("wished", [False, True])
def test_nothing_is_served_where_the_model_needs_all_of_a_prompt_at_once(on, wished):
    assert "no part of a prompt by itself for Some" in why(on=wished, supported=False)


def test_nothing_is_served_where_a_hit_would_break_batch_invariance(on, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "batch invariance" in why(on=False)
    assert not why(on=True), "vLLM says that its hits keep the promise on this backend"
