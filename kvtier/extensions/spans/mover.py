"""The worker's half of spans: tokens of slots, moved to other positions, into blocks.

It knows slots, places in them and distances, never tokens, except those that it computes in place.
A rotation that were wrong would give wrong answers without a sign. So nothing is moved before the
rotation was *seen* to be right: a job names two places of a slot that have the same token, and in
the first layer their keys must differ by the rotation alone. Tokens that are computed in place are
checked too: in the first layer the pass must find what was moved, which is erased before.

Latent attention (MLA) keeps a latent and one rotated key of a token, for all heads. Here the latent
is the value. It has no position in it.

Before the model's forward pass, which is one of all ranks together, every rank says whether it is
ready (``agree``). When one is not, none begins: the others would wait for it inside the model.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kvtier.connectors.vllm.groups import InPlaceRun, Kind, SpanMove
from kvtier.connectors.vllm.metadata import PoolAddress, SpanJob, SpanPass, StepMetadata
from kvtier.connectors.vllm.worker_side.extension import JobEnd, Part, WorkerExtension
from kvtier.connectors.vllm.worker_side.loaded import models_with
from kvtier.core.errors import LayoutError, StateError
from kvtier.extensions.spans.in_place import InPlace, all_ready
from kvtier.extensions.spans.packing import KeyRotation, Write, learned, rotation_of

logger = logging.getLogger("kvtier.connectors.vllm")

Compute = Callable[[Sequence[InPlaceRun], torch.Tensor], None]
"""Function ``compute(runs, block_ids)``: a forward pass over tokens of one request."""

Agree = Callable[[bool], bool]
"""Function ``agree(ready)``: whether all ranks are ready. Each rank must call it equally often."""


class _Copying(NamedTuple):
    job: SpanJob
    left: deque[SpanMove]
    block_ids: torch.Tensor


class Mover(WorkerExtension):
    """Moves of one rank, in one cache group of full attention. The worker's thread."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        caches: Mapping[str, torch.Tensor],
        tokens: int,
        longest: int,
        make_in_place: Callable[[], Compute] | None = None,
        agree: Agree = bool,
    ) -> None:
        """``tokens``: of a block. ``longest``: of a prompt. ``make_in_place`` raises LayoutError if
        nothing is computed in place. Raises LayoutError if tokens cannot be moved."""
        self._caches = list(caches.values())
        self._layers = [layers[name] for name in caches]
        self._tokens = tokens
        _refuse(self._layers, self._caches)
        first = self._layers[0]
        self._packing = learned(
            self._writer(0), self._caches[0], tokens, first.num_kv_heads, _dims(first)
        )
        self._rotation = rotation_of_model(self._layers, longest)
        self._checked = False
        self._copying: deque[_Copying] = deque()
        self._copied: set[int] = set()
        """Numbers of the copied jobs that wait for their pass."""
        self._in_place: Compute | None = None
        self._agree = agree
        self.why_not_in_place = "off"
        if make_in_place is not None:
            try:
                self._in_place, self.why_not_in_place = make_in_place(), ""
            except LayoutError as error:
                self.why_not_in_place = str(error)

    def described(self) -> dict[str, Any]:
        return {"why_no_spans": "", "why_not_in_place": self.why_not_in_place}

    def pools(self, metadata: StepMetadata) -> set[PoolAddress]:
        return {job.pool for job in (*metadata.spans, *self.jobs)}

    def has_work(self, metadata: StepMetadata) -> bool:
        return bool(metadata.spans or metadata.passes or self._copying)

    def step(
        self, metadata: StepMetadata, part: Part, is_time: Callable[[], bool], *, refused: bool
    ) -> list[JobEnd]:
        if refused:
            ended = [(job, True) for job in (*metadata.spans, *self.give_up())]
        else:
            for job in metadata.spans:
                self.begin(job)
            ended = self.go_on(part, is_time)
        ends = [
            JobEnd(job.number, None if job.goes_on else job.request_id, job.blocks, failed)
            for job, failed in ended
        ]
        for order in metadata.passes:  # also with other weights, so that no rank waits for this one
            failed = False
            try:
                self.compute(order)
            except Exception:
                logger.exception("tokens could not be computed in place")
                failed = True
            ends.append(JobEnd(order.number, order.request_id, order.blocks, failed))
        return ends

    def close(self) -> None:
        self.give_up()

    @property
    def jobs(self) -> list[SpanJob]:
        return [copying.job for copying in self._copying]

    def begin(self, job: SpanJob) -> None:
        self._copying.append(_Copying(job, deque(job.pieces), torch.tensor(job.blocks)))

    def give_up(self) -> list[SpanJob]:
        jobs = self.jobs
        self._copying.clear()
        self._copied.clear()
        return jobs

    def go_on(self, part: Part, is_time: Callable[[], bool]) -> list[tuple[SpanJob, bool]]:
        """Copy until time is up. Returns the jobs that ended, and whether each failed."""
        ended = []
        while self._copying and is_time():
            job, left, block_ids = self._copying[0]
            failed = False
            try:
                if not self._checked:
                    self._check(job, part)
                while left and is_time():
                    self._copy(part(job.pool, left[0].slot), left[0], block_ids)
                    left.popleft()
            except Exception:
                logger.exception("tokens of %d slots could not be moved", len(job.pieces))
                failed = True
            if failed or not left:
                self._copying.popleft()
                ended.append((job, failed))
                if job.goes_on and not failed:
                    self._copied.add(job.number)
        return ended

    def compute(self, order: SpanPass) -> None:
        """Compute in place. Raises if the first layer then differs from what was moved there."""
        ready = order.number in self._copied and self._in_place is not None
        self._copied.discard(order.number)
        if not order.runs:
            raise StateError("some rank could not copy its tokens")
        if not self._agree(ready):
            raise StateError("a pass over tokens that were not copied on every rank")
        assert self._in_place is not None, "it is ready"
        block_ids = torch.tensor(order.blocks)
        before = [self._first_layer(run, block_ids) for run in order.runs]
        for run, (keys, values) in zip(order.runs, before, strict=True):
            places = self._places(run.moved, run.end - run.moved, block_ids)
            self._writer(0)(torch.zeros_like(keys), torch.zeros_like(values), places)
        self._in_place(order.runs, block_ids)
        for run, had in zip(order.runs, before, strict=True):
            for one, other in zip(had, self._first_layer(run, block_ids), strict=True):
                if not self._rotation.explains(one, other, 0):
                    raise LayoutError("what was computed in place differs in the first layer")

    def _first_layer(self, run: InPlaceRun, block_ids: torch.Tensor) -> list[torch.Tensor]:
        """Read the first layer's keys and values of the run's moved tokens."""
        begin, until = run.moved // self._tokens, -(-run.end // self._tokens)
        rows = self._caches[0][block_ids[begin:until]].reshape(1, until - begin, -1)
        first = run.moved - begin * self._tokens
        read = self._packing.read(rows.view(torch.uint8), first, run.end - run.moved)
        return [each[0].contiguous() for each in read]

    def _places(self, begin: int, count: int, block_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(begin, begin + count)
        return block_ids[positions // self._tokens] * self._tokens + positions % self._tokens

    def _check(self, job: SpanJob, part: Part) -> None:
        """Check the rotation: raise LayoutError unless two keys of one token differ by it alone."""
        if not job.twins:
            raise LayoutError("no token comes twice, so the rotation cannot be checked here")
        for slot, one, other in job.twins:
            rows = self._rows(part(job.pool, slot))[:1]
            key, _ = self._packing.read(rows, one, 1)
            moved, _ = self._packing.read(rows, other, 1)
            if not self._rotation.explains(key, moved, other - one):
                raise LayoutError("keys of the same token differ by more than the rotation")
        self._checked = True

    def _copy(self, slot: torch.Tensor, piece: SpanMove, block_ids: torch.Tensor) -> None:
        keys, values = self._packing.read(self._rows(slot), piece.first, piece.tokens)
        keys = self._rotation.moved(keys, piece.distance)
        slots = self._places(piece.begin, piece.tokens, block_ids)
        for index in range(len(self._layers)):
            self._writer(index)(keys[index].contiguous(), values[index].contiguous(), slots)

    def _rows(self, slot: torch.Tensor) -> torch.Tensor:
        """View a slot's bytes as ``[layer, block, bytes]``, as saves write them."""
        size = self._caches[0][0].numel() * self._caches[0].element_size()
        return slot.view(len(self._layers), -1, size)

    def _writer(self, index: int) -> Write:
        layer, cache = self._layers[index], self._caches[index]

        def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
            if is_latent(layer):
                form = layer.kv_cache_dtype, layer._k_scale
                rows = cache.flatten(1, -2)
                layer.impl.do_kv_cache_update(values.squeeze(1), keys, rows, slots, *form)
            else:
                layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)

        return write


def _dims(layer: Any) -> tuple[int, int]:
    """Return the elements of a head's key and of its value."""
    if is_latent(layer):
        return layer.qk_rope_head_dim, layer.kv_lora_rank
    return layer.head_size, layer.head_size


class _Unmoved(WorkerExtension):
    def __init__(self, why: str) -> None:
        self._why = why

    def described(self) -> dict[str, Any]:
        return {"why_no_spans": self._why}


def extension(vllm_config: Any, kept: Any, caches: Mapping[str, torch.Tensor]) -> WorkerExtension:
    """Return :func:`mover_of`, or an extension that tells why this engine moves nothing."""
    try:
        return mover_of(vllm_config, kept, caches)
    except LayoutError as error:
        return _Unmoved(str(error))


def mover_of(vllm_config: Any, kept: Any, caches: Mapping[str, torch.Tensor]) -> Mover:
    """Make the mover. ``kept``: see :func:`kvtier.connectors.vllm.layout.kept`. Raises LayoutError,
    with the reason, for engines in which nothing is moved."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if parallel.world_size != ranks or parallel.decode_context_parallel_size != 1:
        raise LayoutError("spans have run with tensor parallelism only")
    if getattr(vllm_config, "use_v2_model_runner", False):
        raise LayoutError("spans have not run with vLLM's Model Runner V2, the default on GPUs")
    if vllm_config.speculative_config is not None:
        raise LayoutError("spans have not run with speculation")
    if [group.kind for group in kept.groups] != [Kind.FULL]:
        raise LayoutError("spans need one cache group of full attention")
    layers = vllm_config.compilation_config.static_forward_context
    longest = vllm_config.model_config.max_model_len
    tokens, kept_layers = kept.block_tokens, {name: layers[name] for name in caches}
    make_in_place = partial(InPlace, vllm_config, kept_layers, tokens)
    return Mover(layers, caches, tokens, longest, make_in_place, all_ready if ranks > 1 else bool)


def _refuse(layers: Sequence[Any], caches: Sequence[torch.Tensor]) -> None:
    """Raise LayoutError for KV in a form that has not been tried."""
    first = caches[0]
    if first.device.type != "cpu":
        raise LayoutError(f"the KV cache is on {first.device}; spans have run on CPUs only")
    if not first.dtype.is_floating_point or first.element_size() < 2:
        raise LayoutError(f"the KV cache is quantised ({first.dtype})")
    forms = {
        (cache.shape, cache.stride(), cache.dtype, layer.num_kv_heads, layer.head_size)
        for layer, cache in zip(layers, caches, strict=True)
    }
    kinds = {type(layer.impl).__name__ for layer in layers}
    if (
        len(forms) != 1
        or len(kinds) != 1
        or len({cache.data_ptr() for cache in caches}) < len(caches)
    ):
        raise LayoutError("layers whose KV lies in different forms, or is shared")
    if not hasattr(layers[0].impl, "do_kv_cache_update"):
        raise LayoutError(f"attention backend {kinds} has no writer of its own")


MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose layers all have rotated keys."""
LATENT_MODELS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Models whose layers all keep a latent, which has no position, and a rotated key."""
_CLASSES = (
    "RotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "DeepseekScalingRotaryEmbedding",
)
"""Rotary classes whose angles grow evenly with the position, whatever the prompt's length."""


def is_latent(layer: Any) -> bool:
    """Whether the layer has multi-head latent attention (MLA)."""
    return hasattr(layer, "kv_lora_rank")


def rotation_of_model(layers: Sequence[Any], longest: int) -> KeyRotation:
    """Read the model's rotation. ``longest``: tokens of the longest prompt. Raises LayoutError
    unless it is known to rotate every layer's keys alike."""
    roots = models_with(layers)
    kinds = [type(root).__name__ for root in roots]
    known = LATENT_MODELS if all(is_latent(layer) for layer in layers) else MODELS
    if len(roots) != 1 or kinds[0] not in known:
        raise LayoutError(f"models {kinds}; expected one of {', '.join(known)}")
    found: list[Any] = [
        module
        for module in roots[0].modules()
        if "rotary" in type(module).__name__.lower() and hasattr(module, "rotary_dim")
    ]
    kinds = sorted(type(module).__name__ for module in found)
    if len(found) != 1 or kinds[0] not in _CLASSES:
        raise LayoutError(f"rotary modules {kinds}; expected one of {', '.join(_CLASSES)}")
    (module,) = found
    table = module._compute_cos_sin_cache()
    if len(table) < longest:
        raise LayoutError(f"a rotary table of {len(table)} positions for prompts of {longest}")
    return rotation_of(table.cpu(), module.rotary_dim, module.is_neox_style)
