"""Rows about files: weights, tokenizer, chat template, code that the model's folder brings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.bench.model import _write_tokenizer
from tests.trust.identity import weights
from tests.trust.identity.lives import copied
from tests.trust.identity.rows import (
    CONTROL,
    PROMPTS,
    SPOKEN,
    Base,
    Row,
    edit,
    engine,
    environment,
    family,
    file_changed,
    own_model,
)

_LAYER = "model.layers.{}.{}.weight"
_TENSORS = (
    _LAYER.format(0, "self_attn.q_proj"),
    _LAYER.format(1, "self_attn.k_proj"),
    _LAYER.format(0, "self_attn.v_proj"),
    _LAYER.format(0, "self_attn.o_proj"),
    _LAYER.format(0, "mlp.down_proj"),
    _LAYER.format(0, "input_layernorm"),
)


def spoken(folder):
    return replace(family()(folder), prompts=SPOKEN)


def both_forms(folder):
    """Two forms of weights lie in one folder, and they are unlike. vLLM reads one of them."""
    spec = family()(folder)
    weights.as_pickle(spec.model, weights.negated)
    return spec.engine_with(load_format="safetensors")


def two_files(folder):
    """Two whole checkpoints in one folder, of which the index names one."""
    from safetensors.torch import load_file, save_file

    spec = family()(folder)
    whole = load_file(spec.model / "model.safetensors")
    (spec.model / "model.safetensors").rename(spec.model / "one.safetensors")
    weights.negated(whole)
    save_file(whole, spec.model / "other.safetensors", metadata={"format": "pt"})
    name_in_index(spec.model, "one.safetensors")
    return spec


def name_in_index(model, file):
    names = [name for name, *_ in weights.tensors(model / file)]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def own_class(folder):
    """vLLM runs a class of the operator's own, from a file beside the model."""
    spec = family()(folder)
    write_class(spec.model, "True")
    return spec.engine_with(
        model_class_overrides={"LlamaForCausalLM": "own_class:Own"}
    ).environment_with(TEST_PYTHON=str(spec.model))


def write_class(model, halves):
    (model / "own_class.py").write_text(_CLASS.replace("HALVES", halves))


def other_class(spec, folder):
    spec, model = own_model(spec, folder)
    write_class(model, "False")
    return spec.environment_with(TEST_PYTHON=str(model))


_CLASS = """
from vllm.model_executor.models.llama import LlamaForCausalLM


class Own(LlamaForCausalLM):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.self_attn.rotary_emb.is_neox_style = HALVES
"""
_CODE = """
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel


class Scaled(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = ScaledModel(config)
        self.post_init()


class ScaledModel(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn.scaling *= FACTOR
        self.post_init()
"""


def own_code(folder):
    """A model whose folder has Python of its own, run by vLLM's Transformers backend."""
    spec = family()(folder)
    write_code(spec.model, 1.0)
    return spec.engine_with(trust_remote_code=True, model_impl="transformers")


def write_code(model, factor):
    (model / "modeling_scaled.py").write_text(_CODE.replace("FACTOR", str(factor)))
    code = {
        "AutoModelForCausalLM": "modeling_scaled.Scaled",
        "AutoModel": "modeling_scaled.ScaledModel",
    }
    edit(model / "config.json", "auto_map", value=code)
    edit(model / "config.json", "architectures", value=["Scaled"])


def put_in_hub(folder, model, number):
    """``model`` as the hub's only cached snapshot."""
    hub = folder / "hub" / "models--acme--tiny"
    revision = str(number) * 40
    copied(model, hub / "snapshots" / revision)
    (hub / "refs").mkdir(parents=True, exist_ok=True)
    (hub / "refs" / "main").write_text(revision)


def in_hub(folder):
    spec = family()(folder)
    put_in_hub(folder / "hf", spec.model, 1)
    return replace(spec, model=Path("acme/tiny")).environment_with(HF_HOME=str(folder / "hf"))


def other_snapshot(spec, folder):
    home = copied(Path(spec.environment["HF_HOME"]), folder / "hf")
    (old,) = (home / "hub" / "models--acme--tiny" / "snapshots").iterdir()
    model = copied(old, folder / "model")
    weights.byte_of(_TENSORS[2], 5)(model)
    put_in_hub(home, model, 2)
    return spec.environment_with(HF_HOME=str(home))


def by_path(spec, folder):
    return replace(own_model(spec, folder)[0], by_path=True)


def overwritten(spec, folder):
    """The weights are replaced where they lie, with the times of the old ones."""
    import os

    place = spec.model / "model.safetensors"
    times = place.stat()
    weights.byte_of(_TENSORS[1], 7)(spec.model)
    os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
    return spec


def other_tokenizer(model):
    _write_tokenizer(model, seed=9)


def swapped_tokens(model):
    """Two words of the vocabulary change places; the file keeps its size."""
    file = model / "tokenizer.json"
    whole = json.loads(file.read_text())
    words = whole["model"]["vocab"]
    one, other = "a", "b"
    words[one], words[other] = words[other], words[one]
    file.write_text(json.dumps(whole))


def other_template(model):
    for file in (model / "chat_template.jinja", model / "tokenizer_config.json"):
        if file.exists():
            file.write_text(
                file.read_text().replace("<|system|>", "<|user|>").replace("> {{", ">{{")
            )


def _seeded(folder, seed):
    import kvtier.bench.model as made

    folder.mkdir(parents=True)
    sizes = made.PRESETS["tiny"] | {"num_hidden_layers": 2, "vocab_size": 2048}
    made._write_weights(folder, sizes, seed)


def _linked(spec, folder):
    (folder / "link").symlink_to(spec.model)
    return replace(spec, model=folder / "link")


def _split(model):
    """As a checkpoint of two shards: the same tensors in other files."""
    from safetensors.torch import load_file, save_file

    whole = load_file(model / "model.safetensors")
    names = sorted(whole)
    for number, part in enumerate((names[:7], names[7:])):
        save_file(
            {name: whole[name] for name in part},
            model / f"model-0000{number + 1}-of-00002.safetensors",
        )
    (model / "model.safetensors").unlink()


BASES = [
    Base("tiny", family(), split=True, swept=True),
    Base("blind", lambda folder: family()(folder).environment_with(TEST_BLIND="1")),
    Base("spoken", spoken),
    Base("forms", both_forms),
    Base("code", own_code),
    Base("index", two_files),
    Base("class", own_class),
    Base("hub", in_hub),
    Base("replaced", family()),
]

_WARM: dict[str, Any] = {"force": None, "warm": True}


def _edited(name, edit_model, base="tiny", **more):
    return Row(name, base, file_changed(edit_model), **more)


ROWS = [
    _edited("one name for all (the oracle's own control)", weights.byte_of(_TENSORS[2], 5), "blind",
            slice=True, planted=True),
    Row(CONTROL, "tiny", lambda spec, _: spec, slice=True, **_WARM),
    *(_edited(f"one byte of {name}", weights.byte_of(name, seed), slice=seed == 2)
      for seed, name in enumerate(_TENSORS)),
    *(_edited(f"one byte of {_TENSORS[2]}, seed {seed}", weights.byte_of(_TENSORS[2], seed))
      for seed in range(10, 13)),
    _edited("one byte of a token's embedding", weights.embedding_of(PROMPTS[0]["tokens"][3]),
            slice=True),
    _edited("one byte of an embedding that no prompt has", weights.embedding_of(1500), force=None),
    _edited("the last byte of the weights", weights.last_byte, force=None),
    _edited("two rows of a matrix swapped", weights.rows_swapped(_TENSORS[2])),
    _edited("edited weights, between 64 samples of each file", weights.unsampled(), slice=True),
    _edited("another checkpoint of the same shape", weights.second_seed(_seeded)),
    Row("load format dummy", "tiny", engine(load_format="dummy")),
    Row("a copy of the model's folder", "tiny", lambda spec, folder: own_model(spec, folder)[0],
        slice=True, **_WARM),
    Row("the model by its whole path", "tiny", by_path, **_WARM),
    _edited("a copy with other times", weights.touched, **_WARM),
    Row("a link to the model's folder", "tiny", _linked, **_WARM),
    _edited("weights in two files", _split, force=None),
    _edited("another tokenizer", other_tokenizer, "spoken"),
    _edited("two words of the vocabulary swapped", swapped_tokens, "spoken"),
    _edited("another chat template", other_template, "spoken"),
    Row("the other form of weights in one folder", "forms", engine(load_format="pt"),
        {"load_config.load_format": "pt"}, slice=True),
    _edited("the folder's own Python", lambda model: write_code(model, 0.5), "code"),
    _edited("the folder's own Python unchanged", lambda _: None, "code", force=None),
    _edited("the index names the other file",
            lambda model: name_in_index(model, "other.safetensors"), "index", slice=True),
    Row("another class under one name", "class", other_class),
    Row("another snapshot under one hub id", "hub", other_snapshot),
    Row("weights replaced where they lie, times kept", "replaced", overwritten),
    Row("another seed", "tiny", engine(seed=7), {"model_config.seed": "7"}, warm=True),
    Row("TORCH_COMPILE_DISABLE", "tiny", environment(TORCH_COMPILE_DISABLE="1"), None),
]  # fmt: skip
