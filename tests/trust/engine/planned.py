"""Simulated engines of real models: vLLM's planner groups the layers of the model's own classes,
vLLM's allocator lays them out, and every byte of a block belongs to a position.

See :mod:`tests.trust.engine.simulated` for what is simulated of an engine, and
:mod:`tests.trust.engine.asked` for where the layers come from.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes

from kvtier.connectors.vllm import LOAD_EVERY_HIT
from tests.trust.engine import planning
from tests.trust.engine.memory import Array, Need, RankMemory
from tests.trust.engine.simulated import _V2_CONFIG, Engine

_V1_CONFIG = type("V1Config", (VllmConfig,), {"use_v2_model_runner": False})
_ODD = 0x9E3779B97F4A7C15


def spec_of(group):
    """A group's spec, or that of its first layer."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def need(spec, drafts=0):
    """What vLLM's model needs of a group, as :meth:`Need.parse` reads it. It is written here again,
    so that kvtier is not judged by its own reading. Beside drafts half of a ring's rows are for
    those of a step."""
    block = spec.block_size
    if isinstance(spec, SlidingWindowMLASpec):
        return f"{'replayed' if spec.bounded_replay else 'latent'} {spec.sliding_window}/{block}"
    if isinstance(spec, SlidingWindowSpec):
        return f"window {spec.sliding_window}/{block}"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"local {spec.attention_chunk_size}/{block}"
    if isinstance(spec, CircularBufferSpec):
        return f"ring {block // 2 if drafts else block}/{block}"
    if isinstance(spec, MambaSpec):
        return f"state 0/{block}"
    return f"full 0/{block}"


class Page:
    """One layer. Each position of a block has an equal part of the block's bytes, and the last one
    those that are left over. A state has all of them."""

    def __init__(self, memory, tensor, number, spec, blocks, mark):
        tokens = 1 if isinstance(spec, MambaSpec) else spec.block_size
        size = content_bytes(spec)
        begin, step = tensor.offset + number * tensor.layer_stride, tensor.block_stride
        wide = 8 if not (begin | step | size | size // tokens) % 8 else 1
        words = memory[begin:].view(np.uint64) if wide == 8 else memory[begin:]
        width, item = size // tokens // wide, words.itemsize
        view = np.lib.stride_tricks.as_strided
        self._places = view(words, (blocks, tokens, width), (step, width * item, item))
        rest = size // wide - tokens * width
        self._rest = view(words[tokens * width :], (blocks, rest), (step, item))
        self._last = tokens - 1
        self._shift = np.uint64(0 if wide == 8 else 56)
        self._type = words.dtype
        self._mark = np.uint64(mark * _ODD % (1 << 64))
        self._odd = np.arange(1, 2 * (width + rest), 2, dtype=np.uint64) * np.uint64(_ODD)

    def _bytes(self, states, begin, end):
        found: Array = (states ^ self._mark)[:, None] * self._odd[begin:end] >> self._shift
        return found.astype(self._type)

    def differs(self, blocks, places, states):
        width = self._places.shape[2]
        wrong: Array = (self._places[blocks, places] != self._bytes(states, 0, width)).any(axis=1)
        if self._rest.shape[1]:
            ends = places == self._last
            wrong[ends] |= (
                self._rest[blocks[ends]] != self._bytes(states[ends], width, len(self._odd))
            ).any(axis=1)
        return wrong

    def put(self, blocks, places, states, garbage):
        width, states = self._places.shape[2], states ^ garbage
        self._places[blocks, places] = self._bytes(states, 0, width)
        if self._rest.shape[1]:
            ends = places == self._last
            self._rest[blocks[ends]] = self._bytes(states[ends], width, len(self._odd))

    def has_state(self, block, state):
        one = np.array([state], np.uint64)
        return not self.differs(np.array([block]), np.array([0]), one)[0]

    def put_state(self, block, state, garbage):
        one = np.array([state], np.uint64)
        self.put(np.array([block]), np.array([0]), one, garbage)

    def move_state(self, source, target):
        self._places[target] = self._places[source]
        self._rest[target] = self._rest[source]

    copy = move_state

    def scribble(self, blocks):
        self._places[list(blocks)] = 0x0B
        self._rest[list(blocks)] = 0x0B


def content_bytes(spec):
    """Bytes of a block of one layer, without padding."""
    size: int = (
        spec.unpadded_page_size_bytes
        if isinstance(spec, AttentionSpec)
        else spec.state_content_size_bytes
    )
    return size


def bytes_per_block(asked):
    """Of all groups together, as they lie over one another."""
    plan = planning.of_groups(asked.config, asked.groups, 1 << 44)
    return int(plan.kv_cache_tensors[0].size // plan.num_blocks)


class PlannedEngine(Engine):
    """An engine of a real model's layers."""

    def __init__(self, cell, asked, folder, draw):
        self._asked = asked
        specs = [spec_of(group) for group in asked.groups]
        kept = [spec.block_size for spec in specs if spec.prefix_cacheable]
        self.block_tokens = max(math.lcm(*kept), 16)
        states = {spec.block_size for spec in specs if isinstance(spec, MambaSpec)}
        assert states <= {self.block_tokens}
        self.longest = min(32 * self.block_tokens, max(4096, 8 * self.block_tokens))
        cell = replace(cell, groups=tuple(need(spec, cell.drafts) for spec in specs))
        super().__init__(cell, Path(), folder, draw)

    def _configured(self, model, folder):
        """A copy of the model's configuration, for one engine."""
        config, cell = copy.copy(self._asked.config), self.cell
        for part in ("cache_config", "scheduler_config", "model_config", "compilation_config"):
            setattr(config, part, copy.copy(getattr(config, part)))
        config.compilation_config.static_forward_context = {}
        config.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
        chunk = self.block_tokens if cell.has_state else 2 * self.block_tokens
        config.kv_transfer_config.kv_connector_extra_config |= {
            "ram_bytes": 256 * bytes_per_block(self._asked),
            "chunk_tokens": chunk,
            LOAD_EVERY_HIT: True,
        }
        config.model_config.max_model_len = self.longest
        config.model_config.multimodal_config = None  # prompts are text
        config.scheduler_config.max_model_len = self.longest
        config.scheduler_config.max_num_batched_tokens = 6 * self.block_tokens
        config.scheduler_config.max_num_scheduled_tokens = None
        config.scheduler_config.async_scheduling = cell.async_scheduling
        config.__class__ = _V2_CONFIG if cell.v2 else _V1_CONFIG
        most = (
            -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) + 1
            for spec in map(spec_of, self._asked.groups)
        )
        self.cell = replace(cell, blocks=2 * sum(most) + 2)
        config.cache_config.num_gpu_blocks_override = None
        config.cache_config.prefix_match_unit = cell.match_unit
        return config

    def _cache(self, groups=None):
        memory = self.cell.blocks * bytes_per_block(self._asked)
        groups = copy.deepcopy(self._asked.groups)
        plan = planning.of_groups(self.config, groups, memory)
        assert plan.num_blocks == self.cell.blocks
        plan.kv_cache_layout = self.config.cache_config.kv_cache_layout
        return self._resolved_sizes(plan)

    def _scheduler_cache(self):
        return generate_scheduler_kv_cache_config([self._cache()])

    def _resolved_sizes(self, plan):
        """What vLLM's engine core settles when the groups are known."""
        cache = self.config.cache_config
        cache.num_gpu_blocks = plan.num_blocks
        cache.block_size = min(
            group.kv_cache_spec.block_size
            for group in plan.kv_cache_groups
            if group.kv_cache_spec.prefix_cacheable
        )
        sizes = resolve_kv_cache_block_sizes(plan, self.config)
        plan.hash_block_size = sizes[1]
        scheduler = generate_scheduler_kv_cache_config([plan])
        plan.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            scheduler, self.config, *sizes
        )
        self._sizes = plan.hash_block_size, plan.cache_hit_alignment_tokens
        return plan

    def _memory(self, rank, groups, share):
        plan = self._cache()
        backends = [
            self._backends(number, group) for number, group in enumerate(self._asked.groups)
        ]
        kernel = prepare_kernel_block_sizes(plan, backends)
        caches = allocate_kv_cache(plan, torch.device("cpu"), self._asked.layout, kernel)
        one = next(iter(caches.values())).untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(one).numpy()
        found, mark = [], rank * 1_000_003 + 1
        for group in plan.kv_cache_groups:
            pages = []
            for tensor in plan.kv_cache_tensors:
                for number, name in enumerate(tensor.layers):
                    if name in group.layer_names:
                        mark += 7919
                        spec = _layer_spec(group, name)
                        page = Page(memory, tensor, number, spec, plan.num_blocks, mark)
                        pages.append(page)
            wanted = need(spec_of(group), self.cell.drafts)
            found.append((Need.parse(wanted), pages))
        return RankMemory(found, caches, share)

    def _checkpoint(self, rank, work):
        """As vLLM's kernels do it that can leave the state at a block's end within a prompt."""
        for number, group in enumerate(self._asked.groups):
            spec = spec_of(group)
            if not getattr(spec, "num_prefill_checkpoint_blocks", 0):
                continue
            (offset,), (column,) = compute_mamba_prefill_checkpoints(
                [len(work.states)],
                [len(work.states) - work.begin],
                hash_block_size=self._sizes[0],
                mamba_block_size=spec.block_size,
                checkpoint_alignment=spec.prefill_checkpoint_alignment,
                drop_eagle_block=self.scheduler.use_eagle_block_drop,
                cache_hit_alignment_tokens=self._sizes[1],
            )
            if offset:
                state, block = work.states[work.begin + offset - 1], work.blocks[number][column]
                rank.memory.put_state(number, block, state, sound=not work.bad)

    def _backends(self, number, group):
        return [
            AttentionGroup(
                self._asked.layers[name].get_attn_backend(),
                [name],
                _layer_spec(group, name),
                number,
            )
            for name in group.layer_names
        ]


def _layer_spec(group, name):
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
