"""A real vLLM server's /metrics: kvtier's own series are there before the first request, and follow
what it does."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.bench.model import make_model
from kvtier.bench.processes.servers import VllmServer
from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT
from tests.child_process import DEADLINE_S, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

CHUNKS, CHUNK = 4, 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("metrics")
    model = make_model(folder / "tiny", "tiny")
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "KVTIER_RAM_BYTES": "1MiB",
        "KVTIER_CHUNK_TOKENS": str(CHUNK),
    }
    env |= {
        "KVTIER_NVME_PATH": str(folder / "nvme"),
        "KVTIER_NVME_BYTES": "16MiB",
    }
    transfer = TRANSFER | {"kv_connector_extra_config": {LOAD_EVERY_HIT: True}}
    command = [
        "--max-model-len",
        "512",
        "--block-size",
        "32",
        "--num-gpu-blocks-override",
        "18",
        "--enforce-eager",
    ]
    command += ["--served-model-name", "tiny", "--kv-transfer-config", json.dumps(transfer)]
    with VllmServer(str(model), command, env, folder / "log") as server:
        yield server


def samples(engine: VllmServer) -> dict[tuple[str, str], float]:
    """By name, and tier, place or reason."""
    with urllib.request.urlopen(f"{engine.base_url}/metrics", timeout=DEADLINE_S) as reply:  # noqa: S310
        text = reply.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "kvtier" in sample.name and "le" not in sample.labels:
                label = next(
                    (
                        sample.labels[one]
                        for one in ("tier", "place", "reason")
                        if one in sample.labels
                    ),
                    "",
                )
                found[sample.name, label] = sample.value
    return found


def ask(engine: VllmServer, seed: int) -> None:
    prompt = [100 + (seed * 97 + place * 31) % 1500 for place in range(CHUNKS * CHUNK + 1)]
    body = json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    ).encode()
    request = urllib.request.Request(  # noqa: S310
        f"{engine.base_url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
        reply.read()


def test_series_are_there_from_the_start_and_follow_the_engine(engine: VllmServer) -> None:
    before = samples(engine)
    for name in (
        "loads_total",
        "stores_total",
        "evictions_total",
        "read_bytes_total",
        "load_seconds_count",
    ):
        assert before[f"kvtier_{name}", "ram"] == before[f"kvtier_{name}", "nvme"] == 0
    assert (
        before["kvtier_lookup_seconds_count", ""]
        == before["vllm:kvtier_missed_chunks_total", "cold"]
        == 0
    )
    for seed in range(8):  # more than RAM and the GPU cache hold
        ask(engine, seed)
    for seed in range(8):
        ask(engine, seed)

    def told() -> bool:
        ask(engine, 0)  # an engine tells when it takes a step, at most once a second
        now = samples(engine)
        loads = now["kvtier_loads_total", "ram"] + now["kvtier_loads_total", "nvme"]
        return (
            loads > 0
            and now["kvtier_lookup_seconds_count", ""] >= 16
            and now["kvtier_evictions_total", "ram"] > 0
        )

    wait_for(told, "the engine has told")
    now = samples(engine)
    assert now["kvtier_capacity_bytes", "ram"] > 0 and now["kvtier_held_bytes", "nvme"] > 0
    assert (
        now["kvtier_written_bytes_total", "nvme"] > 0
        and now["kvtier_spill_seconds_count", "nvme"] > 0
    )
    hit = now["kvtier_hit_tokens_total", "ram"] + now["kvtier_hit_tokens_total", "nvme"]
    ideal, asked = now["kvtier_ideal_tokens_total", ""], now["kvtier_asked_tokens_total", ""]
    assert CHUNK * CHUNKS < hit <= ideal < asked
    assert now["kvtier_lifetime_written_bytes", "nvme"] > 0
    assert now["kvtier_load_seconds_sum", "ram"] + now["kvtier_load_seconds_sum", "nvme"] > 0
