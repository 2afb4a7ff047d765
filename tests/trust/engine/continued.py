"""A long run of the cells in parts: ``--continue FILE`` keeps what each has done so far, on each
vLLM, and a later run goes on from there.

The cells take turns, so that after a run that was ended early each has done about as many steps. A
part that showed a violation counts for nothing, and is the first that a later run takes. Steps that
other code took than there is now count for nothing either, and are told apart
(:mod:`tests.trust.engine.record`).
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import vllm

from tests.trust.engine.cells import Cell
from tests.trust.engine.driven import Told, quiet, run
from tests.trust.engine.record import Record, code_here

PART_STEPS = 2_000
"""The least that a part of a cell does, and what is lost when a run is killed."""


def go_on(
    file: Path, cells: Sequence[Cell], model: Path, steps: int, minutes: float, jobs: int
) -> dict[str, Any]:
    """Every cell up to ``steps``, ``jobs`` of them at a time, and no new part after ``minutes``.
    What all have done."""
    record = Record(file, vllm.__version__, code_here())
    until = time.monotonic() + 60 * minutes
    left = [cell for cell in cells if record.of(cell.name)["steps"] < steps]
    running: dict[Future[Told], Cell] = {}
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=fresh, initializer=quiet) as processes:
        while running or (left and time.monotonic() < until):
            left.sort(key=lambda cell: _turn(record.of(cell.name)), reverse=True)
            while left and len(running) < jobs and time.monotonic() < until:
                cell = left.pop()
                seed = record.of(cell.name)["seed"]
                running[processes.submit(run, cell, model, min(PART_STEPS, steps), seed)] = cell
            for part in wait(running, return_when=FIRST_COMPLETED).done:
                cell, told = running.pop(part), part.result()
                counts = told.counts
                record.add(told.cell, counts["steps"], counts["seeds"], told.violations)
                sys.stderr.write(f"{told}\n")
                if not told.violations and record.of(cell.name)["steps"] < steps:
                    left.append(cell)
    done = {cell.name: record.of(cell.name) for cell in cells}
    return {
        "vllm": vllm.__version__,
        "steps": sum(one["steps"] for one in done.values()),
        "steps of other code": sum(one["before"] for one in done.values()),
        "cells": len(done),
        "unfinished": sum(one["steps"] < steps for one in done.values()),
        "violations": [text for one in done.values() for text in one["violations"]],
    }


def _turn(one: dict[str, Any]) -> tuple[bool, int]:
    return not one["violations"], one["steps"]
