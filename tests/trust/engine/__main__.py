"""``python -m tests.trust.engine [--steps N] [--only TEXT] [--every N --first N] [--also TEXT]``:
vLLM's schedulers, for both its runners, and both halves of the connector.

Each cell (:mod:`tests.trust.engine.cells`) runs random requests for so many steps: prompts that
share beginnings, answers, aborts, resets, preemption. Exit status 1 on a violation; the line names
cell and seed, which replay it.

``--family NAME``, ``--sweep``, ``--bytes``: real model classes of vLLM instead, see
:mod:`tests.trust.engine.families`. ``--within``: what hits within blocks bring, see
:mod:`tests.trust.engine.within`.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import vllm

from kvtier.bench.model import make_model
from tests.trust.engine.cells import CELLS, OVER_HOSTS
from tests.trust.engine.driven import Told, quiet, run


def _all(cells, model, steps, seed, jobs):
    """Every cell, in so many processes."""
    if jobs == 1:
        yield from (run(cell, model, steps, seed) for cell in cells)
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=fresh, initializer=quiet) as processes:
        runs = [processes.submit(run, cell, model, steps, seed) for cell in cells]
        yield from (each.result() for each in runs)


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000, help="steps a cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="one in so many of these cells")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--also", nargs="*", default=[], help="and all whose name contains one")
    parser.add_argument("--jobs", type=int, default=1, help="so many cells at once")
    parser.add_argument("--hosts", action="store_true", help="engines over two hosts instead")
    parser.add_argument("--family", help="engines of a model family instead, or of all")
    parser.add_argument("--sweep", action="store_true", help="ask all of vLLM's model classes")
    parser.add_argument("--bytes", action="store_true", help="what is kept of a family's prompt")
    parser.add_argument("--within", action="store_true", help="what hits within blocks bring")
    given, _ = parser.parse_known_args()
    if given.family or given.sweep or given.bytes or given.within:
        # in a process that has not imported vLLM yet
        name = "within" if given.within else "families"
        module = [sys.executable, "-m", f"tests.trust.engine.{name}"]
        return subprocess.run([*module, *sys.argv[1:]], check=False).returncode
    quiet()
    every = OVER_HOSTS if given.hosts else CELLS
    cells = [cell for cell in every if given.only in cell.name]
    cells = cells[given.first :: given.every]
    also = [cell for cell in CELLS if any(text in cell.name for text in given.also)]
    cells += [cell for cell in also if cell not in cells]
    with tempfile.TemporaryDirectory(prefix="kvtier-engine-") as folder:
        model = make_model(Path(folder) / "tiny", "tiny")
        told = list[Told]()
        for each in _all(cells, model, given.steps, given.seed, given.jobs):
            told.append(each)
            sys.stderr.write(f"{each}\n")
    violations = [text for each in told for text in each.violations]
    total = sum((each.counts for each in told), Counter())
    line = {
        **total,
        "vllm": vllm.__version__,
        "violations": violations,
        "cells": {each.cell: dict(each.counts) for each in told},
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
