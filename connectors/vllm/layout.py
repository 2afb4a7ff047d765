"""Layout of chunks, from vLLM's KV cache configuration. Models not kept are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvtier.config.keys import ServerSection
from kvtier.connectors.vllm.groups import Geometry, Group, Kind, Uncached
from kvtier.connectors.vllm.identity import identity, start_word
from kvtier.connectors.vllm.metadata import Parts, RankLayout
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError, LayoutError

_WITHOUT = "Run this model without the kvtier connector"
_NOT_FULL = {
    "RSWASpec": "drops tokens from the middle of a prompt",
    "HiddenStateCacheSpec": "keeps hidden states and no KV",
    "SinkFullAttentionSpec": "keeps its sinks in blocks of their own",
}
"""Kinds that vLLM derives from full attention but that are not kept."""


class KeptGroups(NamedTuple):
    groups: tuple[Group, ...]
    layers: tuple[frozenset[str], ...]
    uncached: tuple[Uncached, ...] = ()

    @property
    def block_tokens(self) -> int:
        return math.lcm(*(group.block_tokens for group in self.groups))


class ContextRanks(NamedTuple):
    """Context parallelism. ``decode``: ranks that divide each block's tokens (DCP). ``prefill``:
    ranks that compute parts of one prompt (PCP), which all have all KV without DCP."""

    decode: int = 1
    prefill: int = 1

    @classmethod
    def of(cls, parallel: Any) -> ContextRanks:
        names = ("decode_context_parallel_size", "prefill_context_parallel_size")
        return cls(*(getattr(parallel, name, 1) for name in names))

    @property
    def copies(self) -> int:
        return self.prefill if self.decode == 1 else 1


UNSHARED = ContextRanks()


def place(parallel: Any) -> tuple[int, int]:
    """Return the name of this worker's layout: pipeline stage, and rank in it. As in vLLM's
    handshake, ranks whose KV is the same for PCP's sake have one name."""
    tensor, sharing = parallel.tensor_parallel_size, ContextRanks.of(parallel)
    stage, rank = divmod(parallel.rank, tensor * sharing.prefill)
    return stage, rank % (tensor * sharing.prefill // sharing.copies)


def places(parallel: Any) -> int:
    return int(parallel.world_size) // ContextRanks.of(parallel).copies


def divided(parallel: Any) -> dict[str, Any]:
    if ContextRanks.of(parallel).decode == 1:
        return {}
    return {"interleave": int(parallel.cp_kv_cache_interleave_size)}


def kept(
    kv_cache_config: Any, *, with_groups: bool, sharing: ContextRanks = UNSHARED
) -> KeptGroups:
    """Return the groups that are kept. Raises LayoutError with what is not. ``with_groups``:
    :func:`.versions.keeps_groups`."""
    if not with_groups and sharing != UNSHARED:
        raise LayoutError(
            f"decode_context_parallel_size={sharing.decode} and "
            f"prefill_context_parallel_size={sharing.prefill}: kvtier keeps context-parallel KV "
            "from vLLM 0.32 on; set both to 1"
        )
    every = kv_cache_config.kv_cache_groups
    numbers = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(every)))
    groups = tuple(
        _group(number, every[number].kv_cache_spec, sharing.decode) for number in numbers
    )
    groups = _with_tails(groups)
    _refuse_unproven(groups, sharing)
    if not groups:
        raise LayoutError(
            f"this model's KV cache has no group of which vLLM caches prefixes. {_WITHOUT}"
        )
    if all(group.kind is Kind.STATE for group in groups):
        raise LayoutError(
            "this model's KV cache has recurrent states and no attention beside them, by which the "
            f"store is asked how much of a prompt is there. {_WITHOUT}"
        )
    others = [group for group in groups if group.kind is not Kind.FULL]
    if not with_groups and (others or len(groups) > 1):
        kinds = ", ".join(sorted({group.kind.value for group in groups}))
        raise LayoutError(
            f"this model's KV cache has {len(groups)} group(s) ({kinds}), which kvtier keeps from "
            "vLLM 0.32 on. Older versions keep only full attention, and sliding windows beside it "
            "with --disable-hybrid-kv-cache-manager"
        )
    return KeptGroups(
        groups,
        tuple(frozenset(every[number].layer_names) for number in numbers),
        tuple(
            _uncached(group.kv_cache_spec)
            for number, group in enumerate(every)
            if number not in numbers
        ),
    )


def _uncached(spec: Any) -> Uncached:
    size, one = int(spec.block_size), specs_of(spec)[0]
    if getattr(one, "sliding_window", None):
        return Uncached(size, _reach(one))
    ring = 1 if type(one).__name__ == "CircularBufferSpec" else None
    return Uncached(size, blocks=getattr(one, "blocks_per_request", ring))


def _refuse_unproven(groups: Sequence[Group], sharing: ContextRanks) -> None:
    """Raise LayoutError for context parallelism beside states, which has not been tried."""
    unproven = {group.kind.value for group in groups} - {Kind.FULL.value, Kind.WINDOW.value}
    if unproven and sharing != UNSHARED:
        raise LayoutError(
            f"this model's KV cache has {', '.join(sorted(unproven))}, which kvtier does not keep "
            f"with decode_context_parallel_size={sharing.decode} and "
            f"prefill_context_parallel_size={sharing.prefill}. Set both to 1, or: {_WITHOUT}"
        )


def _with_tails(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Turn latent attention's windows, and those of shorter blocks, into tails where they are
    shorter than the longest block and beside full attention, by which the store is asked."""
    longest = math.lcm(*(group.block_tokens for group in groups))
    is_beside = any(group.kind is Kind.FULL for group in groups)

    def kind(group: Group) -> Kind:
        is_tail = is_beside and group.span <= longest
        if group.kind is Kind.TAIL:
            return Kind.TAIL if is_tail else Kind.WINDOW
        is_short = group.kind is Kind.WINDOW and group.block_tokens < longest
        return Kind.TAIL if is_tail and is_short else group.kind

    return tuple(replace(group, kind=kind(group)) for group in groups)


def specs_of(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


def _group(number: int, spec: Any, sharers: int) -> Group:
    """Return a cache group. ``sharers``: ranks that divide a block's tokens. Raises LayoutError for
    a kind that is not kept, and for layers of different kinds."""
    each = specs_of(spec)
    kinds = {_kind(one) for one in each}
    if len(kinds) != 1:
        found = ", ".join(sorted({type(one).__name__ for one in each}))
        raise LayoutError(
            f"layers of one cache group differ in what they keep ({found}). {_WITHOUT}"
        )
    kind, span = kinds.pop()
    tokens = int(spec.block_size)
    if sharers > 1 and spec.dcp_sharded:
        tokens *= sharers
    return Group(number, kind, tokens, span)


def _reach(spec: Any) -> int:
    return int(spec.sliding_window) + getattr(spec, "extra_retained_tokens", 0)


def _kind(spec: Any) -> tuple[Kind, int]:
    from vllm.v1 import kv_cache_interface as vllm

    name = type(spec).__name__
    if isinstance(spec, vllm.FullAttentionSpec):
        if name in _NOT_FULL:
            raise LayoutError(
                f"this model's KV cache is {name}, which {_NOT_FULL[name]}. {_WITHOUT}"
            )
        return Kind.FULL, 0
    windows = {
        vllm.SlidingWindowSpec: Kind.WINDOW,
        getattr(vllm, "SlidingWindowMLASpec", None): Kind.TAIL,  # or a window, see _with_tails
    }
    if type(spec) in windows:
        return windows[type(spec)], _reach(spec)
    if type(spec) is vllm.ChunkedLocalAttentionSpec:
        return Kind.LOCAL, int(spec.attention_chunk_size)
    if type(spec) is vllm.MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise LayoutError(
                f"this model's recurrent state is in mamba_cache_mode={spec.mamba_cache_mode!r}; "
                "kvtier keeps states in mode 'align', in which vLLM caches prefixes. Set "
                f"--mamba-cache-mode align, or: {_WITHOUT}"
            )
        return Kind.STATE, 0
    raise LayoutError(
        f"this model's KV cache is {name}; kvtier keeps full attention (MHA, GQA, MLA), sliding "
        f"windows, chunked local attention and recurrent states. {_WITHOUT}"
    )


def chunk_tokens(configured: int, found: KeptGroups, *, is_default: bool) -> int:
    """Return a chunk's tokens. A default that was not changed grows to whole blocks. For a model
    with a state it is one block, which is long there: vLLM has states at the ends of blocks."""
    block = found.block_tokens
    if is_default:
        has_state = any(group.kind is Kind.STATE for group in found.groups)
        return block if has_state else -(-configured // block) * block
    return configured


def chunk_layout(
    vllm_config: Any,
    kv_cache_config: Any,
    found: KeptGroups,
    ranks: Mapping[tuple[int, int], RankLayout],
    chunk_tokens: int,
) -> tuple[ChunkLayout, Geometry, Parts]:
    """Return the layout of chunks, their geometry, and where ranks' parts (by :func:`place`) lie.

    Ranks of one pipeline stage that have identical KV in every layer share one part, which the
    first of them writes: MLA's latent, but not beside a draft model with heads of its own."""
    parallel = vllm_config.parallel_config
    geometry = Geometry(found.groups, chunk_tokens, found.uncached)
    sharing = ContextRanks.of(parallel)
    replicated = replicas(vllm_config, kv_cache_config)
    sizes, owners = parts_of(geometry, ranks, replicated=replicated)
    owners = _of_all_ranks(owners, parallel.tensor_parallel_size, sharing.copies)
    named = identity(vllm_config, ranks) | {
        "block_tokens": found.block_tokens,
        "ranks": [
            [
                *place,
                rank.block_bytes[0] if geometry.is_simple else [*rank.block_bytes],
                rank.description,
                rank.model,
            ]
            for place, rank in sorted(ranks.items())
        ],
    }
    if sharing != UNSHARED:
        named["context"] = [*sharing]
    block_tokens = found.block_tokens
    if not geometry.is_simple:
        named["groups"] = [
            [group.kind.value, group.block_tokens, group.span] for group in found.groups
        ]
        block_tokens = chunk_tokens
    called = str(getattr(vllm_config.model_config, "served_model_name", None) or "")
    layout = ChunkLayout(fingerprint(named), chunk_tokens, block_tokens, sizes, called)
    return layout, geometry, owners


def parts_of(
    geometry: Geometry, ranks: Mapping[tuple[int, int], RankLayout], *, replicated: bool
) -> tuple[tuple[int, ...], Parts]:
    """Return the bytes of a block of each part of a slot, and where the parts of each rank lie.
    With several groups a slot is one part, as large as their largest piece."""
    placed = [_placed(geometry, place, ranks, replicated) for place in range(len(geometry.groups))]
    owners = tuple(zip(*(parts for parts, _ in placed), strict=True))
    if geometry.is_simple:
        return tuple(placed[0][1]), owners
    pieces = (
        geometry.blocks_per_piece(group) * sum(sizes)
        for group, (_, sizes) in zip(geometry.groups, placed, strict=True)
    )
    return (max(pieces),), owners


def _placed(
    geometry: Geometry, place: int, ranks: Mapping[tuple[int, int], RankLayout], replicated: bool
) -> tuple[list[tuple[int, bool]], list[int]]:
    """Return, by rank, a group's first byte and whether it writes there, and bytes a block."""
    group = geometry.groups[place]
    blocks = geometry.blocks_per_piece(group)
    is_shared = replicated and group.kind is not Kind.STATE
    sizes: list[int] = []
    owners: list[tuple[int, bool]] = []
    first_of_stage: dict[int, int] = {}
    for (stage, _), rank in sorted(ranks.items()):
        size, part = rank.block_bytes[place], len(sizes)
        if is_shared:
            part = first_of_stage.setdefault(stage, part)
        writes = part == len(sizes)
        if writes:
            sizes.append(size)
        elif sizes[part] != size:
            raise LayoutError(
                f"ranks of stage {stage} disagree: {sizes[part]} and {size} bytes a block"
            )
        owners.append((blocks * sum(sizes[:part]), writes))
    return owners, sizes


def _of_all_ranks(named: Parts, tensor: int, copies: int) -> Parts:
    """Return ``named`` with, in each stage, the parts of PCP's copies, which write nothing."""
    every = list[tuple[tuple[int, bool], ...]]()
    for first in range(0, len(named), tensor):
        stage = named[first : first + tensor]
        silent = [tuple((start, False) for start, _ in groups) for groups in stage]
        every += [*stage, *silent * (copies - 1)]
    return tuple(every)


def on_cpu(ranks: Mapping[tuple[int, int], RankLayout]) -> bool:
    return all(str(rank.description["device"]).startswith("cpu") for rank in ranks.values())


def few_slots(slots: int, chunk_tokens: int, step_tokens: int) -> str:
    """Return a warning if RAM has fewer slots than one step may finish chunks, else ""."""
    chunks = step_tokens // chunk_tokens
    if not 0 < slots < chunks:
        return ""
    return (
        f"RAM holds {slots} chunks of {chunk_tokens} tokens, and a step may compute "
        f"{step_tokens:,} tokens: of a prompt that is computed in one step the first {slots} "
        f"chunks are kept and {chunks - slots} are not; give ram.bytes room for {chunks} chunks, "
        f"or vLLM --max-num-batched-tokens {slots * chunk_tokens}"
    )


def refuse_recurrent(vllm_config: Any, *, with_groups: bool) -> None:
    """Raise LayoutError for a model whose recurrent state cannot be kept: without attention vLLM
    caches no prefixes, and beside it an old vLLM does not say which blocks hold states."""
    model = vllm_config.model_config
    if model.is_attention_free:
        why = "vLLM caches no prefixes of it"
    elif model.is_hybrid and not with_groups:
        why = "kvtier keeps it from vLLM 0.32 on"
    elif model.is_hybrid and not vllm_config.cache_config.enable_prefix_caching:
        why = "it is kept where vLLM caches prefixes (--enable-prefix-caching)"
    else:
        return
    raise LayoutError(
        f"{', '.join(model.architectures)} keeps a recurrent state (mamba, convolutions): {why}. "
        f"{_WITHOUT}"
    )


def of_namespace(layout: ChunkLayout, namespace: str) -> ChunkLayout:
    return narrowed(layout, {"namespace": namespace})


def start_only(layout: ChunkLayout, why: str) -> ChunkLayout:
    """Return a layout whose keys no other start of any engine can name."""
    return narrowed(layout, {"start": start_word(why)})


def narrowed(layout: ChunkLayout, by: Mapping[str, Any]) -> ChunkLayout:
    own = fingerprint({"of": layout.fingerprint.hex(), **by})
    return replace(layout, fingerprint=own)


def replicas(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether all tensor ranks have the same KV: MLA's, for vLLM before 0.32."""
    if ContextRanks.of(vllm_config.parallel_config).decode > 1:
        return False  # they divide it, and PCP's ranks are no tensor ranks
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is None:
        return bool(vllm_config.model_config.use_mla)
    return bool(replicas == vllm_config.parallel_config.tensor_parallel_size)


def why_no_prefixes(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why kvtier must keep and serve nothing in this engine, "" if it may. A user's wish to
    turn prefix caching off is passed over, because it is about vLLM's own cache: the platform and
    the model know why a part of a prompt must not be taken from anywhere. MODES.md has each place
    in vLLM's source that turns it off; a test fails when a vLLM has another one.

    Workers are asked too, once the model is loaded: an attention layer turns prefix caching off in
    its own process only."""
    return _of_model(vllm_config.model_config, kv_cache_config) or (
        "" if vllm_config.cache_config.enable_prefix_caching else _of_engine(vllm_config)
    )


def _of_model(model: Any, kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    specs = (one for group in groups for one in specs_of(group.kv_cache_spec))
    if any(getattr(spec, "non_causal", False) for spec in specs):
        return "this model's KV of a token depends on those behind it (a prefix LM)"
    if not model.is_prefix_caching_supported:
        names = ", ".join(model.architectures)
        return f"vLLM can compute no part of a prompt by itself for {names} as it is used here"
    return ""


def _of_engine(vllm_config: Any) -> str:
    """Return why this engine may reuse no prefix, or "": batch invariance, or the platform."""
    from vllm import envs
    from vllm.platforms import CpuArchEnum, current_platform

    if envs.VLLM_BATCH_INVARIANT:
        return "prefix caching is off and answers are to be equal to the bit (batch invariance)"
    if current_platform.is_out_of_tree():
        return "prefix caching is off, and this platform's plug-in may have its reasons"
    if not current_platform.is_cpu():
        return ""
    if vllm_config.model_config.use_mla:
        return "vLLM allows no prefix caching for MLA on this CPU"
    if current_platform.get_cpu_architecture() == CpuArchEnum.RISCV:
        return "vLLM allows no prefix caching on RISC-V"
    return ""


class HostsOf(NamedTuple):
    """Hosts of an engine. vLLM numbers ranks host by host, and each host has as many."""

    number: int
    ranks: int

    @classmethod
    def of(cls, parallel: Any) -> HostsOf:
        number = int(parallel.nnodes_within_dp)  # other ranks of data parallelism are other engines
        return cls(number, int(parallel.world_size) // number)

    def of_rank(self, rank: int) -> int:
        return rank // self.ranks


def refuse_hosts(parallel: Any, server: ServerSection, *, spans: bool) -> None:
    """Raise ConfigError without a server for each host, and for what one host alone can keep."""
    count, servers = HostsOf.of(parallel).number, server.addresses
    if count == 1:
        if len(servers) > 1:
            raise ConfigError(
                f"server_address names {len(servers)} servers ({server.address}), and this engine "
                "has one host: expected one address"
            )
        return
    where = f"nnodes={parallel.nnodes}: this engine's workers are on {count} hosts"
    if len(servers) != count or not servers[0].startswith("unix://"):
        raise ConfigError(
            f"{where}, expected a kvtier server on each of them. server_address names "
            f"{len(servers)} ({server.address or 'none'}): set it to {count} addresses in the "
            "order of --node-rank, first unix:///path/kvtier.sock, where each host's own server "
            "is, then tcp://host:port of the servers on the other hosts (deploy/multi-host)"
        )
    if local := [one for one in servers[1:] if one.startswith("unix://")]:
        raise ConfigError(
            f"server_address: {local[0]} is on this host, expected tcp://host:port of the server "
            "on another one. Only the first address is the socket on each worker's own host"
        )
    if ContextRanks.of(parallel) != UNSHARED:
        raise LayoutError(
            f"{where}, which kvtier does not keep with context parallelism. Set "
            "decode_context_parallel_size and prefill_context_parallel_size to 1"
        )
    if spans:
        raise ConfigError(f"{where}: spans=true is for engines on one host. Remove it")


def by_host(
    whole: ChunkLayout,
    geometry: Geometry,
    ranks: Mapping[tuple[int, int], RankLayout],
    hosts: HostsOf,
    *,
    replicated: bool,
) -> tuple[list[ChunkLayout], Parts]:
    """Return the layout of each host's chunks, with the parts of its own ranks alone, and where the
    parts of all ranks lie. ``whole``: the layout of one host that has all of them."""
    layouts, parts = list[ChunkLayout](), list[Any]()
    for host, own in enumerate(of_each(ranks, hosts)):
        sizes, owners = parts_of(geometry, own, replicated=replicated)
        named = narrowed(whole, {"host": host, "hosts": hosts.number})
        layouts.append(replace(named, rank_block_bytes=sizes))
        parts += owners
    return layouts, tuple(parts)


def of_each(
    ranks: Mapping[tuple[int, int], RankLayout], hosts: HostsOf
) -> Sequence[dict[tuple[int, int], RankLayout]]:
    found: list[dict[tuple[int, int], RankLayout]] = [{} for _ in range(hosts.number)]
    for number, (place, rank) in enumerate(sorted(ranks.items())):
        found[hosts.of_rank(number)][place] = rank
    return found
