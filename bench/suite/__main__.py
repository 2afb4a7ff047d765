"""``python -m kvtier.bench.suite RAW BASELINE``: a result of pytest-benchmark without samples, host
and paths."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvtier.bench.report import machine_facts


def baseline(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with each benchmark's statistics, and with the machine's facts instead of its
    description."""
    kept = {name: raw[name] for name in ("datetime", "version")}
    benchmarks = []
    for one in raw["benchmarks"]:
        stats = {name: value for name, value in one["stats"].items() if name != "data"}
        benchmarks.append(one | {"stats": stats})
    return kept | {"machine_info": machine_facts(), "commit_info": {}, "benchmarks": benchmarks}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.write_text(
        json.dumps(baseline(json.loads(source.read_text())), indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
