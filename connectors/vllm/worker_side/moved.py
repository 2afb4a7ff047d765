"""The worker's half of spans: tokens of slots, moved to other positions, into blocks.

It knows slots, places in them and distances, never tokens. A job is copied slot by slot, so that it
makes a step no longer than other loads do. It has run on vLLM's CPU backend only, and is refused
elsewhere.

A rotation that were wrong would give wrong answers without a sign. So nothing is moved before the
rotation was *seen* to be right: a job names two places of a slot that have the same token, and in
the first layer their keys must differ by the rotation alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from kvtier.connectors.vllm.groups import Kind
from kvtier.connectors.vllm.metadata import SpanJob
from kvtier.connectors.vllm.worker_side.rotary import rotation_of_model
from kvtier.core.errors import LayoutError
from kvtier.gpu.packing import Packing, learned
from kvtier.gpu.rotation import Rotation
from kvtier.spans.plan import Piece

logger = logging.getLogger("kvtier.connectors.vllm")

Part = Callable[[SpanJob, int], torch.Tensor]
"""``part(job, slot)``: this rank's bytes of a slot."""


class Ended(NamedTuple):
    """A job that is through."""

    job: SpanJob
    failed: bool


class _Copying(NamedTuple):
    job: SpanJob
    left: deque[Piece]
    block_ids: torch.Tensor


class Mover:
    """One rank's, of one cache group of full attention. The worker's thread."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        caches: Mapping[str, torch.Tensor],
        tokens: int,
        longest: int,
    ) -> None:
        """``layers``: vLLM's attention layers by name. ``caches``: their KV. ``tokens``: of a
        block. ``longest``: of a prompt. Raises LayoutError where tokens cannot be moved."""
        self._names = list(caches)
        self._caches = [caches[name] for name in self._names]
        self._layers = [layers[name] for name in self._names]
        self._tokens = tokens
        _refuse(self._layers, self._caches)
        first = self._layers[0]
        self._packing = learned(
            self._writer(0), self._caches[0], tokens, first.num_kv_heads, first.head_size
        )
        modules: list[nn.Module] = list(self._layers)
        self._rotation: Rotation = rotation_of_model(modules, longest)
        self._checked = False
        self._copying: deque[_Copying] = deque()

    @property
    def packing(self) -> Packing:
        return self._packing

    @property
    def jobs(self) -> list[SpanJob]:
        """Those that are not through."""
        return [copying.job for copying in self._copying]

    def begin(self, job: SpanJob) -> None:
        self._copying.append(_Copying(job, deque(job.pieces), torch.tensor(job.blocks)))

    def give_up(self) -> list[SpanJob]:
        """Every job that is not through."""
        jobs = self.jobs
        self._copying.clear()
        return jobs

    def go_on(self, part: Part, is_time: Callable[[], bool]) -> list[Ended]:
        """Copy slots until all is through or the time is over. Returns the jobs that ended."""
        ended = []
        while self._copying and is_time():
            job, left, block_ids = self._copying[0]
            try:
                if not self._checked:
                    self._check(job, part)
                while left and is_time():
                    self._copy(part(job, left[0].slot), left[0], block_ids)
                    left.popleft()
            except Exception:
                logger.exception("tokens of %d slots could not be moved", len(job.pieces))
                self._copying.popleft()
                ended.append(Ended(job, failed=True))
                continue
            if not left:
                self._copying.popleft()
                ended.append(Ended(job, failed=False))
        return ended

    def _check(self, job: SpanJob, part: Part) -> None:
        """Raises LayoutError unless two keys of the same token differ by the rotation alone."""
        if not job.twins:
            raise LayoutError("no token comes twice, so the rotation cannot be checked here")
        for slot, one, other in job.twins:
            rows = self._rows(part(job, slot))[:1]
            key, _ = self._packing.read(rows, one, 1)
            moved, _ = self._packing.read(rows, other, 1)
            if not self._rotation.explains(key, moved, other - one):
                raise LayoutError("keys of the same token differ by more than the rotation")
        self._checked = True

    def _copy(self, slot: torch.Tensor, piece: Piece, block_ids: torch.Tensor) -> None:
        keys, values = self._packing.read(self._rows(slot), piece.first, piece.tokens)
        keys = self._rotation.moved(keys, piece.distance)
        places = torch.arange(piece.begin, piece.begin + piece.tokens)
        slots = block_ids[places // self._tokens] * self._tokens + places % self._tokens
        for index in range(len(self._layers)):
            self._writer(index)(keys[index].contiguous(), values[index].contiguous(), slots)

    def _rows(self, slot: torch.Tensor) -> torch.Tensor:
        """A slot's bytes as ``[layer, block, bytes]``, as saves write them."""
        size = self._caches[0][0].numel() * self._caches[0].element_size()
        return slot.view(len(self._layers), -1, size)

    def _writer(self, index: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        layer, cache = self._layers[index], self._caches[index]

        def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)

        return write


def mover_of(vllm_config: Any, kept: Any, caches: Mapping[str, torch.Tensor]) -> Mover:
    """For an engine that is loaded. ``kept``: see :func:`kvtier.connectors.vllm.layout.kept`.

    Raises LayoutError, with the reason, for engines in which nothing is moved.
    """
    if vllm_config.parallel_config.world_size != 1:
        raise LayoutError("spans have run with one worker only")
    if vllm_config.speculative_config is not None:
        raise LayoutError("spans have not run with speculation")
    if [group.kind for group in kept.groups] != [Kind.FULL]:
        raise LayoutError("spans need one cache group of full attention")
    layers = vllm_config.compilation_config.static_forward_context
    longest = vllm_config.model_config.max_model_len
    return Mover(layers, caches, kept.block_tokens, longest)


def _refuse(layers: Sequence[Any], caches: Sequence[torch.Tensor]) -> None:
    """Raises LayoutError where KV lies in a form that has not been tried."""
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
