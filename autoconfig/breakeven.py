"""When does a tier pay? Pure arithmetic over bandwidth, prefill speed and KV bytes. Two questions,
two answers:

*One hit*: loading ``n`` tokens of KV takes ``latency + n * bytes / bandwidth``. Computing them
takes what :class:`kvtier.load_policy.prefill.PrefillTime` says. :func:`break_even` is the ``n``
from which loading wins.

*A whole service*: a tier below is only ever asked for what the tier above could not keep. Documents
that come round in turn under LRU hit nothing as soon as they are larger than the cache, so
offloading begins to matter at the working set that fills the engine's own KV memory (then RAM), and
disk at the one that fills RAM. A test compares that with LMI's published table for the
p4de.24xlarge.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvtier.load_policy.prefill import PrefillTime

GPU_MEMORY_PART = 0.9
GPU_OVERHEAD_BYTES = 2 << 30
"""Memory of activations, CUDA graphs and the runtime, for each GPU."""
_USABLE_PEAK_PART = 0.5
"""Part of a spec sheet's matrix peak that long prefills reach."""


class GpuKind(NamedTuple):
    """A GPU by its spec sheet: dense 16-bit operations a second, host link (pinned), memory."""

    flops: float
    link: float
    memory: int
    shared: bool = False
    """Whether the GPU has the host's memory, and none of its own."""


_SPEC_SHEETS = {
    "GB300": (2500, 150, 268),
    "B300": (2250, 50, 268),
    "GB200": (2500, 150, 185),
    "B200": (2250, 50, 180),
    "GH200": (989, 150, 95),
    "H200": (989, 50, 141),
    "H100": (989, 50, 80),
    "H100-NVL": (835, 50, 93),
    "H20": (148, 50, 95),
    "A100-40GB": (312, 22, 40),
    "A100-80GB": (312, 22, 80),
    "A30": (165, 22, 24),
    "A40": (150, 22, 45),
    "A10": (125, 22, 22),
    "A10G": (70, 12, 23),
    "L40S": (362, 22, 46),
    "L40": (181, 22, 45),
    "L4": (121, 12, 23),
    "V100-16GB": (112, 11, 16),
    "V100-32GB": (112, 11, 32),
    "T4": (65, 6, 15),
    "MI300X": (1307, 50, 192),
    "MI325X": (1307, 50, 256),
    "MI350X": (2300, 50, 288),
    "MI355X": (2500, 50, 288),
    "GB10": (125, 60, 119),
    "THOR": (258, 60, 122),
    "ORIN": (42, 40, 61),
    "STRIX-HALO": (59, 50, 124),
    "MI300A": (980, 200, 128),
}
"""Spec sheets' 10^12 operations a second, GB/s of the host link, GiB of memory."""
_SHARED = {"GB10", "THOR", "ORIN", "STRIX-HALO", "MI300A"}
"""GPUs with the host's memory. Their link has a quarter of its rate: a copy reads and writes."""
GPU_KINDS = {
    name: GpuKind(tera * 1e12, giga * 1e9, gib << 30, name in _SHARED)
    for name, (tera, giga, gib) in _SPEC_SHEETS.items()
}
"""Kinds of GPUs, of a family the smallest first: a product name without a size means that one."""
CPU_CORE_FLOPS = 0.4e12
"""Peak of one core with 16-bit matrix instructions. An EPYC with AVX-512 BF16 reached half."""


def gpu_kind(name: str) -> GpuKind | None:
    """Find the kind of a product name such as "NVIDIA A100-SXM4-80GB", or None."""
    words = set(name.upper().replace("-", " ").split())
    named = [kind for kind in GPU_KINDS if words.issuperset(kind.split("-"))]
    family = [kind for kind in GPU_KINDS if kind.split("-")[0] in words]
    best = max(named, key=len) if named else next(iter(family), None)
    return GPU_KINDS[best] if best is not None else None


def estimated_prefill(
    active_parameters: int, attention_flops: int, peak_flops: float
) -> PrefillTime:
    """Estimate prefill before a measurement: 2 operations a parameter and token at half of the
    peak. ``attention_flops``: of a prompt, for each square of its tokens."""
    usable = peak_flops * _USABLE_PEAK_PART
    return PrefillTime(2 * active_parameters / usable, 2 * attention_flops / usable)


def break_even(
    bytes_per_second: float,
    latency: float,
    bytes_per_token: int,
    prefill: PrefillTime,
    longest: int,
) -> int | None:
    """Return the fewest tokens (to ``longest``) whose hits beat computing; None if none do."""
    gain = prefill.per_token - bytes_per_token / bytes_per_second
    root = math.sqrt(gain * gain + 2 * prefill.per_depth * latency)
    if gain > 0:  # the stable form of the quadratic's positive root
        tokens = 2 * latency / (gain + root)
    elif prefill.per_depth > 0:
        tokens = (root - gain) / prefill.per_depth
    else:
        return None
    return max(1, math.ceil(tokens)) if tokens <= longest else None


def gpu_kv_bytes(gpus: int, bytes_each: int, weight_bytes: int) -> int:
    """Return the memory that GPUs with one copy of the weights leave for the engine's own KV."""
    usable = int(gpus * (bytes_each * GPU_MEMORY_PART - GPU_OVERHEAD_BYTES))
    return max(0, usable - weight_bytes)
