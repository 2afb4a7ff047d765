"""The GPUs of this machine."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

from kvtier.autoconfig.breakeven import gpu_kind
from kvtier.autoconfig.facts import Gpus
from kvtier.core.fact import known, unknown
from kvtier.tiers.nvme.proc import ROOT, text_of


def probe_gpus(root: Path = ROOT) -> Gpus:
    """What NVIDIA's tool says, or else what the driver shows in /proc. AMD is recognised but not
    measured."""
    names, sizes = _nvidia_smi() if root == ROOT else ([], [])
    source = "nvidia-smi"
    if not names:
        source = "/proc/driver/nvidia"
        files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
        models = (re.search(r"Model:(.*)", text_of(file)) for file in files)
        names = [model[1].strip() for model in models if model]
    if names:
        kind = gpu_kind(names[0])
        size = known(min(sizes), source) if sizes else unknown("nvidia-smi gave no sizes")
        if size.value is None and kind:
            size = known(kind.memory, f"usual for {names[0]}")
        free = "NVIDIA's driver pins pages itself, not charged to RLIMIT_MEMLOCK (its os-mlock.c)"
        return Gpus(known(len(names), source), known(names[0], source), size, known(False, free))
    if (root / "dev/kfd").exists():
        return Gpus(*[unknown("an AMD GPU (/dev/kfd), not looked at")] * 4)
    none = "no nvidia-smi, /proc/driver/nvidia or /dev/kfd"
    return Gpus(known(0, none), *[unknown(none)] * 3)


def _nvidia_smi() -> tuple[list[str], list[int]]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        out = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        rows = [line.rsplit(",", 1) for line in out.splitlines() if "," in line]
        return [row[0].strip() for row in rows], [int(float(row[1])) << 20 for row in rows]
    return [], []
