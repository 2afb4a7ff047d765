"""Loaded model of a worker: what its layers resolved to, which weights it has, and whether the
weights were replaced.

A model's configuration does not tell all that decides its KV. vLLM chooses rotary tables by the
engine's longest prompt, and scales, windows and kernels by flags and platform. So the worker
inspects the layers themselves. vLLM gives a connector only its attention layers. The modules that
contain them are found among the process's objects, once, at the start."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kvtier.connectors.vllm.identity import is_local

_BLOCK_WORDS = 1 << 20
_SEED = 0x6B76
_CHECKED_PARAMETERS, _CHECKED_ELEMENTS = 16, 64
"""Parameters, and elements of each, that a check for replaced weights compares. Later checks take
the next parameters in turn."""
_ROTARY = re.compile("rotary|rope", re.IGNORECASE)


class LoadedModel:
    """Facts of the loaded model. Keeps no weights alive, because an engine that replaces them must
    not have them twice."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        self._layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
        self._model = vllm_config.model_config
        self._longest = self._model.max_model_len
        self._is_local = is_local(vllm_config)
        self._roots = models_with(self._layers.values())
        self._watch = WeightWatch(self._roots, moves=_moves(vllm_config))

    def backends(self) -> list[str]:
        """Return names of the attention backends, which decide how a block is packed: strides do
        not always show it."""
        return sorted({layer.get_attn_backend().get_name() for layer in self._layers.values()})

    def resolved(self) -> dict[str, str] | None:
        """Return digests of what decides K and V for given tokens and weights, or None if the model
        was not found."""
        if not self._roots:
            return None
        attention = {name: attention_facts(layer) for name, layer in self._layers.items()}
        rotary = [rotary_facts(root, self._longest) for root in self._roots]
        return {"attention": _digest(attention), "rotary": _digest(rotary)}

    def others(self) -> tuple[tuple[str, str, str], ...]:
        """Return other checkpoints of the model's weights: name, revision and folder inside."""
        sources = [
            (source.model_or_path, source.revision or "", source.subfolder or "")
            for root in self._roots
            for source in getattr(root, "secondary_weights", ())
        ]
        own = (self._model.model, self._model.revision or "", "")
        return tuple(sorted({source for source in sources if source != own}))

    def weights(self) -> str | None:
        """Return a hex digest of every parameter. None where the weights come from local files, and
        where some cannot be read, because kernels of vLLM's CPU backend keep packed weights in a
        form of their own."""
        return None if self._is_local else weights_digest(self._roots)

    def replaced(self, *, looks: bool) -> bool:
        return self._watch.replaced(looks=looks)


def hardware(device: str) -> str:
    """Return the kind of processor, as far as it chooses kernels, which round differently."""
    if device.startswith("cuda"):
        return "cuda {}.{}".format(*torch.cuda.get_device_capability(torch.device(device)))
    if device.startswith("cpu"):
        has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        return f"cpu {torch.backends.cpu.get_cpu_capability()}{' AMX' if has_tiles else ''}"
    return device


def models_with(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules that contain these layers: the model, and a draft model."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inside = {id(child) for module in modules for child in module.children()}
    wanted = {id(layer) for layer in layers}
    outermost = [
        module for module in modules if id(module) not in inside and id(module) not in wanted
    ]
    found = [root for root in outermost if any(id(module) in wanted for module in root.modules())]
    seen = {id(module) for root in found for module in root.modules()}
    if not wanted or not wanted <= seen:
        return []

    def place(root: nn.Module) -> tuple[str, str]:
        first = next(name for name, module in root.named_modules() if id(module) in wanted)
        return type(root).__qualname__, first

    return sorted(found, key=place)


# ---- what layers resolved to ---------------------------------------------------------------------


def attention_facts(layer: Any) -> dict[str, Any]:
    """Return all plain values of the layer and its kernel: scale, soft cap, window, cache type,
    scales of K and V."""
    buffers = {name: content(tensor) for name, tensor in layer.named_buffers()}
    return {
        "layer": _plain(layer),
        "kernel": _plain(getattr(layer, "impl", None)),
        "buffers": buffers,
    }


def rotary_facts(root: nn.Module, longest: int) -> dict[str, Any]:
    """Return plain attributes of each rotary module, and digests of its tables. One without a
    readable table counts with the engine's longest prompt, by which such tables are chosen."""
    found: dict[str, Any] = {}
    for name, module in root.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if inner or not (
            _ROTARY.search(name.rpartition(".")[2]) or _ROTARY.search(type(module).__name__)
        ):
            continue
        tensors = dict(module.named_buffers())
        tensors |= {
            key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)
        }
        tables = {key: content(tensor) for key, tensor in sorted(tensors.items())}
        facts = {"class": type(module).__qualname__, "plain": _plain(module), "tables": tables}
        found[name] = facts if tables else facts | {"longest": longest}
    return found


def _plain(thing: Any) -> dict[str, str]:
    attributes = vars(thing) if hasattr(thing, "__dict__") else {}
    return {
        name: repr(value)
        for name, value in attributes.items()
        if not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, int | float | str | Enum | torch.dtype)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# ---- weights -------------------------------------------------------------------------------------


def weights_digest(roots: list[nn.Module]) -> str | None:
    digest, count = hashlib.sha256(), 0
    for root in roots:
        for name, tensor in root.named_parameters():
            if tensor.is_meta or not tensor.numel():
                return None
            digest.update(f"{name}\0{content(tensor)}\0".encode())
            count += 1
    return digest.hexdigest() if count else None


@torch.no_grad()
def content(tensor: torch.Tensor) -> str:
    """Return shape, type, and a digest of every element.

    It is made where the tensor lies, and nothing but a few numbers a block of 4 MiB is copied. A
    number is a multilinear hash (Carter and Wegman, 1979): the sum of all 32-bit words, each times
    a random number of its own. Two of them agree for different blocks by a chance of 2**-66."""
    told = f"{list(tensor.shape)} {tensor.dtype}"
    bits = tensor.detach()
    if bits.dim() == 2 and not bits.is_contiguous() and bits.t().is_contiguous():
        bits, told = bits.t(), f"{told} transposed"
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    flat = bits.reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 4 or flat.numel() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    words = flat.view(torch.int32)
    factors = _factors(words.device)
    sums = [
        (factors[:, : block.numel()] * block.to(torch.int64)).sum(1)
        for block in words.split(_BLOCK_WORDS)
        if block.numel()
    ]
    digest = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
    return f"{told} {hashlib.sha256(digest).hexdigest()}"


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the random numbers of :func:`content`, the same in every process."""
    drawn = np.random.Generator(np.random.PCG64(_SEED)).integers(
        -(1 << 63), (1 << 63) - 1, (2, _BLOCK_WORDS), endpoint=True
    )
    return torch.from_numpy(drawn).to(device)


class _Seen(NamedTuple):
    module: nn.Module
    name: str
    address: int
    version: int


class WeightWatch:
    """Notices that weights were replaced under a running engine. There are three signs:

    - The model's ``load_weights`` was called: vLLM's reloads and most weight transfers do that.
    - A parameter is another tensor, lies elsewhere, or was written in place (torch counts that).
    - Its elements differ. That shows writes that torch does not count (``parameter.data.copy_``).
      Each check compares some elements of some parameters, in turn. So a change of one layer alone
      may be noticed some checks later.

    It cannot see uncounted writes to elements that it does not compare, nor writes to weights that
    a kernel keeps outside the module's parameters. With ``moves`` (the engine itself moves weights
    about) it sees only the first sign.
    """

    def __init__(self, roots: list[nn.Module], *, moves: bool = False) -> None:
        self._roots = roots
        self._moves = moves
        self._loaded = False
        self._next = 0
        for root in roots:
            self._note_loads(root)
        self._seen: list[_Seen] = []
        self._elements: list[bytes] = []
        self._stream: torch.cuda.Stream | None = None
        self._remember()

    def replaced(self, *, looks: bool) -> bool:
        """Return whether there was a sign. ``looks``: compare as well, which takes some 0.1 ms."""
        if not (self._loaded or (looks and not self._moves and self._differs())):
            return False
        self._loaded = False
        self._remember()
        return True

    def _note_loads(self, root: nn.Module) -> None:
        load = getattr(root, "load_weights", None)
        if load is None:
            return

        @functools.wraps(load)
        def noted(*arguments: Any, **more: Any) -> Any:
            self._loaded = True
            return load(*arguments, **more)

        root.load_weights = noted

    def _remember(self) -> None:
        self._seen = (
            []
            if self._moves
            else [
                _Seen(module, name, *_place(parameter))
                for root in self._roots
                for module in root.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None and parameter.numel() and not parameter.is_meta
            ]
        )
        devices = {module._parameters[name].device for module, name, *_ in self._seen}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                self._stream = torch.cuda.Stream(device, priority=-1)
        self._elements = [self._read([one]) for one in self._seen]

    def _differs(self) -> bool:
        for module, name, address, version in self._seen:
            parameter = module._parameters.get(name)
            # written out: a call for each of some hundred parameters would be half of the time
            if parameter is None or parameter.data_ptr() != address:
                return True
            if version != (0 if parameter.is_inference() else parameter._version):
                return True
        chosen = range(self._next, min(self._next + _CHECKED_PARAMETERS, len(self._seen)))
        self._next = chosen.stop if chosen.stop < len(self._seen) else 0
        now = self._read([self._seen[index] for index in chosen])
        return now != b"".join(self._elements[index] for index in chosen)

    def _read(self, parameters: list[_Seen]) -> bytes:
        """Return elements. On a GPU a stream of its own reads them, and waits for no step."""
        if self._stream is None:
            return bytes(_elements(parameters))
        with torch.cuda.stream(self._stream):
            return bytes(_elements(parameters))


def _place(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


@torch.no_grad()
def _elements(parameters: list[_Seen]) -> bytes:
    parts = []
    for module, name, *_ in parameters:
        tensor = module._parameters[name]
        assert tensor is not None
        flat = (
            tensor.detach().reshape(-1)
            if tensor.is_contiguous()
            else tensor.detach()[..., 0].reshape(-1)
        )
        parts.append(flat[:: max(1, flat.numel() // _CHECKED_ELEMENTS)][:_CHECKED_ELEMENTS].float())
    if not parts:
        return b""
    return bytes(torch.cat(parts).cpu().numpy().tobytes())


def _moves(vllm_config: Any) -> bool:
    """Return whether the engine moves weights about while it runs: expert balancing, or layers that
    are fetched ahead."""
    offload, parallel = getattr(vllm_config, "offload_config", None), vllm_config.parallel_config
    return (
        getattr(getattr(offload, "prefetch", None), "offload_group_size", 0) > 0
        or getattr(offload, "offload_backend", "") == "prefetch"
        or any(getattr(parallel, name, False) for name in ("enable_eplb", "enable_elastic_ep"))
    )
