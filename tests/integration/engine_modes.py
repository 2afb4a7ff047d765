"""How the vLLM in .venv runs in tests: by which model runner, and whether the next step is planned
while one runs. GPUs run V2 with async scheduling by default, and so do the tests on engines; the
CPU platform alone would give V1 without (:mod:`tests.cpu_as_gpu`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "cpu_as_gpu"
TOLD = "CPU_AS_GPU_TOLD"
CACHE = "VLLM_CACHE_ROOT"


@dataclass(frozen=True)
class Mode:
    """``runner``: None where nothing is asked for and nothing asserted, on another vLLM."""

    name: str
    runner: str | None = None
    asynchronous: bool = False

    def environment(self, vllm=None):
        """For every process of an engine, before its Python starts. ``vllm``: the folder of another
        than Python's own, which has a cache of its own there: what one vLLM has learned about a
        model is stale to another, which learns it anew in a process that imports all of vLLM."""
        folders = [*([PLUGIN] if self.runner else []), *([vllm] if vllm else [])]
        switches = {"PYTHONPATH": ":".join(map(str, folders))} if folders else {}
        if vllm:
            switches[CACHE] = str(vllm / ".cache")
        if self.runner == "V2":
            switches |= {"CPU_AS_GPU_V2": "1", "TRITON_INTERPRET": "1"}
        if self.asynchronous:
            switches["CPU_AS_GPU_ASYNC"] = "1"
        return switches

    def check(self, told):
        """Every scheduler and every worker that told what it is (``CPU_AS_GPU_TOLD``) was of this
        mode."""
        if self.runner is None:
            return
        lines = [json.loads(line) for line in told.read_text().splitlines()]
        runners = [line["runner"] for line in lines if "runner" in line]
        schedulers: list[dict[str, Any]] = [line for line in lines if "scheduler" in line]
        assert runners and schedulers, f"nothing ran: {lines}"
        assert set(runners) == {self.runner}
        for one in schedulers:
            kind = "AsyncScheduler" if self.asynchronous else "Scheduler"
            assert (one["scheduler"], one["depth"]) == (kind, self.depth(one["stages"]))

    def depth(self, stages=1):
        """Batches in flight at the same time, in an engine of so many pipeline stages."""
        return stages + int(self.asynchronous)


V1 = Mode("V1", "V1")
V1_ASYNC = Mode("V1 async", "V1", asynchronous=True)
V2 = Mode("V2", "V2")
V2_ASYNC = Mode("V2 async", "V2", asynchronous=True)
OLDER = Mode("older vLLM")
"""Runs as its platform wants."""


def kept(environment):
    names = {"PYTHONPATH", CACHE, *V2_ASYNC.environment()}
    return {name: environment[name] for name in names if name in environment}
