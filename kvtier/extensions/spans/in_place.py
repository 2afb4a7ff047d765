"""One more forward pass of the loaded model, over some tokens of a request that waits.

A run of tokens is passed to the attention backend as a sequence of its own: its queries are these
tokens, it ends behind them, and its blocks are the request's. In each layer all keys and values are
written before any of them is read. So a run sees what stands before it in the prompt, and what was
computed for the runs before it.

vLLM's model, its forward context and a metadata builder are no interface of its connectors. So
whatever is not as expected is refused at the start, in words. The builder is one of our own,
because some keep the plan of the engine's step. The model runs without its compiled graphs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvtier.connectors.vllm.groups import InPlaceRun
from kvtier.connectors.vllm.worker_side.loaded import models_with
from kvtier.core.errors import LayoutError

_EAGER = "skip_compiled"


class InPlace:
    """Forward pass of one rank, over one cache group of full attention. The worker's thread."""

    def __init__(self, vllm_config: Any, layers: Mapping[str, Any], block_tokens: int) -> None:
        """``layers`` are those whose KV is kept. Raises LayoutError if no pass is possible."""
        if vllm_config.lora_config is not None:
            raise LayoutError("LoRA is on, and which adapter a token has is told for a step only")
        if vllm_config.parallel_config.data_parallel_size != 1:
            raise LayoutError("it has not run with data parallelism")
        connector = get_kv_transfer_group() if has_kv_transfer_group() else self
        if not type(connector).__module__.startswith("kvtier."):  # such as a group of connectors
            raise LayoutError("another connector is told of every layer that the model runs")
        roots = models_with(layers.values())
        if len(roots) != 1:
            raise LayoutError(f"{len(roots)} models have these layers")
        self._config, self._layers, self._tokens = vllm_config, list(layers), block_tokens
        self._model: Any = roots[0]
        self._most: int = vllm_config.scheduler_config.max_num_seqs
        try:
            self._find_vllm(next(iter(layers.values())))
        except (ImportError, AttributeError, TypeError) as error:
            raise LayoutError(f"this vLLM has no forward pass as expected: {error}") from error

    def _find_vllm(self, layer: Any) -> None:
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        if _EAGER not in inspect.signature(set_forward_context).parameters:
            raise LayoutError("this vLLM cannot run a pass without its compiled graphs")
        spec = layer.get_kv_cache_spec(self._config)
        if spec.block_size != self._tokens:
            raise LayoutError(f"blocks of {spec.block_size} tokens; expected {self._tokens}")
        make_builder = layer.attn_backend.get_builder_cls()
        self._builder = make_builder(spec, self._layers, self._config, torch.device("cpu"))
        self._context = set_forward_context
        self._metadata = CommonAttentionMetadata
        self._fields = {one.name for one in dataclasses.fields(CommonAttentionMetadata)}

    @torch.inference_mode()
    def __call__(self, runs: Sequence[InPlaceRun], block_ids: torch.Tensor) -> None:
        """Compute ascending runs, some at a time: each slice reads the KV of those before it."""
        for at in range(0, len(runs), self._most):
            self._compute(runs[at : at + self._most], block_ids)

    def _compute(self, runs: Sequence[InPlaceRun], block_ids: torch.Tensor) -> None:
        positions = torch.cat([torch.arange(run.begin, run.end) for run in runs])
        slots = block_ids[positions // self._tokens] * self._tokens + positions % self._tokens
        lengths = [len(run.tokens) for run in runs]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        ends = torch.tensor([run.end for run in runs]).int()
        told = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "seq_lens": ends,
            "seq_lens_cpu_upper_bound": ends,
            "num_reqs": len(runs),
            "num_actual_tokens": len(positions),
            "max_query_len": max(lengths),
            "max_seq_len": int(ends.max()),
            "block_table_tensor": block_ids.int().expand(len(runs), -1).contiguous(),
            "slot_mapping": slots,
            "positions": positions,
            "is_prefilling": torch.ones(len(runs), dtype=torch.bool),
        }
        common = self._metadata(**{name: told[name] for name in told if name in self._fields})
        metadata = dict.fromkeys(self._layers, self._builder.build(0, common))
        with self._context(
            metadata,
            self._config,
            num_tokens=len(positions),
            slot_mapping=dict.fromkeys(self._layers, slots),
            skip_compiled=True,
        ):
            tokens = torch.tensor([token for run in runs for token in run.tokens])
            self._model(input_ids=tokens.int(), positions=positions)


def all_ready(ready: bool) -> bool:
    """Return whether all ranks of tensor parallelism are ready. Waits until each has called it."""
    from vllm.distributed.parallel_state import get_tp_group

    said = torch.tensor([int(ready)])
    torch.distributed.all_reduce(
        said, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return bool(said.item())
