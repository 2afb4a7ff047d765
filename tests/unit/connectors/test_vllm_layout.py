"""Layouts of engines: what each rank tells is in the fingerprint, and which engines are left alone
or refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    RSWASpec,
)

from kvtier.connectors.vllm.groups import Uncached
from kvtier.connectors.vllm.layout import (
    ContextRanks,
    chunk_layout,
    divided,
    kept,
    place,
    places,
    start_only,
)
from kvtier.connectors.vllm.metadata import RankLayout
from kvtier.connectors.vllm.worker_side.worker import GroupLayers, WorkerHalf
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import LayoutError
from tests.unit.connectors.test_vllm_identity import engine, folder
from tests.unit.still_model import StillModel

pytestmark = pytest.mark.vllm

__all__ = ["folder"]


def rank(**other):
    given: dict[str, Any] = {
        "block_bytes": (4096,),
        "description": {"strides": [1, 2]},
        "model": {"rotary": "a", "attention": "b"},
        "weights": None,
    } | other
    return RankLayout(**given)


def cache():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def laid_out(given, config, ranks, tokens=32):
    found = kept(config, with_groups=True, sharing=ContextRanks.of(given.parallel_config))
    return chunk_layout(given, config, found, ranks, tokens)


def print_of(given, ranks=None, tokens=32):
    return bytes(laid_out(given, cache(), ranks or {(0, 0): rank()}, tokens)[0].fingerprint)


@pytest.mark.parametrize(
    "other",
    [
        {"description": {"strides": [2, 1]}},
        {"block_bytes": (8192,)},
        {"model": {"rotary": "c", "attention": "b"}},
        {"model": {"rotary": "a", "attention": "c"}},
    ],
    ids=["strides", "block bytes", "rotary tables", "attention"],
)
@pytest.mark.parametrize("place", [0, 1])
def test_what_each_rank_tells_is_in_it(folder, other, place):
    same, changed = ({(0, 0): rank(), (0, 1): rank()} for _ in range(2))
    changed[0, place] = rank(**other)
    assert print_of(engine(folder), changed) != print_of(engine(folder), same)
    assert print_of(engine(folder), {(0, 0): rank()}) != print_of(engine(folder), same)


def test_ranks_are_told_apart_by_their_place(folder):
    one, two = rank(model={"rotary": "one"}), rank(model={"rotary": "two"})
    assert print_of(engine(folder), {(0, 0): one, (0, 1): two}) != print_of(
        engine(folder), {(0, 0): two, (0, 1): one}
    )
    assert print_of(engine(folder), {(0, 0): one, (0, 1): two}) != print_of(
        engine(folder), {(0, 0): one, (1, 0): two}
    )


def test_a_model_keeps_its_chunks_under_any_name_that_it_is_served_by(folder):
    given = engine(folder)
    without = laid_out(given, cache(), {(0, 0): rank()})[0]
    given.model_config.served_model_name = "tiny-70b"
    named = laid_out(given, cache(), {(0, 0): rank()})[0]
    assert (without.model, named.model) == ("", "tiny-70b")
    assert named == without and named.keys([*range(64)]) == without.keys([*range(64)])


def test_the_size_of_chunks_is_in_every_key(folder):
    tokens = list(range(64))
    small, large = (
        laid_out(engine(folder), cache(), {(0, 0): rank()}, size)[0] for size in (32, 64)
    )
    assert not set(small.keys(tokens)) & set(large.keys(tokens))


def test_keys_of_one_start_are_random():
    given = ChunkLayout(fingerprint({"model": "a"}), 32, 16, (4096,))
    one, two = start_only(given, "why"), start_only(given, "why")
    assert len({given.fingerprint, one.fingerprint, two.fingerprint}) == 3
    assert one.chunk_tokens == given.chunk_tokens and one.rank_block_bytes == given.rank_block_bytes


@pytest.mark.parametrize(
    ("replicas", "mla", "shared"),
    [
        (2, True, True),
        (1, True, False),
        (2, False, True),
        (1, False, False),
        (None, True, True),
        (None, False, False),
    ],
    ids=[
        "MLA",
        "MLA beside a draft with heads",
        "one head",
        "heads",
        "MLA before 0.32",
        "heads before 0.32",
    ],
)
def test_ranks_share_a_part_only_where_all_of_their_layers_hold_the_same(
    folder, replicas, mla, shared
):
    given, config = engine(folder), cache()
    given.model_config.use_mla, given.parallel_config.tensor_parallel_size = mla, 2
    if replicas is not None:
        config.kv_tp_replicas = replicas
    chunks, _, parts = laid_out(given, config, {(0, 0): rank(), (0, 1): rank()})
    assert parts == (
        (((0, True),), ((0, False),)) if shared else (((0, True),), ((2 * 4096, True),))
    )
    assert len(chunks.rank_block_bytes) == (1 if shared else 2)


def test_vllm_counts_the_ranks_that_hold_the_same():
    assert KVCacheConfig(1, [], []).kv_tp_replicas == 1


def parallel(folder, *, divide=1, prefill=1, **more):
    """An engine with DCP and PCP. Some vLLMs refuse them on this machine."""
    given = engine(folder)
    sizes = {
        "decode_context_parallel_size": divide,
        "prefill_context_parallel_size": prefill,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    } | more
    for name, size in sizes.items():
        setattr(given.parallel_config, name, size)
    return given


def test_a_block_that_ranks_divide_has_the_tokens_of_all_of_them(folder):
    """And one that they do not divide, as a draft's, has its own."""
    config = cache()
    whole = KVCacheGroupSpec(["draft"], spec("FullAttentionSpec", dcp_sharded=False))
    config.kv_cache_groups.append(whole)
    ranks = {(0, place): rank(block_bytes=(4096, 4096)) for place in range(2)}
    given = parallel(folder, divide=2, tensor_parallel_size=2)
    _, geometry, _ = laid_out(given, config, ranks, 64)
    assert [group.block_tokens for group in geometry.groups] == [32, 16]


def test_how_ranks_divide_their_blocks_is_in_every_key(folder):
    """By the workers' word of the turn: vLLM settles it in them alone."""
    prints = set()
    for divide, turn in ((1, 1), (2, 1), (2, 8)):
        given, worker = (parallel(folder, divide=divide, tensor_parallel_size=2) for _ in range(2))
        worker.parallel_config.cp_kv_cache_interleave_size = turn
        told = rank(description={"strides": [1, 2]} | divided(worker.parallel_config))
        prints.add(print_of(given, {(0, 0): told, (0, 1): told}, 64))
    assert len(prints) == 3
    assert print_of(parallel(folder, prefill=2)) != print_of(parallel(folder))


def test_every_rank_that_divides_a_block_has_a_part_of_its_own(folder):
    """Also where vLLM counts one tensor rank, which is as many as hold the same."""
    config = cache()
    config.kv_tp_replicas = 1
    given = parallel(folder, divide=2, prefill=2)
    chunks, _, parts = laid_out(given, config, {(0, 0): rank(), (0, 1): rank()}, 64)
    assert parts == (((0, True),), ((2 * 4096, True),))
    assert len(chunks.rank_block_bytes) == 2


def test_of_ranks_that_share_a_prompt_one_writes_and_all_read(folder):
    """vLLM's handshake names one of them. Ranks are numbered by stage, then by their part of the
    prompt, then by tensor rank."""
    given = parallel(folder, prefill=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    given.parallel_config.world_size = 8
    ranks = {(stage, tensor): rank() for stage in (0, 1) for tensor in (0, 1)}
    _, _, parts = laid_out(given, cache(), ranks)
    size = 2 * 4096
    assert [group for (group,) in parts] == [
        *((0, True), (size, True), (0, False), (size, False)),
        *((2 * size, True), (3 * size, True), (2 * size, False), (3 * size, False)),
    ]
    named = []
    for number in range(8):
        given.parallel_config.rank = number
        named.append(place(given.parallel_config))
    assert named == [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1)]
    assert places(given.parallel_config) == len(set(named)) == 4
    divided = parallel(folder, divide=2, prefill=2)
    divided.parallel_config.world_size, divided.parallel_config.rank = 2, 1
    assert (place(divided.parallel_config), places(divided.parallel_config)) == ((0, 1), 2)


def test_states_that_ranks_replicate_are_kept_of_each_rank_beside_those_they_split(folder):
    """vLLM's MLA beside Qwen3.8's states: the attention is the same on both ranks, and one writes
    it. Of states each rank has its own, whether they are the same or not."""
    given, config = engine(folder), cache()
    given.model_config.use_mla, given.parallel_config.tensor_parallel_size = True, 2
    config.kv_tp_replicas = 2
    for replicated in (False, True):
        state = spec("MambaSpec", mamba_cache_mode="align", tp_replicated=replicated)
        config.kv_cache_groups.append(KVCacheGroupSpec([f"state {replicated}"], state))
    ranks = {(0, tensor): rank(block_bytes=(4096, 64, 512)) for tensor in (0, 1)}
    _, geometry, parts = laid_out(given, config, ranks, tokens=16)
    assert [group.kind.name for group in geometry.groups] == ["FULL", "STATE", "STATE"]
    assert parts == (((0, True), (0, True), (0, True)), ((0, False), (64, True), (512, True)))


def spec(name, **given):
    """One of vLLM's specs of a layer's KV cache."""
    heads = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    state = {"shapes": ((2, 2),), "dtypes": (torch.float32,)}
    own = state if name == "MambaSpec" else heads
    return getattr(kv_cache_interface, name)(**{"block_size": 16} | own | given)


def refused(given, told, *, with_groups=True, **more):
    config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], given)])
    with pytest.raises(LayoutError, match=told):
        kept(config, with_groups=with_groups, **more)


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("CrossAttentionSpec", {}, "is CrossAttentionSpec; kvtier keeps full attention"),
        ("SinkFullAttentionSpec", {"sink_len": 4}, "is SinkFullAttentionSpec, which"),
        ("MambaSpec", {"mamba_cache_mode": "none"}, "mamba_cache_mode='none'; .* --mamba-cache"),
    ],
)
def test_a_kv_cache_that_is_not_kept_is_refused_by_its_name(name, given, told):
    refused(spec(name, **given), told)


def test_a_group_whose_layers_differ_in_what_they_keep_is_refused():
    layers = {"one": spec("FullAttentionSpec"), "two": spec("SlidingWindowSpec", sliding_window=64)}
    refused(SimpleNamespace(kv_cache_specs=layers), r"\(FullAttentionSpec, SlidingWindowSpec\)")


def test_windows_are_refused_where_vllm_does_not_say_which_blocks_they_have(monkeypatch):
    """The specs of such a vLLM do not have all fields either."""
    window = spec("SlidingWindowSpec", sliding_window=64)
    refused(window, "sliding window.* from vLLM 0.32 on", with_groups=False)
    latent = spec("SlidingWindowMLASpec", sliding_window=64)
    vars(latent).pop("extra_retained_tokens", None)
    monkeypatch.delattr(type(window), "extra_retained_tokens")
    refused(latent, "sliding window.* from vLLM 0.32 on", with_groups=False)


def test_context_parallelism_is_refused_by_its_names_where_it_was_not_tried():
    for sharing in (ContextRanks(2, 1), ContextRanks(1, 2)):
        told = f"decode_context_parallel_size={sharing.decode} .* from vLLM 0.32 on; set both to 1"
        refused(spec("FullAttentionSpec"), told, with_groups=False, sharing=sharing)
        state = spec("MambaSpec", mamba_cache_mode="align")
        refused(state, f"recurrent state, .* prefill_.*={sharing.prefill}. Set", sharing=sharing)


def test_ranks_that_should_hold_the_same_and_do_not_are_refused(folder):
    given = engine(folder)
    given.model_config.use_mla, given.parallel_config.tensor_parallel_size = True, 2
    with pytest.raises(LayoutError, match="ranks of stage 0 disagree: 4096 and 8192 bytes"):
        print_of(given, {(0, 0): rank(), (0, 1): rank(block_bytes=(8192,))})


def test_layers_of_groups_that_vllm_caches_no_prefixes_of_are_not_copied():
    """Blocks of all groups lie over one another, so such layers look like more of the same. Some
    are no rows of blocks at all."""
    sizes = {"num_kv_heads": 1, "dtype": torch.float32}
    latent = MLAAttentionSpec(block_size=16, head_size=32, **sizes)
    ring = CircularBufferSpec(block_size=4, head_size=128, head_size_v=0, **sizes)
    groups = [KVCacheGroupSpec(["latent"], latent), KVCacheGroupSpec(["ring"], ring)]
    found = kept(KVCacheConfig(8, [], groups), with_groups=True)
    buffer = torch.zeros(8, latent.page_size_bytes, dtype=torch.int8)
    caches = {
        "latent": buffer.view(torch.float32).view(8, 1, 16, 32),
        "ring": buffer.view(torch.float32).view(8, 1, 4, 128),
        "raw": buffer.flatten(),
    }
    (layers,) = found.layers
    assert found.uncached == (Uncached(4, blocks=1),), "they take blocks all the same"
    half = WorkerHalf(0, [GroupLayers(layers, 1, 8)], caches, StillModel())
    assert half.layout().block_bytes == (latent.page_size_bytes,)


def test_a_window_that_is_replayed_takes_blocks_though_nothing_of_it_is_kept():
    replayed = spec("SlidingWindowMLASpec", sliding_window=64, bounded_replay=True)
    specs = (spec("MLAAttentionSpec"), replayed)
    groups = [KVCacheGroupSpec([str(number)], one) for number, one in enumerate(specs)]
    found = kept(KVCacheConfig(8, [], groups), with_groups=True)
    assert len(found.groups) == 1
    assert found.uncached == (Uncached(replayed.block_size, 64),)


def test_models_without_a_group_of_which_prefixes_consist_are_refused_by_name():
    """An engine that runs an encoder only has no groups. R-SWA drops tokens that it generated. A
    hybrid model may be configured without a layer of attention."""
    with pytest.raises(LayoutError, match="no group of which vLLM caches prefixes"):
        kept(KVCacheConfig(8, [], []), with_groups=True)
    sizes = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32, "rswa_window": 64}
    dropping = KVCacheGroupSpec(["layer"], RSWASpec(block_size=16, **sizes))
    with pytest.raises(LayoutError, match="RSWASpec, which drops tokens"):
        kept(KVCacheConfig(8, [], [dropping]), with_groups=True)
    state = KVCacheGroupSpec(["layer"], spec("MambaSpec", mamba_cache_mode="align"))
    with pytest.raises(LayoutError, match="recurrent states and no attention"):
        kept(KVCacheConfig(8, [], [state]), with_groups=True)
