"""kvtier's server as vLLM's secondary tier, beside vLLM's ``fs`` tier on the same disk, in turns.

    python -m kvtier.bench.micro.tier --path /fast/disk/folder

A prompt of 64 chunks of 2 MiB is stored in eight jobs, as steps of its prefill do, and loaded in
one. Other chunks were in the server's RAM before. *Cold*: both have begun anew; ``fs`` reads by
O_DIRECT in any case. *Step*: the calls on the scheduler's thread where five steps in turn look for
the same 10,000 chunks, of which none is there. Its row is of all rounds' steps together.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.bench.flags import run_micro
from kvtier.bench.micro.nvme import disk_folder
from kvtier.bench.micro.server import server
from kvtier.bench.micro.step import cache_of
from kvtier.bench.model import make_model
from kvtier.bench.report import Row, median_row, percentile

CHUNKS, CHUNK_BYTES, JOBS, LOOKUPS, STEPS = 64, 2 << 20, 8, 10_000, 100
_BYTES, _POLL_S, _COMPUTES_S = CHUNKS * CHUNK_BYTES, 0.0002, 0.05
_STEP = "step with 10,000 lookups, p99"
_OURS: dict[str, Any] = {"type": "KVTierTier", "module_path": "kvtier.connectors.vllm_tier"}
_OURS |= {"load_timeout_ms": 30_000}  # the disk is shared
_FS = {"type": "fs"}
ROWS: Any = np.frombuffer(mmap(-1, _BYTES), np.uint8).reshape(CHUNKS, -1)
"""vLLM's RAM."""


def make_tier(model: Path, entry: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_offload.tiering import factory, spec

    transfer = KVTransferConfig("OffloadingConnector", kv_role="kv_both")
    transfer.kv_connector_extra_config = {"cpu_bytes_to_use": _BYTES}
    given = EngineArgs(str(model), block_size=16, kv_transfer_config=transfer)
    vllm_config = given.create_engine_config()  # kvtier's tier looks for it by this name
    of = spec.TieringOffloadingSpec(
        config.build_offloading_config(vllm_config, cache_of(["full"], 16))
    )
    return factory.SecondaryTierFactory.create_secondary_tier(entry, ROWS.data, of)


def keys_of(prompt: str, count: int = CHUNKS) -> list[bytes]:
    return [f"{prompt} {at}".encode().ljust(32, b".") + bytes(4) for at in range(count)]


def move_ms(tier: Any, prompt: str, jobs: int = 0) -> tuple[float, float]:
    """Store a prompt in ``jobs``, or load it and compare it with what was there: until the last job
    is reported, and until kvtier's server, which writes later, has nothing to write."""
    from vllm.v1.kv_offload.tiering.base import TransferJob

    submit, part = tier.submit_store if jobs else tier.submit_load, CHUNKS // (jobs or 1)
    keys, done, kept = keys_of(prompt), list[Any](), ROWS.copy()
    ROWS[:] *= bool(jobs)
    begun = time.perf_counter()
    for at in range(0, CHUNKS, part):
        of, places = tuple(keys[at : at + part]), np.arange(at, at + part, dtype=np.int32)
        submit(TransferJob(at, of, places, not jobs, SimpleNamespace(req_id="r")))
    while len(done) < CHUNKS // part:
        time.sleep(_POLL_S)
        done += tier.get_finished_jobs()
    reported = time.perf_counter() - begun
    while tier.tier_type != "fs" and tier._server._client.stats()["queued"]:
        time.sleep(_POLL_S)
    written = time.perf_counter() - begun
    if not (all(one.success for one in done) and (kept == ROWS).all()):
        raise SystemExit(f"{tier.tier_type}: a chunk was not moved, or is another")
    return 1e3 * reported, 1e3 * written


def step_ms(tier: Any, number: int) -> float:
    context = SimpleNamespace(req_id=str(number // 5))
    keys = keys_of(context.req_id, LOOKUPS)
    time.sleep(_COMPUTES_S)
    begun = time.perf_counter()
    for key in keys:
        tier.lookup(key, context)
    tier.on_schedule_end(None)
    tier.get_finished_jobs()
    if number % 5 == 4:
        tier.on_request_finished(context)
    return 1e3 * (time.perf_counter() - begun)


def measured(model: Path, folder: Path, order: int) -> Iterator[tuple[str, int, float]]:
    """Milliseconds of kvtier's (0) and of vLLM's (1), by what was done. ``order``: 1 or -1."""
    nvme = {"KVTIER_NVME_PATH": f"{folder}/nvme", "KVTIER_NVME_BYTES": f"{4 * _BYTES}B"}
    for is_cold in (False, True):
        with server(_BYTES + 4 * CHUNK_BYTES, nvme) as (path, _):
            entries = (_OURS | {"server": f"unix://{path}"}, _FS | {"root_dir": f"{folder}/fs"})
            turns = [*enumerate(make_tier(model, entry) for entry in entries)][::order]
            for arm, tier in turns:
                move_ms(tier, f"other {is_cold}", JOBS)
                if is_cold:
                    yield "load, cold", arm, move_ms(tier, "measured")[0]
                else:
                    reported, written = move_ms(tier, "measured", JOBS)
                    yield "store", arm, reported
                    yield "store, to disk", arm, written
                    yield "load, in server RAM", arm, move_ms(tier, "measured")[0]
            gc.collect()
            gc.freeze()  # as vLLM does when it has started
            for number in range(STEPS):
                for arm, tier in turns[:: -1 if number // 5 % 2 else 1]:
                    yield _STEP, arm, step_ms(tier, number)
            gc.unfreeze()
            for _, tier in turns:
                tier.shutdown()


def rows_of(given: argparse.Namespace) -> list[Row]:
    seen = dict[str, tuple[list[float], list[float]]]()
    ROWS[:] = np.random.default_rng(0).integers(0, 256, ROWS.shape, np.uint8)
    with disk_folder(given) as folder:
        model = make_model(folder / "model", "tiny")
        for number in range(given.rounds):
            order = -1 if number % 2 else 1
            for name, arm, value in measured(model, folder / f"{number}", order):
                seen.setdefault(name, ([], []))[arm].append(value)
    rows = list[Row]()
    for name, (own, fs) in seen.items():
        ratio = statistics.median(one / of for one, of in zip(own, fs, strict=True))
        row = median_row(f"vLLM's tier: {name}", own, "ms", statistics.median(fs), ratio)
        if name == _STEP:
            slow, theirs = (percentile(each, 99) for each in (own, fs))
            row = replace(row, value=slow, limit=theirs, ratio=slow / theirs)
        rows.append(row)
    return rows


if __name__ == "__main__":
    run_micro("tier", __doc__, 7, rows_of, "--path")
