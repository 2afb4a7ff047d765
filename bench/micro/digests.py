"""The time that a start takes to name weights by all their bytes: a first start, and a second.

``python -m kvtier.bench.micro.digests --gib 1``. A made checkpoint of several files lies in the
page cache, as when an engine has just loaded it. Each round reads it once with as many threads (the
limit), makes its digest, and makes it again as a second start does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.bench.report import Row, print_rows, spread, write_results
from kvtier.connectors.vllm.naming.digests import FileDigests, content_files

_FILES, _BLOCK = 8, 1 << 24


def _make(place: Path, gib: float) -> None:
    blocks = max(1, int(gib * (1 << 30)) // _FILES // _BLOCK)
    for number in range(_FILES):
        with (place / f"model-{number}.safetensors").open("wb") as file:
            block = os.urandom(_BLOCK)
            for _ in range(blocks):
                file.write(block)


def _read(file: Path) -> None:
    buffer = bytearray(1 << 20)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _measure(place: Path, rounds: int) -> list[Row]:
    model = place / "model"
    size = sum(file.stat().st_size for file in model.iterdir())
    times: dict[str, list[float]] = {"read once": [], "first start": [], "second start": []}
    for number in range(rounds):
        kept = place / f"kept-{number}"
        begun = time.perf_counter()
        with ThreadPoolExecutor(_FILES) as threads:
            list(threads.map(_read, model.iterdir()))
        times["read once"].append(time.perf_counter() - begun)
        for name in ("first start", "second start"):
            made = FileDigests(kept, lambda: time.time() + 3600)
            begun = time.perf_counter()
            made.begin(content_files(model), model).result()
            times[name].append(time.perf_counter() - begun)
    told = f"{size / (1 << 30):.3g} GiB in {_FILES} files"
    limits = {"first start": "read once"}
    rows = []
    for name, values in times.items():
        middle, low, high = spread(values)
        limit = spread(times[limits[name]])[0] if name in limits else None
        ratio = round(middle / limit, 2) if limit else None
        rows.append(Row(f"{told}: {name}", middle, "s", limit, ratio=ratio, min=low, max=high))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights (default: 1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=Path("build/digests"))
    parser.add_argument("--out", default="bench/results/digests.json")
    args = parser.parse_args(argv)
    (args.path / "model").mkdir(parents=True)
    try:
        _make(args.path / "model", args.gib)
        rows = _measure(args.path, args.rounds)
    finally:
        shutil.rmtree(args.path)
    print_rows(rows)
    write_results(args.out, "digests", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
