"""What a worker tells of its loaded model: other numbers, another digest. The same numbers, the
same. And that it notices replaced weights."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvtier.connectors.vllm.worker_side import loaded


class Kernel:
    def __init__(self):
        self.scale, self.logits_soft_cap, self.sliding_window = 0.5, 0.0, -1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.impl = Kernel()
        self.kv_cache_dtype = "auto"
        self.kv_cache = torch.rand(8)
        self.register_buffer("_k_scale", torch.tensor(1.0))


class Rotary(nn.Module):
    """Tables as vLLM's. The first half of a row are cosines, the second sines."""

    def __init__(self, rows=512, columns=64):
        super().__init__()
        self.base, self.use_long_rope, self.short_factor = 10000.0, False, [1.0, 2.0]
        self.register_buffer(
            "cos_sin_cache", torch.arange(rows * columns).reshape(rows, columns).float(), False
        )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.rotary_emb, self.proj = Attention(), Rotary(), nn.Linear(32, 32)
        self.experts = nn.Linear(200, 300)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(12))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        return {name for name, _ in weights}


def facts(model):
    attention = [loaded.attention_facts(layer.attn) for layer in model.layers]
    return loaded._digest(attention), loaded._digest(loaded.rotary_facts(model, 1024))


ROTARY: dict[str, Callable[[Any], Any]] = {
    "first cosine": lambda rotary: rotary.cos_sin_cache[0, :1].add_(1),
    "last sine": lambda rotary: rotary.cos_sin_cache[-1, -1:].add_(1),
    "one column": lambda rotary: rotary.cos_sin_cache[:, 17].add_(1),
    "the table's second half": lambda rotary: rotary.cos_sin_cache[256:].mul_(2),
    "its type": lambda rotary: setattr(rotary, "cos_sin_cache", rotary.cos_sin_cache.double()),
    "its shape": lambda rotary: setattr(
        rotary, "cos_sin_cache", rotary.cos_sin_cache.reshape(256, 128)
    ),
    "the half that is taken": lambda rotary: setattr(rotary, "use_long_rope", True),
    "the base": lambda rotary: setattr(rotary, "base", 500000.0),
    "a factor": lambda rotary: setattr(rotary, "short_factor", [1.0, 2.5]),
    "a table that is not a buffer": lambda rotary: setattr(rotary, "inverse", torch.ones(8)),
}
ATTENTION: dict[str, Callable[[Any], Any]] = {
    "scale": lambda attention: setattr(attention.impl, "scale", 0.25),
    "soft cap": lambda attention: setattr(attention.impl, "logits_soft_cap", 30.0),
    "window": lambda attention: setattr(attention.impl, "sliding_window", 512),
    "cache type": lambda attention: setattr(attention, "kv_cache_dtype", "fp8"),
    "scale of K": lambda attention: attention._k_scale.fill_(0.5),
    "nan": lambda attention: setattr(attention.impl, "scale", float("nan")),
}


@pytest.mark.parametrize("change", ROTARY)
def test_a_rotary_table_that_resolved_otherwise_is_another_digest(change):
    model, same = Model(), Model()
    assert facts(model) == facts(same)
    ROTARY[change](model.layers[7].rotary_emb)
    assert facts(model)[0] == facts(same)[0]
    assert facts(model)[1] != facts(same)[1]


@pytest.mark.parametrize("change", ATTENTION)
def test_attention_that_resolved_otherwise_is_another_digest(change):
    model, same = Model(), Model()
    ATTENTION[change](model.layers[11].attn)
    assert facts(model)[0] != facts(same)[0]
    assert facts(model)[1] == facts(same)[1]


def test_what_is_in_the_kv_cache_is_no_fact_of_the_model():
    model = Model()
    before = facts(model)
    model.layers[0].attn.kv_cache.add_(1)
    assert facts(model) == before


def test_a_rotary_module_without_a_table_counts_with_the_longest_prompt():
    model = Model()
    model.layers[0].rotary_emb.cos_sin_cache = None
    assert loaded.rotary_facts(model, 1024) != loaded.rotary_facts(model, 1536)
    assert loaded.rotary_facts(Model(), 1024) == loaded.rotary_facts(Model(), 1536)


def test_a_model_without_rotary_modules_is_fine():
    model = Model()
    for layer in model.layers:
        del layer.rotary_emb
    assert loaded.rotary_facts(model, 1024) == {}


def test_the_model_is_found_by_its_layers_and_no_other_is():
    model, draft, stranger = Model(), Model(), Model()
    layers = [layer.attn for one in (model, draft) for layer in one.layers]
    found = loaded.models_with(layers)
    assert {id(one) for one in found} == {id(model), id(draft)}
    assert loaded.models_with([]) == []
    assert loaded.models_with([*layers, Attention()]) == [], (
        "a layer that is in no model: it is not all of it"
    )
    del stranger
    gc.collect()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.float8_e4m3fn,
        torch.bool,
        torch.int64,
    ],
)
def test_every_element_type_is_read(dtype):
    ones, zeros = torch.ones(3, 5).to(dtype), torch.zeros(3, 5).to(dtype)
    assert loaded.content(ones) == loaded.content(ones.clone()) != loaded.content(zeros)
    assert loaded.content(ones.t()) != loaded.content(ones)
    assert loaded.content(torch.zeros(0, dtype=dtype)) == loaded.content(
        torch.zeros(0, dtype=dtype)
    )


class TestWeights:
    def test_every_parameter_is_in_the_digest(self):
        same = loaded.weights_digest([Model()])
        for name, _ in Model().named_parameters():
            model = Model()
            model.get_parameter(name).data[0] += 1
            assert loaded.weights_digest([model]) != same
        assert loaded.weights_digest([Model()]) == same

    def test_weights_that_a_kernel_has_taken_away_cannot_be_read(self):
        model = Model()
        model.layers[3].proj.weight = nn.Parameter(torch.empty(0))
        assert loaded.weights_digest([model]) is None
        assert loaded.weights_digest([]) is None
        assert loaded.weights_digest([Attention()]) is None, "no parameter at all"


def written(model, parameter):
    with torch.no_grad():
        parameter.add_(1)


def swapped(model, parameter):
    model.layers[5].experts.weight = nn.Parameter(parameter.detach().clone())


def moved(model, parameter):
    parameter.data = parameter.data.clone()


def removed(model, parameter):
    model.layers[5].experts.weight = None


def uncounted(model, parameter):
    for layer in model.layers:
        layer.proj.weight.data.mul_(1.5)


def by_loading(model, parameter):
    model.load_weights([("layers.5.experts.weight", parameter.detach().clone())])


class TestWatch:
    @pytest.mark.parametrize("change", [written, swapped, moved, removed, uncounted, by_loading])
    def test_replaced_weights_are_noticed_once(self, change):
        model = Model()
        watch = loaded.WeightWatch([model])
        assert not any(watch.replaced(looks=True) for _ in range(20))
        change(model, model.layers[5].experts.weight)
        assert watch.replaced(looks=True)
        assert not any(watch.replaced(looks=True) for _ in range(20))

    def test_one_layer_written_past_all_counting_is_noticed_within_a_round(self):
        model = Model()
        watch = loaded.WeightWatch([model])
        model.layers[11].experts.bias.data.fill_(3.0)
        count = len(list(model.parameters()))
        looks = [watch.replaced(looks=True) for _ in range(-(-count // 16))]
        assert sum(looks) == 1

    def test_a_step_that_moves_no_chunk_only_hears_of_loading(self):
        model = Model()
        watch = loaded.WeightWatch([model])
        written(model, model.layers[0].proj.weight)
        assert not watch.replaced(looks=False)
        assert watch.replaced(looks=True)
        by_loading(model, model.layers[5].experts.weight)
        assert watch.replaced(looks=False)

    def test_an_engine_that_moves_its_weights_about_is_heard_and_not_looked_at(self):
        model = Model()
        watch = loaded.WeightWatch([model], moves=True)
        moved(model, model.layers[5].experts.weight)
        assert not watch.replaced(looks=True)
        by_loading(model, model.layers[5].experts.weight)
        assert watch.replaced(looks=True)

    def test_it_keeps_no_replaced_weights_alive(self):
        model = Model()
        watch = loaded.WeightWatch([model])
        old = model.layers[5].experts.weight.data_ptr()
        swapped(model, model.layers[5].experts.weight)
        gc.collect()
        alive = [
            one
            for one in gc.get_objects()
            if issubclass(type(one), torch.Tensor) and one.data_ptr() == old
        ]
        assert not alive
        assert watch.replaced(looks=True)

    @pytest.mark.parametrize(
        ("config", "moves"),
        [
            ({}, False),
            (
                {"offload_config": SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=2))},
                True,
            ),
            (
                {"offload_config": SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=0))},
                False,
            ),
            ({"offload_config": SimpleNamespace(offload_backend="prefetch")}, True),
            ({"parallel_config": SimpleNamespace(enable_eplb=True)}, True),
        ],
    )
    def test_which_engines_move_weights(self, config, moves):
        given = {"parallel_config": SimpleNamespace(enable_eplb=False)} | config
        assert loaded._moves(SimpleNamespace(**given)) is moves
