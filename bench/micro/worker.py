"""A worker's own time to queue copies on a GPU, measured without one.

    python -m kvtier.bench.micro.worker [--rounds N]

A worker half queues a save and a load of 32,768 tokens for the shapes of :mod:`kvtier.bench.gpu`,
in one step each. Events, kernels and DMAs do nothing and are counted: on a device each of them
costs the host some microseconds more. Tensors are as large as on a GPU, and none of their pages is
touched. *A step without a job* is all hooks of a step. CPU time of the worker's thread.
"""

from __future__ import annotations

import argparse
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvtier.bench.flags import run_micro
from kvtier.bench.gpu.copies import BLOCK_TOKENS, MOST_HOST_MS, SHAPES, geometry
from kvtier.bench.report import Row, median_row, percentile
from kvtier.connectors.vllm.metadata import Job, Move, PoolAddress, StepMetadata
from kvtier.connectors.vllm.worker_side.pools import Pools
from kvtier.connectors.vllm.worker_side.worker import GroupLayers, WorkerHalf
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, Pinning, regions_of, staged
from kvtier.gpu.staging import CudaStreams
from kvtier.testing import ManualLane

CHUNKS, STEPS_WITHOUT_JOB = 128, 100


class Counted(CudaStreams):
    """Streams, their events, and the kernel: what a device would be asked for is counted."""

    room = free = 512 << 20

    def __init__(self) -> None:
        self.counts, self.launches = Counter[str](), 0

    def current(self) -> Counted:
        return self

    side = current
    apart = torch.inference_mode

    def do(self, stream: object, work: Callable[[], object]) -> None:
        work()

    def record(self, stream: object, *, timing: bool = False) -> Counted:
        self.counts["events"] += 1
        return self

    def wait_event(self, event: object) -> None:
        self.counts["waits"] += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: object) -> float:
        return 1.0

    def gather(self, batch: object, table: object) -> None:
        self.counts["launches"] += 1

    scatter = gather


def half_of(name: str, streams: Counted) -> tuple[WorkerHalf, Job, Pool]:
    """A worker half, and a job for all slots of a pool, which are page-locked."""
    shape = geometry(name, BLOCK_TOKENS)
    each, blocks = shape.blocks_per_chunk, CHUNKS * shape.blocks_per_chunk + 1
    kv = torch.empty(shape.layers, blocks, shape.row_bytes, dtype=torch.uint8)
    caches = {f"layer.{index}": rows for index, rows in enumerate(kv)}
    model: Any = SimpleNamespace(replaced=lambda **_: False)
    half = WorkerHalf(0, [GroupLayers(frozenset(caches), each, blocks)], caches, model)
    lane, driver = ManualLane(), SimpleNamespace(cudaHostRegister=lambda *_: 0)
    driver.cudaHostUnregister = driver.cudaHostRegister
    pinning = Pinning(None, runtime=driver, lane=lane, capturing=bool, rest=bool)
    stubs: Any = {"locked": pinning.cuts, "streams": streams, "make_rows": lambda *_: streams}
    half._paged = [PagedBlocks(regions_of(caches, blocks), each, **stubs)]
    half._pools = Pools(0, [shape.chunk_bytes], pinning, None)
    pool = Pool(CHUNKS, shape.chunk_bytes)
    address = PoolAddress(pool.path, None, pool.slots, pool.slot_bytes, (((0, True),),))
    half._pools.of(address)
    lane.run()
    order, slots = list(range(1, blocks)), list(range(CHUNKS))
    random.Random(1).shuffle(order)
    random.Random(2).shuffle(slots)
    return half, Job(1, address, [Move(0, slots, order)], tokens=CHUNKS * 256), pool


def step(half: WorkerHalf, loads: Sequence[Job] = (), saves: Sequence[Job] = ()) -> float:
    """Milliseconds of a step's hooks, of which the metadata comes as a worker gets it."""
    (pool,) = half._pools.mapped
    sent = pickle.dumps(StepMetadata(pool, 1, True, saves=list(saves), loads=list(loads)))
    told, begun = pickle.loads(sent), time.thread_time_ns()  # noqa: S301 our own
    half.begin(told)
    half.load(told)
    half.save(told)
    half.transfers()
    half.ends.take_blocks()
    half.ends.take_report()
    return (time.thread_time_ns() - begun) / 1e6


def measured(name: str, rounds: int) -> Iterator[Row]:
    streams = Counted()
    staged._move = lambda moves: streams.counts.update(DMAs=len(moves))
    half, job, pool = half_of(name, streams)
    for way in ("save", "load"):
        jobs: dict[str, Any] = {f"{way}s": [job]}
        step(half, **jobs)
        streams.counts.clear()
        found = [step(half, **jobs) for _ in range(rounds)]
        head = f"{name}: {way} of {CHUNKS * 256} tokens"
        yield median_row(f"{head}, queued", found, "ms", MOST_HOST_MS)
        yield Row(f"{head}, queued: p99", percentile(found, 99), "ms")
        for what, count in streams.counts.items():
            yield Row(f"{head}, {what}", count / rounds, "")
    step(half)
    found = [1e3 * step(half) for _ in range(STEPS_WITHOUT_JOB)]
    yield median_row(f"{name}: a step without a job", found, "us")
    half.close()
    pool.close()


def rows_of(given: argparse.Namespace) -> list[Row]:
    return [row for name in SHAPES for row in measured(name, given.rounds)]


if __name__ == "__main__":
    run_micro("worker", __doc__, 30, rows_of)
