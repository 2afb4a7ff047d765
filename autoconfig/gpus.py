"""The GPUs of this machine."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvtier.autoconfig.breakeven import gpu_kind
from kvtier.autoconfig.facts import Gpus
from kvtier.core.fact import ROOT, Fact, known, unknown
from kvtier.core.processes import chosen, environment, run


def probe_gpus(root: Path = ROOT) -> Gpus:
    """Find GPUs by nvidia-smi, else by the driver's files in /proc. AMD's are not measured."""
    answer = _nvidia_smi() if root == ROOT else ""
    return read_gpus(answer, root)


def read_gpus(answer: str, root: Path) -> Gpus:
    """Read nvidia-smi's ``answer``: lines with name and MiB, empty if it gave none."""
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
    """Find a GPU without memory of its own: by its name, nvidia-smi's silence, or the machine."""
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


_MOST_FILES, _MOST_BYTES = 64, 16 << 10

_AMD_TARGETS = {110500: "AMD Strix Point", 110501: "AMD Strix Halo", 110502: "AMD Krackan Point"}
"""APUs by the KFD's number of the architecture (gfx1150 is 110500)."""
_AMD_DEVICES = {0x74A0: "AMD MI300A"}
"""APUs by PCI device, where another product has the same architecture."""


def shared_memory(root: Path = ROOT) -> Fact[str]:
    """Name the machine if its GPU has no memory of its own. No program is started."""
    names = driver_names(root)
    if any(kind is not None and not kind.shared for kind in map(gpu_kind, names)):
        return unknown("the GPU has memory of its own")
    if names and all(kind is not None for kind in map(gpu_kind, names)):
        return known(names[0], "/proc/driver/nvidia")
    looks = (_tegra(root), _amd(root), _spark(root))
    return next((seen for seen in looks if seen is not None), unknown("no sign of one memory"))


def driver_names(root: Path) -> list[str]:
    texts = map(_head, _some(root / "proc/driver/nvidia/gpus", "*/information"))
    return [model[1].strip() for text in texts if (model := re.search(r"Model:(.*)", text))]


def _tegra(root: Path) -> Fact[str] | None:
    """Find a Jetson. Containers hide the device tree, but not the kernel's name of the chip."""
    tree, chip = root / "proc/device-tree", root / "sys/devices/soc0"
    if "nvidia,tegra" in _head(tree / "compatible"):
        return known(_head(tree / "model") or "NVIDIA Tegra", "/proc/device-tree")
    if _head(chip / "family") == "Tegra":
        return known(_head(chip / "machine") or "NVIDIA Tegra", "/sys/devices/soc0")
    return None


def _amd(root: Path) -> Fact[str] | None:
    """Find an APU, unless a GPU with memory of its own is beside it."""
    found = set()
    for file in _some(root / "sys/class/kfd/kfd/topology/nodes", "*/properties"):
        values = {name: int(value) for name, value in _PROPERTY.findall(_head(file))}
        if target := values.get("gfx_target_version", 0):  # a CPU has 0
            by_device = _AMD_DEVICES.get(values.get("device_id", 0))
            found.add(by_device or _AMD_TARGETS.get(target))
    if len(found) != 1 or None in found:
        return None
    return known(str(found.pop()), "/sys/class/kfd")


_PROPERTY = re.compile(r"^(\w+) (\d{1,20})$", re.MULTILINE)


def _spark(root: Path) -> Fact[str] | None:
    product = _head(root / "sys/class/dmi/id/product_name")
    if re.search(r"DGX[_ ]Spark|\bGB10\b", product):
        return known(f"GB10 ({product})", "/sys/class/dmi")
    return None


def gpu_nodes(root: Path = ROOT) -> tuple[int, int]:
    """Return all and free bytes of GPU memory that the kernel counts as RAM. The driver names each
    GPU's NUMA node (``numa_status``). A node with CPUs is the host's."""
    nodes = set()
    for file in _some(root / "proc/driver/nvidia/gpus", "*/numa_status"):
        if node := re.search(r"^Node:\s+(\d{1,6})$", _head(file), re.MULTILINE):
            nodes.add(root / "sys/devices/system/node" / f"node{node[1]}")
    total = free = 0
    for place in nodes:
        if (place / "cpulist").is_file() and not _head(place / "cpulist"):
            text = _head(place / "meminfo")
            total += _kib(text, "MemTotal") << 10
            free += _kib(text, "MemFree") << 10
    return total, free


def _kib(meminfo: str, name: str) -> int:
    found = re.search(name + r":\s+(\d{1,15}) kB", meminfo)
    return int(found[1]) if found else 0


def _some(folder: Path, pattern: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from islice(sorted(folder.glob(pattern)), _MOST_FILES)


def _head(path: Path) -> str:
    """Read a small file, without the NUL that ends a device tree's. Empty if unreadable."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace").strip("\0\n ")
    return ""
