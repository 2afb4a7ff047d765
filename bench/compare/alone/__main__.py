"""The tiers alone, without an engine: ``python -m kvtier.bench.compare.alone``.

Every arm of :mod:`kvtier.bench.compare.alone.arms` runs in a process of its own, all on the same
kind of CPU tensors. Every round measures the machine's limits, then every arm once. Another arm
begins each time. A row is the median of the rounds with the lowest and the highest. Its ``ratio``
is the median of value / limit of the same round. An arm that cannot run has a row that says why.
The results have the form of bench/report.py, and there is a table.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvtier.bench.command import terminable
from kvtier.bench.compare import limits
from kvtier.bench.compare.alone.arm import (
    DURABLE,
    HIT,
    LOAD,
    LOAD_CPU,
    MATCH_HIT,
    MATCH_MISS,
    MISS,
    SAVE,
    SAVE_CPU,
    WRITE,
    Sizes,
)
from kvtier.bench.compare.alone.arms import ARMS, Arm, Asked, running
from kvtier.bench.flags import names_in
from kvtier.bench.report import Row, spread, write_results
from kvtier.core.errors import KVTierError

NAME = "compare_alone"
UNITS = {
    SAVE: "GB/s",
    WRITE: "GB/s",
    DURABLE: "GB/s",
    LOAD: "GB/s",
    SAVE_CPU: "s",
    LOAD_CPU: "s",
    HIT: "ms",
    MISS: "ms",
    MATCH_HIT: "ms",
    MATCH_MISS: "ms",
}
HOW = {
    SAVE: "an engine's blocks, in random order, into the cache: until the last of the calls has "
    "returned; one call for "
    "each step of 2,048 tokens",
    WRITE: "from the first of these calls until every chunk lies in the tier below RAM: kvtier "
    "says all are stored; "
    "LMCache has no put task left, in Redis both names of every chunk are there (acknowledged, all "
    "in its memory)",
    DURABLE: "the same, and then fdatasync of every file of the tier. By themselves both write "
    "with O_DIRECT and never "
    "sync: that outlives their process, and not, for certain, a power cut",
    LOAD: "from where they are kept into blocks; below RAM a prompt of which no chunk is in RAM "
    "any more; checked "
    "(kvtier: every chunk's source; LMCache: nothing is kept in RAM); kvtier's chunks are copied "
    "as they arrive",
    SAVE_CPU: "CPU seconds for each GiB saved and, below RAM, written: of the process with its "
    "threads, and of the "
    "Redis or kvtier server beside it; not what the kernel does for a disk outside of them",
    LOAD_CPU: "the same for each GiB loaded",
    HIT: "from 32,768 tokens, a list, to how many of them are held: all; median of many. LMCache's "
    "pins what it finds, "
    "as its vLLM connector asks it to",
    MISS: "the same for a prompt nobody has seen",
    MATCH_HIT: "the match of 128 keys alone, which an engine asks again while a request waits; "
    "keys are hashed once a "
    "prompt. The limit is what kvtier sets itself",
    MATCH_MISS: "the same for a prompt nobody has seen",
}


@dataclass(slots=True)
class Found:
    """The limits of every round, what was measured by arm, and why an arm has no result."""

    bounds: list[dict[str, float]] = field(default_factory=list)
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def of(self, arm: str) -> list[tuple[dict[str, float], dict[str, float]]]:
        """``(measured, limits)`` of every round."""
        pairs = zip(self.rounds, self.bounds, strict=True)
        return [
            (one[arm], bounds) for one, bounds in pairs if arm in one and arm not in self.reasons
        ]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    with terminable():
        return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Run all arms, write, print. 1 when one of kvtier's own could not run."""
    folder, sizes = args.output_dir, Sizes(chunks=args.chunks)
    folder.mkdir(parents=True, exist_ok=True)

    def bounds() -> dict[str, float]:
        return limits.measured(folder, sizes.chunk_bytes)

    found = measured(args.arms, sizes, args.rounds, folder / "alone", bounds)
    made = rows(args.arms, found)
    about = {
        arm.name: {"about": arm.about, "note": arm.note, "cannot_run": found.reasons.get(arm.name)}
        for arm in args.arms
    }
    workload = asdict(sizes) | {
        "rounds": args.rounds,
        "dtype": "bfloat16",
        "chunk_bytes": sizes.chunk_bytes,
    }
    write_results(
        args.output, NAME, made, workload=workload, how=HOW, limits=limits.HOW, arms=about
    )
    print_table(args.arms, made, found)
    print(f"Wrote {args.output}")
    return int(
        any(
            name in found.reasons
            for name, arm in ARMS.items()
            if name.startswith("kvtier") and not arm.cannot
        )
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvtier.bench.compare.alone", description="Tiers without an engine."
    )
    parser.add_argument(
        "--arms",
        type=names_in(ARMS),
        default=list(ARMS.values()),
        help=f"of {','.join(ARMS)} (default: all)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="times every arm is run, in turns (default: 5)"
    )
    parser.add_argument(
        "--chunks", type=int, default=64, help="chunks of 7 MiB that a round moves (default: 64)"
    )
    parser.add_argument("--output", type=Path, default=Path("build/compare/alone.json"))
    parser.add_argument(
        "--output-dir", type=Path, default=Path("build/compare"), help="on the disk to measure"
    )
    return parser.parse_args(argv)


def measured(
    arms: Iterable[Arm],
    sizes: Sizes,
    rounds: int,
    folder: Path,
    bounds: Callable[[], dict[str, float]],
) -> Found:
    """All arms, in turns. ``folder`` is emptied first, and removed in the end."""
    found = Found()
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        processes = dict[str, Asked]()
        for arm in arms:
            if arm.obstacle:
                found.reasons[arm.name] = arm.obstacle
                continue
            try:
                processes[arm.name] = ends.enter_context(running(arm, sizes, folder / arm.name))
            except (KVTierError, OSError) as error:
                _failed(found, arm.name, error)
                continue
            _asked(
                found, arm.name, processes[arm.name]
            )  # one warms up at a time: it needs the most memory then
        for number in range(rounds):
            _round(found, number, processes, bounds)
    return found


def _round(
    found: Found,
    number: int,
    processes: Mapping[str, Asked],
    bounds: Callable[[], dict[str, float]],
) -> None:
    print(f"round {number + 1}", file=sys.stderr, flush=True)
    found.bounds.append(bounds())
    found.rounds.append({})
    names = [name for name in processes if name not in found.reasons]
    first = number % max(1, len(names))
    for name in names[first:] + names[:first]:
        processes[name].ask()
        told = _asked(found, name, processes[name])
        if told:
            found.rounds[-1][name] = told


def _asked(found: Found, name: str, process: Asked) -> dict[str, float]:
    """Its answer. It is empty when the arm failed."""
    try:
        return process.answer()
    except KVTierError as error:
        _failed(found, name, error)
        return {}


def _failed(found: Found, name: str, error: Exception) -> None:
    found.reasons[name] = (str(error).splitlines() or [type(error).__name__])[0]
    print(f"  {name} cannot run: {found.reasons[name]}", file=sys.stderr, flush=True)


def rows(arms: Iterable[Arm], found: Found) -> list[Row]:
    """Every arm, in order, then the machine's limits. A value is None for what did not run."""
    made = []
    for arm in arms:
        seen = found.of(arm.name)
        if not seen:
            made.append(Row(f"{arm.name}: {LOAD}", None, UNITS[LOAD]))
        made += [_row(arm, metric, seen) for metric in UNITS if seen and metric in seen[0][0]]
    return made + limits.rows(found.bounds)


def _row(
    arm: Arm, metric: str, seen: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
) -> Row:
    middle, least, most = spread([one[metric] for one, _ in seen])
    limit, pairs = arm.limits.get(metric), list[tuple[float, float]]()
    if limit is not None:
        pairs = [(one[metric], bounds[limit]) for one, bounds in seen if limit in bounds]
    bound = statistics.median(bound for _, bound in pairs) if pairs else arm.asked.get(metric)
    ratio = statistics.median(value / bound for value, bound in pairs) if pairs else None
    return Row(f"{arm.name}: {metric}", middle, UNITS[metric], bound, ratio, least, most)


def print_table(arms: Iterable[Arm], made: Sequence[Row], found: Found) -> None:
    from rich.console import Console
    from rich.table import Table

    by_name = {row.name: row for row in made}
    table = Table(
        title="Tiers alone, without an engine (in brackets: of the machine's limit)",
        title_justify="left",
    )
    table.add_column("arm", no_wrap=True)
    for metric, unit in UNITS.items():
        table.add_column(f"{metric}\n{unit}", justify="right")
    table.add_column("note")
    for arm in arms:
        cells = [_cell(by_name.get(f"{arm.name}: {metric}")) for metric in UNITS]
        table.add_row(arm.name, *cells, found.reasons.get(arm.name) or arm.note)
    console = Console(width=max(220, Console().width))
    console.print(table)
    console.print(
        ", ".join(f"{row.name} {row.value:.1f} {row.unit}" for row in limits.rows(found.bounds))
    )


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return ""
    digits = {"GB/s": 2, "s": 2, "ms": 3}[row.unit]
    return f"{row.value:.{digits}f}" + ("" if row.ratio is None else f" ({row.ratio:.0%})")


if __name__ == "__main__":
    sys.exit(main())
