"""A scenario of the tests on CPUs, by an engine on a CUDA device: ``python -m
tests.gpu.cuda_scenarios MODULE NAME OUT MODEL``. Beside what the scenario tells, ``OUT`` has what
copied the KV, which attention computed, and how many CUDA graphs were replayed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvtier.gpu.staged import StagedCopier


def copiers() -> list[dict[str, Any]]:
    """From now on it gets an entry for each group's copier: its kernels, and its chunks so far."""
    found: list[dict[str, Any]] = []
    make, load = StagedCopier.__init__, StagedCopier.load

    def made(self: StagedCopier, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        found.append({"rows": type(self.rows).__name__, "loaded": 0})
        self.noted = found[-1]  # type: ignore[attr-defined]

    def loaded(self: StagedCopier, jobs: Any, ids: Any) -> Any:
        self.noted["loaded"] += len(jobs)  # type: ignore[attr-defined]
        return load(self, jobs, ids)

    StagedCopier.__init__ = made  # type: ignore[method-assign]
    StagedCopier.load = loaded  # type: ignore[method-assign]
    return found


def backends() -> set[str]:
    """The names of the attention backends of all layers that are made from now on."""
    from vllm.model_executor.layers.attention import Attention

    found, make = set[str](), Attention.__init__

    def made(self: Any, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        found.add(self.attn_backend.get_name())

    Attention.__init__ = made
    return found


def replays() -> list[int]:
    """Its one entry counts the graphs that are replayed from now on."""
    count, replay = [0], torch.cuda.CUDAGraph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        replay(self)

    torch.cuda.CUDAGraph.replay = counted
    return count


def main() -> None:
    module, name, out, model = sys.argv[1:5]
    used, replayed, computed = copiers(), replays(), backends()
    told = importlib.import_module(f"tests.integration.{module}").SCENARIOS[name](model)
    seen = {"copiers": used, "replays": replayed[0], "backends": sorted(computed)}
    Path(out).write_text(json.dumps({"told": told} | seen))


if __name__ == "__main__":
    main()
