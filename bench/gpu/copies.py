"""Saves and loads compared with the device's own limit (one plain copy between device memory and
page-locked memory), and the time that it takes to queue them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kvtier.bench.micro.copy import CHUNK_TOKENS, Bench, Geometry, Work, measure
from kvtier.bench.report import Row, against, median_row, print_rows
from kvtier.core.pool import Pool
from kvtier.gpu import Copy, Pinning, slot_tensor
from kvtier.gpu.blocks import nothing
from kvtier.gpu.staged import Cuts
from kvtier.testing import ManualLane


class DeviceWork(NamedTuple):
    kernels: int | None
    copies: int | None


def device_work(work: Callable[[], object], device: torch.device) -> DeviceWork:
    """Kernels and copies that the device ran for ``work``, which waits for them. A CPU has none."""
    if device.type != "cuda":
        work()
        return DeviceWork(0, 0)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        torch.cuda.synchronize(device)
    return count(
        [event.name for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    )


def count(names: list[str]) -> DeviceWork:
    """From the names that CUPTI gives. Those of copies begin like ``Memcpy HtoD (...)``."""
    if not names:
        return DeviceWork(None, None)
    copies = sum(name.startswith("Memcpy") for name in names)
    others = sum(
        name.startswith(("Memset", "Stream Wait", "Event", "Context Sync")) for name in names
    )
    return DeviceWork(len(names) - copies - others, copies)


SHAPES = {"7B": (28, 2048), "8B": (32, 4096), "671B": (61, 1152), "70B on 4 ranks": (80, 1024)}
"""Layers, and bf16 bytes of one token in one layer of one rank: 4 and 8 KV heads of 128 (keys and
values), a latent of 576, and 2 KV heads of 128 (keys and values)."""
BLOCK_TOKENS = 16
STEP_TOKENS = 8192
"""One step of a long prefill in vLLM. A call saves the chunks of as many tokens."""
GOAL, MOST_LAUNCHES, MOST_HOST_MS = 0.9, 64, 2.0


def geometry(name: str, block_tokens: int) -> Geometry:
    layers, token_bytes = SHAPES[name]
    label = f"{name} ({layers} layers x {token_bytes} B); blocks of {block_tokens}"
    return Geometry(label, layers, token_bytes, block_tokens)


class Paged(Bench):
    """Blocks of ``tokens`` on ``device``, and as many page-locked slots."""

    def __init__(self, shape: Geometry, tokens: int, device: torch.device) -> None:
        if device.type == "cuda":
            # what torch keeps of the last shape would not count as free for staging memory
            torch.cuda.empty_cache()
        blocks = max(2, -(-tokens // CHUNK_TOKENS)) * shape.blocks_per_chunk
        sizes = (shape.layers, blocks, shape.row_bytes)
        self.device = device
        self.pinning: Pinning | None = None
        super().__init__(shape, torch.empty(sizes, dtype=torch.uint8, device=device))

    def cuts(self) -> Cuts:
        if self.device.type != "cuda":
            return nothing
        self.pinning = locked(self.pool, self.device)
        return self.pinning.cuts

    def save(self) -> None:
        for copy in [
            self.copier.save(self.jobs[at : at + self.a_step])
            for at in range(0, self.chunks, self.a_step)
        ]:
            copy.wait()

    def load(self) -> None:
        self.copier.load(self.jobs).wait()

    def save_step(self, index: int) -> Copy:
        start = index * self.a_step % self.chunks
        return self.copier.save(self.jobs[start : start + self.a_step])

    @property
    def a_step(self) -> int:
        return STEP_TOKENS // CHUNK_TOKENS

    def close(self) -> None:
        self.jobs.clear()
        del self.blocks, self.copier
        if self.pinning is not None:
            self.pinning.end(self.pool.buffer)
        self.pool.close()


def locked(pool: Pool, device: torch.device) -> Pinning:
    lane = ManualLane()
    pinning = Pinning(device, lane=lane, rest=lambda _: None)
    pinning.begin(pool.buffer, pool.slot_bytes)
    lane.run()
    if any(pinning.cuts(slot_tensor(pool.view(slot))) is None for slot in range(pool.slots)):
        raise SystemExit("the driver refuses to page-lock the benchmark's pool: give --tokens less")
    return pinning


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limits(paged: Paged) -> tuple[Work, Work]:
    """The same number of bytes in one copy from device memory to torch's own page-locked memory,
    and back."""
    on_device = paged.blocks.view(-1)
    on_host = torch.empty(paged.bytes, dtype=torch.uint8, pin_memory=paged.device.type == "cuda")

    def moving(target: torch.Tensor, source: torch.Tensor) -> Work:
        def move() -> None:
            target.copy_(source, non_blocking=True)
            finish(paged.device)

        return move

    return moving(on_host, on_device), moving(on_device, on_host)


def measure_copies(
    names: Sequence[str], tokens: int, rounds: int, device: torch.device
) -> list[Row]:
    """GB/s of saves and loads of every shape. Ratio and goal are to the limit of the
    same rounds. Then what the device does for a load of all chunks, and how long the host needs to
    queue it."""
    rows: list[Row] = []
    for name in names:
        found = measure_shape(geometry(name, BLOCK_TOKENS), tokens, rounds, device)
        print_rows(found)
        rows += found
    return rows


def measure_shape(shape: Geometry, tokens: int, rounds: int, device: torch.device) -> list[Row]:
    paged = Paged(shape, tokens, device)
    paged.check()
    to_host, to_device = limits(paged)
    works = {"to host": to_host, "save": paged.save, "to device": to_device, "load": paged.load}
    out, save, back, load = measure(paged, works, rounds, time.perf_counter).values()
    found = [
        against(f"{shape.name}: save", save, out, GOAL),
        against(f"{shape.name}: load", load, back, GOAL),
        *queueing(paged, rounds),
    ]
    paged.close()
    return found


def queueing(paged: Paged, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for way, begin in (("load", paged.copier.load), ("save", paged.copier.save)):
        label = f"{paged.geometry.name}: {way} of {paged.chunks * CHUNK_TOKENS} tokens"
        work = device_work(lambda begin=begin: begin(paged.jobs).wait(), paged.device)  # type: ignore[misc]
        milliseconds = list[float]()
        for _ in range(max(rounds, 3)):
            finish(paged.device)
            begun = time.perf_counter()
            copy = begin(paged.jobs)
            milliseconds.append(1000 * (time.perf_counter() - begun))
            copy.wait()
        rows += [
            Row(f"{label}, kernels launched", work.kernels, "launches", limit=MOST_LAUNCHES),
            Row(f"{label}, DMAs", work.copies, "DMAs"),
            median_row(f"{label}, host time", milliseconds, "ms", MOST_HOST_MS),
        ]
    return rows


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
        del steps
        label = (
            f"{shape.name}: a step of {STEP_TOKENS} tokens longer with saving, {products} "
            f"products of {width}"
        )
        rows.append(median_row(label, slower, "%", GOAL_PERCENT))
        print_rows(rows[-1:])
    return rows
