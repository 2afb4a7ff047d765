"""The page of cache specs: every spec of every vLLM that is here has a row, and kvtier does with it
what the row says."""

import ast
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.connectors.vllm.groups import Geometry, Kind
from kvtier.connectors.vllm.layout import kept
from kvtier.core.errors import LayoutError
from tests import marked_tables
from tests.conftest import ROOT, vllm_source, vllm_versions
from tests.unit.connectors.test_vllm_layout import spec

pytestmark = pytest.mark.vllm
BASES = {"KVCacheSpec", "AttentionSpec"}


def declared(version):
    """The specs that a vLLM's source declares, without those from which all others come."""
    file = vllm_source(version) / "vllm/v1/kv_cache_interface.py"
    found = set(BASES)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            found |= {node.name} if bases & found else set()
    return found - BASES


def rows():
    """``(spec, verdict, proof)``."""
    for name, _, verdict, _, proof in marked_tables.rows("connectors/vllm/SPECS.md", "specs"):
        yield name, verdict, proof


@pytest.mark.parametrize("version", sorted(vllm_versions()))
def test_every_spec_of_vllm_has_a_row(version):
    listed = {re.findall(r"`(\w+)`", name)[0] for name, *_ in rows()}
    assert len(declared(version)) > 5, "the names have changed, so that nothing is found"
    assert declared(version) <= listed


def test_every_row_is_of_some_vllm_and_names_tests_that_there_are():
    every = set[str]().union(*map(declared, vllm_versions()))
    for name, verdict, proof in rows():
        assert re.findall(r"`(\w+)`", name)[0] in every or len(vllm_versions()) < 2
        assert verdict in ("kept", "left out", "refused")
        tests = re.findall(r"`(\w+\.py)::(\w+)`", proof)
        assert tests, name
        for file, test in tests:
            texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
            assert any(f"def {test}(" in text for text in texts), test


MADE: dict[str, dict[str, Any]] = {
    "FullAttentionSpec": {},
    "MLAAttentionSpec": {"num_kv_heads": 1, "tokens_per_state": 4},
    "SlidingWindowSpec": {"sliding_window": 64},
    "SlidingWindowMLASpec": {"sliding_window": 64},
    "SlidingWindowMLASpec with bounded_replay": {"sliding_window": 64, "bounded_replay": True},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 64},
    "CircularBufferSpec": {},
    "MambaSpec": {"mamba_cache_mode": "align"},
    "RSWASpec": {"rswa_window": 64},
    "HiddenStateCacheSpec": {},
    "SinkFullAttentionSpec": {"sink_len": 16},
    "CrossAttentionSpec": {},
    "EncoderOnlyAttentionSpec": {},
}


def verdict_on(name):
    """Beside full attention, as such layers are."""
    given = MADE[name]
    layer = spec(name.partition(" ")[0], **given)
    groups = [
        KVCacheGroupSpec(["full"], spec("FullAttentionSpec")),
        KVCacheGroupSpec(["layer"], layer),
    ]
    try:
        found = kept(KVCacheConfig(8, [], groups), with_groups=True)
    except LayoutError as error:
        return "refused" if type(layer).__name__ in str(error) else f"refused without name: {error}"
    return "kept" if len(found.groups) == 2 else "left out"


def test_each_spec_is_treated_as_its_row_says():
    told = {name.replace("`", ""): verdict for name, verdict, _ in rows()}
    assert {name: verdict_on(name) for name in MADE} == {name: told[name] for name in MADE}
    alone = {"UniformTypeKVCacheSpecs", "HiSparseHotSpec", "HiSparseResidentSpec"}
    assert told.keys() - MADE.keys() == alone


def v4_layers():
    """Six layers as DeepSeek V4 has them: every one with a window, every second with compressed
    keys of 4 tokens a state and an indexer's, the others of 128 tokens a state."""
    packed: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_size": 584,
        "dtype": torch.uint8,
        "model_version": "deepseek_v4",
        "alignment": 576,
        "cache_dtype_str": "fp8_ds_mla",
    }
    states: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32, "alignment": 576}
    found: dict[str, Any] = {}
    for number in range(6):
        found[f"{number}.window"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=128, **packed
        )
        ratio = 0 if number < 2 else 128 if number % 2 else 4
        if ratio:
            found[f"{number}.latent"] = MLAAttentionSpec(
                block_size=256, tokens_per_state=ratio, **packed
            )
        for width in {0: (), 4: (2048, 512), 128: (1024,)}[ratio]:
            found[f"{number}.compressor.{width}"] = SlidingWindowMLASpec(
                block_size=4 if ratio == 4 else 8,
                sliding_window=8 if ratio == 4 else 128,
                head_size=width,
                **states,
            )
    return found


def test_deepseek_v4_keeps_its_latents_whole_and_the_tails_of_its_windows():
    """Its groups are made by vLLM's own planner."""
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLNHC)
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    config: Any = SimpleNamespace(
        cache_config=cache,
        scheduler_config=scheduler,
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    planned = get_kv_cache_groups(config, v4_layers())
    found = kept(KVCacheConfig(8, [], planned), with_groups=True)
    kinds = {(group.kind, group.block_tokens, group.span) for group in found.groups}
    assert kinds == {
        (Kind.FULL, 256, 0),
        (Kind.TAIL, 64, 128),
        (Kind.TAIL, 8, 128),
        (Kind.TAIL, 4, 8),
    }
    geometry = Geometry(found.groups, found.block_tokens)
    (latents,) = geometry.anchors
    assert geometry.chunk_tokens == 256 and latents.kind is Kind.FULL
    assert len(geometry.behind(2048)) == 3 * 2 + 16 + 2
    assert geometry.keep_tokens == 20_480


def kept_beside_full_attention(**layers):
    """``layers``: the specs of another cache group."""
    block = next(iter(layers.values())).block_size
    spec_of_all = UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=layers)
    groups = [
        KVCacheGroupSpec(["full"], spec("FullAttentionSpec")),
        KVCacheGroupSpec([*layers], spec_of_all),
    ]
    return kept(KVCacheConfig(8, [], groups), with_groups=True)


@pytest.mark.parametrize(
    ("block", "reach", "kind"),
    [(4, 4, "TAIL"), (4, 16, "TAIL"), (4, 17, "WINDOW"), (16, 4, "WINDOW")],
)
def test_a_window_within_a_longer_block_is_a_tail(block, reach, kind):
    """Inkling's convolutions of four tokens: as a window, a piece would be the longest block."""
    layer = spec("SlidingWindowSpec", block_size=block, sliding_window=reach)
    _, other = kept_beside_full_attention(convolution=layer).groups
    assert (other.kind.name, other.block_tokens, other.span) == (kind, block, reach)


def test_an_indexers_pages_are_copied_with_those_of_its_attention():
    """Where it is left out, attention chooses by what a block had before."""
    latent, indexer = "layers.0.attn", "layers.0.attn.indexer.k_cache"
    pages = {
        latent: spec("MLAAttentionSpec", num_kv_heads=1, head_size=576),
        indexer: spec("MLAAttentionSpec", num_kv_heads=1, head_size=132),
    }
    assert kept_beside_full_attention(**pages).layers == (
        frozenset({"full"}),
        frozenset({latent, indexer}),
    )
