"""Figures of the trust suites that are the same on every machine: what the README tells is compared
with a new run.

Everything else depends on the kernel, on time or on the order of threads: how many restarts a kill
leads to, how many sectors a power cut takes, how many frames of a flood are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

_ALL = ("cases", "seeds", "faults")
EXACT: Mapping[str, tuple[str, ...]] = {
    "simulation": _ALL,
    "power cuts": ("cases", "seeds"),
    "corruption: NVMe": _ALL,
    "corruption: Redis": _ALL,
    "corruption: objects": _ALL,
    "mutants": _ALL,
}
"""Suite -> its figures that depend on the code alone."""
MEND = "make trust && python -m kvtier.bench.readme"


def differences(measured, file):
    """Where a run is not what ``file`` tells, in words. At the end the command that mends it.
    ``measured``: suites as they stand in such a file. One that was skipped here is not compared."""
    told = {
        suite["suite"]: suite for suite in json.loads(file.read_text(encoding="utf-8"))["suites"]
    }
    wrong = [
        f"{new['suite']}: {new[figure]:,} {figure}, but {file} tells {old.get(figure, 'nothing')}"
        for new in measured
        if "skipped" not in new["detail"]
        for old in [told.get(new["suite"], {})]
        for figure in EXACT.get(new["suite"], ())
        if new[figure] != old.get(figure)
    ]
    return (
        [*wrong, f"The results are those of another commit. Measure again: {MEND}"] if wrong else []
    )
