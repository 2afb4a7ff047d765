"""Facts of a machine, a path, a model and an engine. Data only, which the probes fill in. A look
that fails is an unknown fact, and never an error.

Every field is a :class:`Fact`: a value with where it was read, or no value with the reason why it
is unknown. Sizes are bytes, speeds are bytes a second. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.core.fact import UNSEEN, Fact
from kvtier.tiers.nvme.disks import Disk
from kvtier.tiers.seam import TierFacts

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 1 << 62
"""Value of a limit that means "no limit" (RLIM_INFINITY)."""


@dataclass(frozen=True, slots=True)
class Memory:
    total: Fact[int] = UNSEEN
    available: Fact[int] = UNSEEN
    """Memory that the kernel could give without swapping (MemAvailable)."""
    cgroup_headroom: Fact[int] = UNSEEN
    """Tightest limit less use, over all cgroups up to the top. UNLIMITED without a limit.
    Reclaimable file cache does not count as use."""
    cgroup_limit: Fact[int] = UNSEEN
    """Tightest limit of all cgroups beyond which the kernel kills. UNLIMITED without one."""
    shm: Fact[int] = UNSEEN
    reserved: Fact[int] = UNSEEN
    """Free and unpromised huge pages of 2 MiB (vm.nr_hugepages), which are not in ``available``."""
    makes_huge: Fact[bool] = UNSEEN
    """Whether the kernel makes huge pages of ordinary shared memory when asked to."""
    memlock: Fact[int] = UNSEEN
    cpus: Fact[int] = UNSEEN
    pools: Fact[int] = UNSEEN
    """Memory of other engines' kvtier pools here: no longer available, but to be shared."""


@dataclass(frozen=True, slots=True)
class Gpus:
    count: Fact[int] = UNSEEN
    kind: Fact[str] = UNSEEN
    bytes_each: Fact[int] = UNSEEN
    pin_charged: Fact[bool] = UNSEEN
    """Whether the driver charges the host memory that it pins to RLIMIT_MEMLOCK."""
    shared: Fact[str] = UNSEEN
    """Name of a machine whose GPU has the host's memory and none of its own."""


@dataclass(frozen=True, slots=True)
class Model:
    name: Fact[str] = UNSEEN
    kv_bytes_per_token: Fact[int] = UNSEEN
    """KV bytes of a token in all layers (windowed too), one copy before tensor parallelism."""
    kv_bytes_global: Fact[int] = UNSEEN
    """KV bytes of a token in layers that see the whole context (sliding-window models)."""
    kv_heads: Fact[int] = UNSEEN
    """Number of KV heads, 1 for MLA, because its latent cannot be split."""
    weight_bytes: Fact[int] = UNSEEN
    active_parameters: Fact[int] = UNSEEN
    """Parameters that one token passes through (all except the idle experts)."""
    attention_flops: Fact[int] = UNSEEN
    """Floating-point operations of causal attention over n tokens, divided by n * n."""
    max_tokens: Fact[int] = UNSEEN


@dataclass(frozen=True, slots=True)
class Serving:
    """Configuration of an engine, and the other engines on this host."""

    tensor_parallel: Fact[int] = UNSEEN
    pipeline_parallel: Fact[int] = UNSEEN
    data_parallel: Fact[int] = UNSEEN
    """Number of replicas on *this* host."""
    hosts: Fact[int] = UNSEEN
    """Number of hosts of a replica's tensor and pipeline ranks, as many on each."""
    engines: Fact[int] = UNSEEN
    """Number of engines like this one that share the host."""
    block_tokens: Fact[int] = UNSEEN
    max_model_len: Fact[int] = UNSEEN
    kv_cache_tokens: Fact[int] = UNSEEN
    """Tokens in one replica's own KV cache: in GPU memory, or in host RAM on the CPU backend."""
    started: Fact[bool] = UNSEEN
    """Whether the weights are loaded: on the CPU backend available RAM is then without them."""


class CountedRequests(Protocol):
    requests: int
    asked: int
    unique: int


class SizingTrace(Protocol):
    """Requests that a plan sizes tiers for: :class:`kvtier.bench.traces.curve.Recorded`."""

    @property
    def name(self) -> str: ...
    @property
    def curve(self) -> CountedRequests: ...
    @property
    def block_tokens(self) -> int: ...

    def enough(self, kv_bytes: int, limit: int, above: int = 0) -> int: ...
    def knee(self, kv_bytes: int, above: int = 0) -> int: ...
    def largest(self, kv_bytes: int) -> int: ...
    def percent(self, kv_bytes: int, size: int) -> str: ...
    def why(self, kv_bytes: int, size: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Facts:
    memory: Memory = field(default_factory=Memory)
    gpus: Gpus = field(default_factory=Gpus)
    disks: tuple[Disk, ...] = ()
    model: Model = field(default_factory=Model)
    engine: Serving = field(default_factory=Serving)
    copy_speed: Fact[float] = UNSEEN
    """Pace of one thread from host memory to host memory."""
    trace: SizingTrace | None = None
    """Requests that the tiers are sized for. Without any they take what is free."""
    tiers: Mapping[str, TierFacts] = field(default_factory=dict)
