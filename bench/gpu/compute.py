"""By how much saving slows computing. The steps are matrix products, as many as a prefill of the
model takes, with and without the saves of what each step would have computed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvtier.bench.gpu.copies import BLOCK_TOKENS, STEP_TOKENS, Paged, finish, geometry
from kvtier.bench.report import Row, print_rows, spread
from kvtier.gpu import Copy

WEIGHTS = {"7B": 7.6e9, "8B": 8e9, "671B": 37e9 / 8, "70B on 4 ranks": 70e9 / 4}
"""Numbers that one rank multiplies by for each token. Eight ranks share the 671B model, each with
all of its KV."""
GOAL_PERCENT = 3.0
STEPS = 4
ENOUGH_S = 45.0
"""A shape that took so many seconds gets no further round after the third."""


class Steps:
    """An engine's steps: products of two squares on the device's current stream."""

    def __init__(self, paged: Paged, products: int, width: int) -> None:
        kind = torch.bfloat16 if paged.device.type == "cuda" else torch.float32
        self.paged, self.products = paged, products
        self._square = torch.randn(width, width, dtype=kind, device=paged.device)
        self._out = torch.empty_like(self._square)

    def run(self, saving: int) -> float:
        """Seconds until the last product is there. Each step begins ``saving`` saves of what a step
        computes, and after the last one, which ends the prompt, the engine waits until its blocks
        are read. What is still copied then is waited for, but not counted, because an engine goes
        on meanwhile."""
        copies: list[Copy] = []
        finish(self.paged.device)
        begun = time.perf_counter()
        for step in range(STEPS):
            for _ in range(self.products):
                torch.matmul(self._square, self._square, out=self._out)
            copies += [self.paged.save_step(step) for _ in range(saving)]
        self.paged.copier.settle()
        if self.paged.device.type == "cuda":
            torch.cuda.current_stream(self.paged.device).synchronize()
        seconds = time.perf_counter() - begun
        for copy in copies:
            copy.wait()
        return seconds


def measure_slowdown(
    names: Sequence[str], rounds: int, device: torch.device, width: int = 8192
) -> list[Row]:
    """The percentage by which a step of :data:`STEP_TOKENS` tokens takes longer when its KV is
    saved. Rounds alternate."""
    rows: list[Row] = []
    for name in names:
        shape, began = geometry(name, BLOCK_TOKENS), time.perf_counter()
        paged = Paged(shape, 2 * STEP_TOKENS, device)
        products = max(1, round(WEIGHTS[name] * STEP_TOKENS / width**3))
        steps = Steps(paged, products, width)
        steps.run(1)
        slower = []
        for index in range(rounds):
            order = (0, 1) if index % 2 else (1, 0)
            seconds = {saving: steps.run(saving) for saving in order}
            slower.append(100 * (seconds[1] / seconds[0] - 1))
            if len(slower) >= 3 and time.perf_counter() - began > ENOUGH_S:
                break
        paged.close()
        value, low, high = spread(slower)
        del steps
        label = (
            f"{shape.name}: a step of {STEP_TOKENS} tokens longer with saving, {products} "
            f"products of {width}"
        )
        rows.append(Row(label, value, "%", limit=GOAL_PERCENT, min=low, max=high))
        print_rows(rows[-1:])
    return rows
