"""Which rows kvtier sees in an engine's KV tensors, what it refuses, and how it describes them."""

import json

import pytest
import torch

from kvtier.core.errors import LayoutError
from kvtier.gpu import PagedBlocks, regions_of
from tests.unit.paged_engines import (
    BLOCKS,
    BLOCKS_PER_CHUNK,
    CONTENT,
    HEADS,
    LAYERS,
    ORDERS,
    TOKENS,
    Engine,
    kernel_blocks,
    one_backing,
    unequal_layers,
)


def test_layers_that_alias_one_tensor_count_once():
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    other = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)

    regions = regions_of(
        {"a": cache, "b": other, "c": cache.view(BLOCKS, HEADS, TOKENS, CONTENT)}, BLOCKS
    )

    assert [region.layer for region in regions] == ["a", "b"]


def test_rows_are_the_engines_memory_not_a_copy():
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)

    (region,) = regions_of({"a": cache}, BLOCKS)
    region.rows[3] = 1

    assert cache[3].all()
    assert not cache[2].any()
    assert region.rows.shape == (BLOCKS, HEADS * TOKENS * CONTENT * 2)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (torch.zeros(BLOCKS, 4, 8)[:, :, :6], "not dense"),
        (torch.zeros(BLOCKS, 2, 3, 4).as_strided((BLOCKS, 2, 3, 4), (4, 24, 8, 1)), "not dense"),
        (torch.zeros(BLOCKS, 4).as_strided((BLOCKS, 4), (2, 1)), "not dense"),
        (torch.zeros(BLOCKS, 1, 1, 4).expand(BLOCKS, 2, 3, 4), "not dense"),
        (torch.zeros(BLOCKS + 1, 4, 8), "no axis counts the blocks"),
        (torch.zeros(3, BLOCKS, 4, 8), "no axis counts the blocks"),
        (torch.zeros(BLOCKS), "no axis counts the blocks"),
        ([torch.zeros(BLOCKS, 4)], "expected one tensor"),
    ],
)
def test_a_cache_without_one_dense_row_a_block_is_refused(cache, words):
    with pytest.raises(LayoutError, match=rf"(?s)layers\.7\.attn.*{words}") as caught:
        regions_of({"layers.7.attn": cache}, BLOCKS)

    if isinstance(cache, torch.Tensor):
        assert f"{tuple(cache.shape)} and stride {cache.stride()}" in str(caught.value)


def test_two_blocks_are_not_taken_for_keys_and_values():
    with pytest.raises(LayoutError, match="two axes could be the blocks"):
        regions_of({"a": torch.zeros(2, 2, TOKENS, HEADS, CONTENT)}, 2)


def test_regions_of_two_engines_are_refused():
    regions = regions_of({"a": torch.zeros(4, 8)}, 4) + regions_of({"b": torch.zeros(5, 8)}, 5)

    with pytest.raises(LayoutError, match="4 blocks on cpu"):
        PagedBlocks(regions, 2)
    with pytest.raises(LayoutError, match="no members"):
        PagedBlocks([], 2)


def described(engine, blocks=BLOCKS):
    return PagedBlocks(regions_of(engine.caches, blocks), BLOCKS_PER_CHUNK).describe()


def test_description_is_json_and_does_not_depend_on_the_number_of_blocks():
    cpu = torch.device("cpu")
    small = described(one_backing(ORDERS["LHBNC"], cpu))
    large = described(one_backing(ORDERS["LHBNC"], cpu, blocks=BLOCKS * 3), BLOCKS * 3)

    assert json.loads(json.dumps(small)) == small == large
    assert small["row_bytes"] == [TOKENS * CONTENT * 2] * LAYERS * HEADS
    assert small["device"].startswith("cpu ")


def test_description_tells_apart_what_would_be_read_wrongly():
    cpu = torch.device("cpu")
    engine = one_backing(ORDERS["LBHNC"], cpu)
    reversed_layers = Engine(dict(reversed(engine.caches.items())), engine.backings)

    descriptions = [
        described(one_backing(order, cpu)) for order in ORDERS.values() if order != ORDERS["BLHNC"]
    ]
    descriptions += [
        described(reversed_layers),
        described(kernel_blocks(cpu)),
        described(unequal_layers(cpu)),
    ]

    assert len({json.dumps(description) for description in descriptions}) == len(descriptions)


def test_packed_layers_are_described_as_separate_ones():
    cpu = torch.device("cpu")
    assert described(one_backing(ORDERS["BLHNC"], cpu)) == described(
        one_backing(ORDERS["LBHNC"], cpu)
    )


def test_block_bytes_is_the_sum_of_rows():
    paged = PagedBlocks(
        regions_of(unequal_layers(torch.device("cpu")).caches, BLOCKS), BLOCKS_PER_CHUNK
    )
    assert paged.block_bytes == TOKENS * (36 + 36 + 5 + 7)
