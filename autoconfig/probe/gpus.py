"""The GPUs of this machine."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from kvtier.autoconfig.breakeven import gpu_kind
from kvtier.autoconfig.facts import Gpus
from kvtier.autoconfig.probe.unified import driver_names, shared_memory
from kvtier.core.fact import Fact, known, unknown
from kvtier.core.processes import chosen, environment, run
from kvtier.tiers.nvme.proc import ROOT


def probe_gpus(root: Path = ROOT) -> Gpus:
    """What NVIDIA's tool says, or else what the driver shows in /proc. AMD is recognised but not
    measured."""
    answer = _nvidia_smi() if root == ROOT else ""
    return read_gpus(answer, root)


def read_gpus(answer: str, root: Path) -> Gpus:
    """``answer``: nvidia-smi's lines with name and MiB. Empty where it gave none."""
    rows = [line.rsplit(",", 1) for line in answer.splitlines() if "," in line]
    names, sizes = [row[0].strip() for row in rows], [row[1].strip() for row in rows]
    source = "nvidia-smi"
    if not names:
        names, source = driver_names(root), "/proc/driver/nvidia"
    shared = _shared(names, sizes, root)
    if names:
        kind = gpu_kind(names[0])
        size = unknown("nvidia-smi gave no sizes")
        if sizes and all(map(str.isdecimal, sizes)):
            size = known(min(map(int, sizes)) << 20, source)
        elif kind:
            size = known(kind.memory, f"usual for {names[0]}")
        free = "NVIDIA's driver pins pages itself, not charged to RLIMIT_MEMLOCK (its os-mlock.c)"
        named = known(names[0], source)
        return Gpus(known(len(names), source), named, size, known(False, free), shared)
    if shared.value is not None:
        why = unknown(f"not looked at ({shared.source})")
        return Gpus(why, shared, why, why, shared)
    if (root / "dev/kfd").exists():
        return Gpus(*[unknown("an AMD GPU (/dev/kfd), not looked at")] * 4)
    none = "no nvidia-smi, /proc/driver/nvidia or /dev/kfd"
    return Gpus(known(0, none), *[unknown(none)] * 3)


def _shared(names: list[str], sizes: list[str], root: Path) -> Fact[str]:
    """A GPU without memory of its own: by its name, by what nvidia-smi cannot tell of it, or by
    what else the machine shows."""
    kinds = [kind for kind in map(gpu_kind, names) if kind is not None]
    if kinds and all(kind.shared for kind in kinds) and len(kinds) == len(names):
        return known(names[0], "its name")
    if sizes and any(map(str.isdecimal, sizes)):
        return unknown("the GPU has memory of its own")
    seen = shared_memory(root)
    if seen.value is None and not kinds and sizes and set(sizes) <= _NO_SIZES:
        return known(names[0], "nvidia-smi gives it no memory")
    return seen


_NO_SIZES = {"[N/A]", "[Not Supported]"}


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        env = chosen(environment(), "CUDA_*", "NVIDIA_*")
        return str(run(command, env, capture_output=True, text=True, timeout=5, check=True).stdout)
    return ""
