"""How long a process takes to import kvtier: the start of a bare Python compared with one that
imports, as medians of runs that alternate.

``python -m kvtier.bench.micro.import_time``. The limits are 50 ms more than bare for ``import
kvtier``, and 100 ms for a whole ``kvtier version``. Other rows say what a name of the public face
costs at its first use. An engine that has imported torch pays almost nothing of it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from kvtier.bench.report import Row, print_rows, spread, write_results

_BARE = ("-c", "pass")
_CASES: dict[str, tuple[tuple[str, ...], float | None]] = {
    "import kvtier": (("-c", "import kvtier"), 50.0),
    "import kvtier, keys and configuration": (
        ("-c", "from kvtier import ChunkLayout, Config"),
        None,
    ),
    "import kvtier, store": (("-c", "from kvtier import Store"), None),
}


def _milliseconds(arguments: tuple[str, ...]) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - begun) * 1e3


def _measure(runs: int) -> list[Row]:
    """Each round runs every case once, so that a slow second of the machine slows all of them."""
    version = ("-m", "kvtier", "version")
    starts: dict[tuple[str, ...], list[float]] = {
        _BARE: [],
        version: [],
        **{case: [] for case, _ in _CASES.values()},
    }
    for _ in range(runs + 1):  # the first round writes .pyc files and fills the page cache
        for case, times in starts.items():
            times.append(_milliseconds(case))
    bare = statistics.median(starts[_BARE][1:])
    rows = [_row("bare python", starts[_BARE][1:], None)]
    for name, (case, limit) in _CASES.items():
        rows.append(
            _row(name + ", more than bare", [value - bare for value in starts[case][1:]], limit)
        )
    return [*rows, _row("kvtier version, whole process", starts[version][1:], 100.0)]


def _row(name: str, values: list[float], limit: float | None) -> Row:
    middle, low, high = spread(values)
    return Row(name, middle, "ms", limit, min=low, max=high)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time what importing kvtier costs.")
    parser.add_argument("--runs", type=int, default=15, help="starts of each kind (default: 15)")
    parser.add_argument("--out", default="bench/results/import_time.json")
    args = parser.parse_args(argv)
    rows = _measure(args.runs)
    print_rows(rows)
    write_results(args.out, "import_time", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
