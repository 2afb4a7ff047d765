"""The worker's half of spans: tokens of slots, rotated, into blocks, if the rotation is seen to be
right."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvtier.connectors.vllm.groups import Kind, SpanMove
from kvtier.connectors.vllm.metadata import SpanJob
from kvtier.core.errors import LayoutError
from kvtier.extensions.spans.mover import Mover, mover_of, rotation_of_model
from kvtier.extensions.spans.packing import KeyRotation, rotation_of

pytestmark = pytest.mark.vllm

TOKENS, HEADS, DIM, LAYERS, BLOCKS = 4, 2, 8, 3, 10
CHUNK = 2 * TOKENS
SIZE = TOKENS * HEADS * DIM


class RotaryEmbedding(nn.Module):
    """As vLLM's, as far as it is looked at."""

    rotary_dim, is_neox_style = DIM, True

    def _compute_cos_sin_cache(self):
        angles = torch.arange(256)[:, None] * 1000 ** (-torch.arange(0, DIM, 2) / DIM)
        return torch.cat((angles.cos(), angles.sin()), 1)


class Kernel:
    """Writes a block in a form of its own."""

    places = torch.randperm(2 * SIZE, generator=torch.Generator().manual_seed(1))

    def do_kv_cache_update(self, _layer, keys, values, cache, slots):
        for index, slot in enumerate(slots.tolist()):
            places = self.places.view(2, TOKENS, HEADS, DIM)[:, slot % TOKENS]
            cache[slot // TOKENS][places[0]] = keys[index]
            cache[slot // TOKENS][places[1]] = values[index]


class Attention(nn.Module):
    num_kv_heads, head_size = HEADS, DIM

    def __init__(self):
        super().__init__()
        self.impl = Kernel()


class LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = RotaryEmbedding()
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))


class Worker:
    """A rank whose slot 0 has a chunk of a home. A key is its token's, rotated to its position."""

    def __init__(self, home, model=None, compute=None, agree=bool):
        self.model: Any = model or LlamaForCausalLM()
        self.rotation: KeyRotation = rotation_of(
            RotaryEmbedding()._compute_cos_sin_cache(), DIM, True
        )
        draw = torch.Generator().manual_seed(2)
        self.raw = torch.randn(LAYERS, 32, HEADS, DIM, generator=draw)
        self.values = torch.randn(LAYERS, 32, HEADS, DIM, generator=draw)
        self.caches = {f"{index}": torch.zeros(BLOCKS, 2 * SIZE) for index in range(LAYERS)}
        layers = {f"{index}": layer for index, layer in enumerate(self.model.layers)}
        self.mover = Mover(layers, self.caches, TOKENS, 256, lambda: compute, agree)
        slot = [torch.zeros(CHUNK // TOKENS, 2 * SIZE) for _ in range(LAYERS)]
        for index, rows in enumerate(slot):
            Kernel().do_kv_cache_update(
                None,
                torch.stack([self.key(index, token, place) for place, token in enumerate(home)]),
                self.values[index, home],
                rows,
                torch.arange(len(home)),
            )
        self.slot = torch.stack(slot).view(torch.uint8).reshape(-1)

    def key(self, layer, token, position):
        return self.rotation.moved(self.raw[layer, token], position)

    def go_on(self, looks=1000):
        """One step that has time for so many looks at the clock."""
        left = itertools.count(looks, -1)
        return self.mover.go_on(lambda _job, _slot: self.slot, lambda: next(left) > 0)

    def read(self, layer, block, token):
        """Key and value of one token of a block."""
        places = Kernel.places.view(2, TOKENS, HEADS, DIM)[:, token]
        return self.caches[f"{layer}"][block][places]


HOME = [5, 6, 7, 8, 9, 9, 11, 12]
TWINS = [(0, 4, 5)]


def job(pieces, twins, blocks):
    return SpanJob(1, None, pieces, blocks, "r", 8, twins)  # type: ignore[arg-type]


def test_tokens_go_to_their_places_with_keys_of_their_new_positions():
    worker = Worker(HOME)
    blocks = [7, 2, 5, 8, 1]
    pieces = [SpanMove(0, 2, 5, 9, 7), SpanMove(0, 0, 2, 14, 14)]
    worker.mover.begin(job(pieces, TWINS, blocks))
    ((ended, failed),) = worker.go_on()
    assert not failed
    assert ended.request_id == "r"
    written = set()
    for piece in pieces:
        for at in range(piece.tokens):
            place, token = piece.begin + at, HOME[piece.first + at]
            block = blocks[place // TOKENS]
            written.add((block, place % TOKENS))
            for layer in range(LAYERS):
                key, value = worker.read(layer, block, place % TOKENS)
                assert torch.allclose(key, worker.key(layer, token, place), atol=1e-5)
                assert torch.equal(value, worker.values[layer, token])
    for block in range(BLOCKS):
        for token in range(TOKENS):
            if (block, token) not in written:
                assert all(not worker.read(layer, block, token).any() for layer in range(LAYERS))


def test_a_step_copies_for_as_long_as_it_may_and_the_next_goes_on():
    worker = Worker(HOME)
    pieces = [SpanMove(0, at, 1, at, 0) for at in range(6)]
    worker.mover.begin(job(pieces, TWINS, [0, 1]))
    ended: Any = []
    steps = 0
    while not ended:
        ended = worker.go_on(looks=3)
        steps += 1
    assert steps == 3
    assert ended == [(ended[0][0], False)]
    assert worker.mover.jobs == []


@pytest.mark.parametrize(
    ("twins", "why"),
    [([(0, 3, 4)], "other tokens"), ([], "none"), ([(0, 5, 4), (0, 0, 1)], "some")],
)
def test_a_rotation_that_is_not_seen_to_be_right_moves_nothing(twins, why):
    worker = Worker(HOME)
    worker.mover.begin(job([SpanMove(0, 0, 8, 8, 8)], twins, [0, 1, 2, 3]))
    ((_, failed),) = worker.go_on()
    assert failed, why
    assert not any(cache.any() for cache in worker.caches.values())


def test_the_rotation_is_checked_once():
    worker = Worker(HOME)
    for twins, expected in (([], True), (TWINS, False), ([], False)):
        worker.mover.begin(job([SpanMove(0, 0, 8, 8, 8)], twins, [0, 1, 2, 3]))
        ((_, failed),) = worker.go_on()
        assert failed == expected


def test_jobs_are_given_up_together():
    worker = Worker(HOME)
    jobs = [job([SpanMove(0, 0, 8, 8, 8)], TWINS, [0, 1, 2, 3]) for _ in range(2)]
    for one in jobs:
        worker.mover.begin(one)
    assert worker.mover.give_up() == jobs
    assert worker.go_on() == []


class Phi3ForCausalLM(LlamaForCausalLM):
    pass


class DynamicRotaryEmbedding(RotaryEmbedding):
    pass


def with_rotary(rotary, more=None):
    model = LlamaForCausalLM()
    model.rotary = rotary
    if more is not None:
        model.more = more
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Phi3ForCausalLM, "expected one of LlamaForCausalLM"),
        (lambda: with_rotary(DynamicRotaryEmbedding()), "expected one of RotaryEmbedding"),
        (lambda: with_rotary(RotaryEmbedding(), RotaryEmbedding()), "rotary modules"),
        (lambda: with_rotary(nn.Identity()), "rotary modules"),
    ],
)
def test_models_that_are_not_known_to_rotate_all_keys_alike_are_refused(make, told):
    with pytest.raises(LayoutError, match=told):
        Worker(HOME, make())


def test_a_table_shorter_than_the_longest_prompt_is_refused():
    model = LlamaForCausalLM()
    with pytest.raises(LayoutError, match="256 positions for prompts of 257"):
        rotation_of_model(list(model.layers), 257)


def test_kv_that_lies_in_a_form_that_was_not_tried_is_refused():
    model = LlamaForCausalLM()
    layers = {f"{index}": layer for index, layer in enumerate(model.layers)}
    one = torch.zeros(BLOCKS, 2 * SIZE)
    with pytest.raises(LayoutError, match="shared"):
        Mover(layers, dict.fromkeys(layers, one), TOKENS, 256)
    quantised = {name: torch.zeros(BLOCKS, 2 * SIZE, dtype=torch.uint8) for name in layers}
    with pytest.raises(LayoutError, match="quantised"):
        Mover(layers, quantised, TOKENS, 256)
    meta = {name: torch.zeros(BLOCKS, 2 * SIZE, device="meta") for name in layers}
    with pytest.raises(LayoutError, match="on CPUs only"):
        Mover(layers, meta, TOKENS, 256)


LATENT = 12


class LatentKernel:
    """As vLLM's for latent attention: a token's latent, and then its rotated key."""

    def do_kv_cache_update(self, latents, keys, cache, slots, *_form):
        rows = cache.view(-1, LATENT + DIM)
        rows[slots, :LATENT], rows[slots, LATENT:] = latents, keys.squeeze(1)


class LatentAttention(nn.Module):
    num_kv_heads, head_size = 1, LATENT + DIM
    kv_lora_rank, qk_rope_head_dim = LATENT, DIM
    kv_cache_dtype, _k_scale = "auto", 1.0

    def __init__(self):
        super().__init__()
        self.impl = LatentKernel()


class DeepseekScalingRotaryEmbedding(RotaryEmbedding):
    is_neox_style = False


class DeepseekV3ForCausalLM(nn.Module):
    def __init__(self, attention=LatentAttention):
        super().__init__()
        self.rotary = DeepseekScalingRotaryEmbedding()
        self.layers = nn.ModuleList(attention() for _ in range(LAYERS))


class LatentLlama(LlamaForCausalLM):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LatentAttention() for _ in range(LAYERS))


LatentLlama.__name__ = LlamaForCausalLM.__name__


def test_of_latent_attention_the_key_is_rotated_and_the_latent_is_not():
    model = DeepseekV3ForCausalLM()
    layers = {f"{index}": layer for index, layer in enumerate(model.layers)}
    caches = {name: torch.zeros(BLOCKS, TOKENS, LATENT + DIM) for name in layers}
    mover = Mover(layers, caches, TOKENS, 256)
    rotation = rotation_of(RotaryEmbedding()._compute_cos_sin_cache(), DIM, neox=False)
    raw = torch.randn(LAYERS, 32, LATENT + DIM)

    def at(layer, token, place):
        latent, key = raw[layer, token].split([LATENT, DIM])
        return torch.cat((latent, rotation.moved(key, place)))

    rows = [at(layer, token, place) for layer in range(LAYERS) for place, token in enumerate(HOME)]
    slot = torch.stack(rows).view(torch.uint8).reshape(-1)
    blocks = [7, 2, 5, 8, 1]
    mover.begin(job([SpanMove(0, 2, 5, 9, 7)], TWINS, blocks))
    ((_, failed),) = mover.go_on(lambda _job, _slot: slot, lambda: True)
    assert not failed
    for place, token in enumerate(HOME[2:7], 9):
        for layer, cache in enumerate(caches.values()):
            found = cache[blocks[place // TOKENS], place % TOKENS]
            assert torch.equal(found[:LATENT], raw[layer, token, :LATENT])
            assert torch.allclose(found, at(layer, token, place), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: DeepseekV3ForCausalLM(Attention), "expected one of LlamaForCausalLM"),
        (LatentLlama, "expected one of DeepseekV2ForCausalLM"),
    ],
    ids=["latents expanded to heads", "latents that are not known"],
)
def test_a_model_that_does_not_keep_what_it_is_known_to_keep_is_refused(make, told):
    model = make()
    with pytest.raises(LayoutError, match=told):
        rotation_of_model(list(model.layers), 256)


@pytest.mark.parametrize(
    ("workers", "parts", "v2", "drafts", "kinds", "told"),
    [
        (4, 1, False, None, ["FULL"], "tensor parallelism only"),
        (2, 2, False, None, ["FULL"], "tensor parallelism only"),
        (2, 1, True, None, ["FULL"], "Model Runner V2"),
        (2, 1, False, object(), ["FULL"], "speculation"),
        (2, 1, False, None, ["WINDOW"], "full"),
    ],
)
def test_engines_in_which_nothing_is_moved_say_why(workers, parts, drafts, kinds, told, *, v2):
    """Two ranks of tensor parallelism. ``parts``: ranks that have parts of a prompt's tokens."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=workers, tensor_parallel_size=2, decode_context_parallel_size=parts
        ),
        use_v2_model_runner=v2,
        speculative_config=drafts,
    )
    kept = SimpleNamespace(groups=[SimpleNamespace(kind=Kind[kind]) for kind in kinds])
    with pytest.raises(LayoutError, match=told):
        mover_of(config, kept, {})
