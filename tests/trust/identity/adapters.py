"""Rows about LoRA adapters: their weights and every field of their configuration, found by path, by
``~`` and by a hub id; and the engine's own LoRA configuration."""

import shutil
from dataclasses import replace
from pathlib import Path

from tests.integration.tiny_models import make_lora
from tests.trust.identity import weights
from tests.trust.identity.lives import copied
from tests.trust.identity.rows import (
    CONTROL,
    Base,
    Row,
    document,
    edit,
    engine,
    family,
    own_model,
    switch,
)

_PATH = "adapter"
_HOME, _HUB = ("home", 1, "~/adapter"), ("hub", 2, "acme/adapter")
_V = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"


def adapted(folder):
    """Each prompt has an adapter of its own, found in its own way."""
    spec = family()(folder)
    adapter = make_lora(folder / _PATH, spec.model, seed=1)
    return under(spec, folder, adapter).engine_with(enable_lora=True, max_loras=4, max_lora_rank=16)


def under(spec, folder, adapter):
    """``adapter`` where a path, ``~`` and a hub id lead: the same names, whatever it holds."""
    home, hub = folder / "home", folder / "hf" / "hub" / "models--acme--adapter"
    digest = str(len(list(folder.parent.iterdir())) % 10) * 40
    copied(adapter, home / "adapter")
    shutil.rmtree(hub, ignore_errors=True)
    copied(adapter, hub / "snapshots" / digest)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(digest)
    asked = (("path", 3, _PATH), _HOME, _HUB)
    prompts = tuple(
        {"tokens": document(10 + number), "lora": list(one)} for number, one in enumerate(asked)
    )
    return replace(spec, prompts=prompts).environment_with(
        HOME=str(home), HF_HOME=str(folder / "hf"), VLLM_CACHE_ROOT=str(Path.home() / ".cache/vllm")
    )


def changed(edit_adapter):
    """Under the same names lies an adapter that differs."""

    def change(spec, folder):
        adapter = copied(spec.model.parent / _PATH, folder / _PATH)
        edit_adapter(adapter)
        spec, _ = own_model(spec, folder)
        return under(spec, folder, adapter)

    return change


def field(name, value):
    def edited(adapter):
        edit(adapter / "adapter_config.json", name, value=value)

    shown: str | None = None if name in _SAYS_NOTHING else "answers"
    return Row(f"adapter's {name} {value}", "adapters", changed(edited), shown)


_SAYS_NOTHING = {"lora_dropout", "base_model_name_or_path", "target_modules", "task_type"}


def byte(adapter):
    place = adapter / "adapter_model.safetensors"
    ((begin, end),) = [(b, e) for name, b, e, _ in weights.tensors(place) if name == _V]
    weights.flip(place, begin + 4 * ((end - begin) // 8) + 3)


def lower_rank(adapter):
    """Half of the adapter's rank, and the weights to go with it."""
    from safetensors.torch import load_file, save_file

    place = adapter / "adapter_model.safetensors"
    whole = load_file(place)
    halved = {
        name: (one[:4] if "lora_A" in name else one[:, :4]).contiguous()
        for name, one in whole.items()
    }
    save_file(halved, place)
    edit(adapter / "adapter_config.json", "r", value=4)


def as_bin(adapter):
    """The same numbers in the other form of file."""
    import torch
    from safetensors.torch import load_file

    place = adapter / "adapter_model.safetensors"
    torch.save(load_file(place), adapter / "adapter_model.bin")
    place.unlink()


def another(spec, folder):
    adapter = make_lora(folder / _PATH, spec.model, seed=2)
    spec, _ = own_model(spec, folder)
    return under(spec, folder, adapter)


def renamed(spec, folder):
    """The same content by other names, numbers and paths."""
    adapter = copied(spec.model.parent / _PATH, folder / "elsewhere")
    prompts = tuple(
        dict(one, lora=[f"name{number}", 7 - number, str(adapter)])
        for number, one in enumerate(spec.prompts)
    )
    return replace(spec, prompts=prompts)


def without(spec, _):
    """The base model is asked."""
    return replace(spec, prompts=tuple({"tokens": one["tokens"]} for one in spec.prompts))


BASES = [Base("adapters", adapted)]

ROWS = [
    Row(CONTROL, "adapters", lambda spec, _: spec, None, warm=True, slice=True),
    Row("another adapter by path, by ~ and by a hub id", "adapters", another, slice=True),
    Row("one byte of an adapter", "adapters", changed(byte)),
    Row("a copied adapter", "adapters", changed(lambda _: None), None, warm=True),
    Row("a renamed adapter", "adapters", renamed, None, warm=True),
    Row("no adapter", "adapters", without),
    Row("adapter's rank halved", "adapters", changed(lower_rank)),
    Row("adapter as pickle", "adapters", changed(as_bin), None),
    field("lora_alpha", 32),
    field("use_rslora", True),
    field("target_modules", ["v_proj"]),
    field("alpha_pattern", {"v_proj": 64}),
    field("rank_pattern", {"v_proj": 4}),
    field("lora_dropout", 0.5),
    field("base_model_name_or_path", "other"),
    Row("lora_target_modules", "adapters", engine(lora_target_modules=["qkv_proj"]), None),
    Row("lora_target_modules none of the adapter's", "adapters",
        engine(lora_target_modules=["o_proj"]), slice=True),
    switch("lora_config", "adapters", lora_dtype="bfloat16"),
    switch("lora_config", "adapters", max_lora_rank=32),
    switch("lora_config", "adapters", max_loras=3, warm=True),
    switch("lora_config", "adapters", max_cpu_loras=9, warm=True),
    switch("lora_config", "adapters", fully_sharded_loras=True),
]  # fmt: skip
