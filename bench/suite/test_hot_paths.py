"""Parts of the engine's step and of the lanes, each alone under pytest-benchmark: this shows which
part got slower.

``make bench-suite`` runs it and compares it with the committed baseline. ``make
bench-suite-baseline`` makes a new one. A baseline is of one machine: on another one look at the
*ratios* to :func:`test_yardstick`, which runs no line of kvtier. ``make test`` does not run it,
because tests never time anything.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.bench.micro import step
from kvtier.bench.model import make_model
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.gpu import PagedBlocks, regions_of, slot_tensor
from kvtier.protocol import wire
from kvtier.protocol.inbox import Inbox
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from kvtier.tiers.nvme.tier import NvmeTier

TOKENS, CHUNK, CHUNKS, SLOT = 32_768, 256, 128, 4096
LAYOUT = ChunkLayout(fingerprint({"benchmark": "suite"}), CHUNK, 16, (16,))
KV = 7 << 20
"""Bytes of a chunk of 256 tokens of a model with 28 KiB a token."""
Benchmark = Callable[..., Any]


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(150_000) for _ in range(TOKENS)]


def saved(store: Store, keys: list[ChunkKey]) -> None:
    with store.save(keys) as lease:
        lease.commit()


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Pool(2 * CHUNKS, SLOT))
    saved(store, LAYOUT.keys(prompt(1)))
    yield store
    store.close()


def test_yardstick(benchmark: Benchmark) -> None:
    """SHA-256 of 1 MiB by Python's own library: how fast this core is today."""
    data = bytes(1 << 20)
    benchmark(lambda: hashlib.sha256(data).digest())


def test_name_128_chunks(benchmark: Benchmark) -> None:
    tokens = prompt(1)
    assert len(benchmark(LAYOUT.keys, tokens)) == CHUNKS


def test_match_128_held(benchmark: Benchmark, store: Store) -> None:
    assert benchmark(store.lookup, LAYOUT.keys(prompt(1))).ready == CHUNKS


def test_match_128_unknown(benchmark: Benchmark, store: Store) -> None:
    assert benchmark(store.lookup, LAYOUT.keys(prompt(2))).ready == 0


def test_load_128_and_close(benchmark: Benchmark, store: Store) -> None:
    keys = LAYOUT.keys(prompt(1))

    def load() -> int:
        with store.load(keys) as lease:
            return lease.poll().ready

    assert benchmark(load) == CHUNKS


def test_save_128_over_older_ones(benchmark: Benchmark, store: Store) -> None:
    """Each save has to evict as many chunks as it reserves."""
    runs = itertools.cycle([LAYOUT.keys(prompt(seed)) for seed in range(10, 16)])
    benchmark(lambda: saved(store, next(runs)))
    store.check(idle=True)


def test_promote_16_from_a_tier(benchmark: Benchmark) -> None:
    """All transitions of the state machine without a medium. RAM holds half of what is asked for in
    turn."""
    lane = ManualLane(bound=1000)
    store = Store(Pool(32, SLOT), [(DictTier(1000), lane)])
    runs = [LAYOUT.keys(prompt(seed)[: 16 * CHUNK]) for seed in range(4)]
    for keys in runs:
        saved(store, keys)
        lane.run()
    order = itertools.cycle(runs)

    def turn() -> int:
        with store.load(next(order)) as lease:
            lane.run()
            return lease.poll().ready

    assert benchmark(turn) == 16


def test_question_of_128_keys_there_and_back(benchmark: Benchmark) -> None:
    keys = LAYOUT.keys(prompt(1))

    def cross() -> int:
        inbox: Inbox[wire.Question] = Inbox(wire.Question)
        asked = wire.frame(wire.LookupCall(1, wire.joined(keys)))
        inbox.room()[: len(asked)] = asked
        inbox.filled(len(asked))
        message = inbox.next()
        assert isinstance(message, wire.LookupCall)
        return len(wire.split(message.keys))

    assert benchmark(cross) == CHUNKS


def test_nvme_write_and_read_7_mib(benchmark: Benchmark, tmp_path: Path) -> None:
    """Through the page-aligned pool, and with O_DIRECT where the file system has it. Checksums are
    included."""
    pool, key = Pool(1, KV), LAYOUT.keys(prompt(1))[0]
    tier = NvmeTier(tmp_path / "tier", 64 << 20, KV)

    def cross() -> bool:
        return tier.write(key, pool.view(0)) and tier.read(key, pool.view(0))

    assert benchmark.pedantic(cross, rounds=20, warmup_rounds=2) is True  # type: ignore[attr-defined]
    tier.close([])
    pool.close()


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("way", ["save", "load"])
def test_copy_of_one_chunk(benchmark: Benchmark, way: str, block: int) -> None:
    """28 layers of 2 heads x 128 in 16 bits on CPU tensors, between scattered blocks and one
    slot."""
    blocks = 4 * CHUNK // block
    caches = {
        f"{i}": torch.zeros((2, blocks, block, 2, 128), dtype=torch.bfloat16) for i in range(28)
    }
    paged = PagedBlocks(regions_of(caches, blocks), CHUNK // block)
    pool = Pool(1, KV)
    ids = random.Random(1).sample(range(blocks), CHUNK // block)
    jobs, copy = [(slot_tensor(pool.view(0)), 0, ids)], getattr(paged, way)
    benchmark(lambda: copy(jobs).wait())
    jobs.clear()
    pool.close()


ADDED_S = [0.0]
"""CPU time of the connector's hooks, after each step."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.benchmark(timer=lambda: ADDED_S[-1])
def test_connector_in_a_step_of_64_that_decode(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks under vLLM's own Scheduler, whose own time is left out. A round is 32 steps, in which
    eight requests finish a chunk."""
    for name, value in step.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = make_model(tmp_path / "model", "tiny")
    engine = step.SchedulingLoop(model, "kvtier", is_async=False)
    engine.decode(64, random.Random(1))

    def go_on() -> None:
        ADDED_S.append(ADDED_S[-1] + engine.step().added_s)

    benchmark.pedantic(go_on, rounds=20, iterations=32)
    engine.scheduler.shutdown()
