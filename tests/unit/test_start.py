"""What an engine's start settles before anything is planned."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.autoconfig import probe
from kvtier.autoconfig.chunks import chunk_tokens
from kvtier.autoconfig.facts import GIB, KIB, Facts, Gpus, Memory, known
from kvtier.autoconfig.plan import make_plan
from kvtier.autoconfig.start import chunk_tokens_for_engine, plan_for_engine
from kvtier.pool import Pool

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text())
ROOMY = Memory(available=known(2000 * GIB, "test"), cgroup_headroom=known(1 << 62, "test"))


def engine(model: str, tensor: int, block: int, longest: int) -> SimpleNamespace:
    hf_config = SimpleNamespace(to_dict=lambda: MODELS[model])
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, pipeline_parallel_size=1, data_parallel_size_local=1
        ),
        cache_config=SimpleNamespace(block_size=block, cache_dtype="auto", num_gpu_blocks=1000),
        model_config=SimpleNamespace(model="a/b", max_model_len=longest, dtype="torch.bfloat16", hf_config=hf_config),
    )


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_workers_come_to_the_plans_chunk_size_without_a_plan(model: str, tensor: int) -> None:
    config = engine(model, tensor, 16, 32_768)
    serving, described = probe.probe_engine(config)
    gpus = Gpus(known(8, "test"), known("H100", "test"), known(80 * GIB, "test"), known(False, "test"))
    plan = make_plan(Facts(memory=ROOMY, gpus=gpus, model=described, engine=serving))
    assert plan.values()["chunk_tokens"] == chunk_tokens_for_engine(config, 16)


def test_chunks_are_never_most_of_a_context() -> None:
    assert chunk_tokens(2 * KIB, 32, 736) == 256
    assert chunk_tokens(2 * KIB, 32, 32_768) == 1024
    assert chunk_tokens(320 * KIB, 16, 32_768) == 128
    assert chunk_tokens(56 * KIB, 128, 32_768) == 256
    assert chunk_tokens(56 * KIB, 48, 32_768) == 288


def test_engines_of_one_host_get_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe_memory", lambda: ROOMY)
    config = engine("llama-3.1-8b", 1, 16, 8192)
    plans = [plan_for_engine(config, ["/none"], engines=engines, timed=False) for engines in (1, 4)]
    free = [
        next(int(row.value) for row in plan.derived if row.key == "ram_available_bytes")
        - next(int(row.value) for row in plan.derived if row.key == "ram_reserve_bytes")
        for plan in plans
    ]
    assert [int(plan.values()["ram_bytes"]) >> 20 for plan in plans] == [free[0] >> 20, free[1] // 4 >> 20]


def test_an_engine_that_comes_later_gets_what_the_first_one_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's pool is no longer available, but counts for what is shared out."""
    config, free = engine("llama-3.1-8b", 1, 16, 8192), [1000 * GIB]
    held = [0]

    def memory() -> Memory:
        seen = known(free[0], "test")
        return Memory(available=seen, cgroup_headroom=known(1 << 62, "test"), pools=known(held[0], "test"))

    monkeypatch.setattr(probe, "probe_memory", memory)
    shares = []
    for _ in range(2):
        shares.append(int(plan_for_engine(config, ["/none"], engines=2, timed=False).values()["ram_bytes"]))
        free[0] -= shares[-1]
        held[0] += shares[-1]
    assert shares[0] == shares[1] > 200 * GIB


def test_pools_are_found_and_each_is_counted_once(tmp_path: Path) -> None:
    """In a made-up /proc that shows this process twice."""
    for number in "12":
        (tmp_path / "proc" / number).mkdir(parents=True)
        (tmp_path / "proc" / number / "fd").symlink_to(f"/proc/{os.getpid()}/fd")
    before = probe.probe_memory(tmp_path).pools.value
    pool = Pool(4, 1 << 20)
    pool.buffer[:] = b"\1" * (4 << 20)
    after = probe.probe_memory(tmp_path).pools.value
    pool.close()
    assert before is not None and after is not None
    assert after - before == 4 << 20
