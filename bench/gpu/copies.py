"""Saves and loads beside the device's own limit: one plain copy between device memory and page-locked memory."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from kvtier.bench.micro.copy import Geometry, Work, against, measure, show
from kvtier.bench.report import Row
from kvtier.core.pool import Pool
from kvtier.gpu import Copy, PagedBlocks, Pinning, regions_of, slot_tensor
from kvtier.gpu.blocks import nothing
from kvtier.testing import ManualLane

SHAPES = {"1.5B": (28, 1024), "7B": (28, 2048), "72B": (80, 4096)}
"""Layers, and bytes of one token in one layer: 2, 4 and 8 KV heads of 128, keys and values, bf16, one rank."""
BLOCK_TOKENS = (16, 32, 64)
STEP_TOKENS = 8192
"""What vLLM computes in one step of a long prefill: a call saves the chunks of so many tokens."""
GOAL = 0.9


def geometry(name: str, block_tokens: int, ranks: int = 1) -> Geometry:
    """One rank's part of a model's KV."""
    layers, token_bytes = SHAPES[name]
    token_bytes //= ranks
    part = f"1 of {ranks} ranks, " if ranks > 1 else ""
    label = f"{name} ({part}{layers} layers x {token_bytes} B); blocks of {block_tokens}"
    return Geometry(label, layers, token_bytes, block_tokens)


class Paged:
    """An engine's blocks on ``device``, ``chunks`` chunks of them in random order, and as many page-locked slots.

    Blocks are one allocation ``[layer, block, row]``, as vLLM's are.
    """

    def __init__(self, shape: Geometry, megabytes: int, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.chunks = max(2, megabytes * 2**20 // shape.chunk_bytes)
        self.bytes = self.chunks * shape.chunk_bytes
        blocks = self.chunks * shape.blocks_per_chunk
        self.kv = torch.zeros(shape.layers, blocks, shape.row_bytes, dtype=torch.uint8, device=device)
        self.kv.random_(0, 256)
        order = list(range(blocks))
        random.Random(1).shuffle(order)
        self.pool = Pool(self.chunks, -(-shape.chunk_bytes // 4096) * 4096)
        self.pool.populate(0, self.chunks)
        self.pinning = locked(self.pool, device) if device.type == "cuda" else None
        step = shape.blocks_per_chunk
        self.jobs = [
            (slot_tensor(self.pool.view(slot)[: shape.chunk_bytes]), 0, order[slot * step : (slot + 1) * step])
            for slot in range(self.chunks)
        ]
        regions = regions_of({f"layer.{index}": rows for index, rows in enumerate(self.kv)}, blocks)
        pinned = nothing if self.pinning is None else self.pinning.covers
        self.copier = PagedBlocks(regions, step, pinned=pinned)

    def save(self) -> None:
        """All chunks, a step's worth a call."""
        for copy in [self.copier.save(self.jobs[at : at + self.a_step]) for at in range(0, self.chunks, self.a_step)]:
            copy.wait()

    def load(self) -> None:
        for copy in [self.copier.load(self.jobs[at : at + self.a_step]) for at in range(0, self.chunks, self.a_step)]:
            copy.wait()

    def save_step(self, index: int) -> Copy:
        """Begin to save what one step computes."""
        start = index * self.a_step % self.chunks
        return self.copier.save(self.jobs[start : start + self.a_step])

    @property
    def a_step(self) -> int:
        """Chunks of one step."""
        return STEP_TOKENS // 256

    def check(self) -> None:
        """The numbers are of copies that are right."""
        before = self.kv.clone()
        self.save()
        self.kv.zero_()
        self.load()
        if not torch.equal(before, self.kv):
            raise SystemExit(f"{self.shape.name}: what was loaded is not what was saved")

    def close(self) -> None:
        self.jobs.clear()
        if self.pinning is not None:
            self.pinning.end(self.pool.buffer)
        self.pool.close()


def locked(pool: Pool, device: torch.device) -> Pinning:
    """All of a pool page-locked, here and now."""
    lane = ManualLane()
    pinning = Pinning(device, lane=lane)
    pinning.begin(pool.buffer, pool.slot_bytes)
    lane.run()
    if not pinning.covers(slot_tensor(pool.buffer)):
        raise SystemExit("the driver refuses to page-lock the benchmark's pool: give --megabytes less")
    return pinning


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limits(paged: Paged) -> tuple[Work, Work]:
    """As many bytes in one copy from device memory to torch's own page-locked memory, and back."""
    on_device = paged.kv.view(-1)
    on_host = torch.empty(paged.bytes, dtype=torch.uint8, pin_memory=paged.device.type == "cuda")

    def moving(target: torch.Tensor, source: torch.Tensor) -> Work:
        def move() -> None:
            target.copy_(source, non_blocking=True)
            finish(paged.device)

        return move

    return moving(on_host, on_device), moving(on_device, on_host)


def measure_copies(names: Sequence[str], megabytes: int, rounds: int, device: torch.device) -> list[Row]:
    """GB/s of saves and loads of every shape and block size; ratio and goal are to the limit of the same rounds."""
    rows: list[Row] = []
    for name in names:
        for block_tokens in BLOCK_TOKENS:
            paged = Paged(geometry(name, block_tokens), megabytes, device)
            paged.check()
            to_host, to_device = limits(paged)
            works = {"to host": to_host, "save": paged.save, "to device": to_device, "load": paged.load}
            out, save, back, load = measure(paged, works, rounds, time.perf_counter).values()
            found = [
                against(f"{paged.shape.name}: save", save, out, GOAL),
                against(f"{paged.shape.name}: load", load, back, GOAL),
            ]
            paged.close()
            show(found)
            rows += found
    return rows
