"""A real vLLM server's /metrics: kvtier's own series are there before the first request, and follow
what it does."""

import json
import shlex

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.bench.model import make_model
from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT
from tests.child_process import wait_for
from tests.integration.http_engine import HttpEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

CHUNKS, CHUNK = 4, 64


@pytest.fixture
def engine(tmp_path):
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "KVTIER_RAM_BYTES": "1MiB",
        "KVTIER_CHUNK_TOKENS": str(CHUNK),
        "KVTIER_NVME_PATH": str(tmp_path / "nvme"),
        "KVTIER_NVME_BYTES": "16MiB",
    }
    transfer = TRANSFER | {"kv_connector_extra_config": {LOAD_EVERY_HIT: True}}
    words = "--max-model-len 512 --block-size 32 --num-gpu-blocks-override 18 --enforce-eager"
    command = shlex.split(f"{words} --served-model-name tiny --kv-transfer-config")
    command.append(json.dumps(transfer))
    engine = HttpEngine(str(make_model(tmp_path / "t", "tiny")), command, env, tmp_path / "log")
    with engine:
        yield engine


def samples(engine):
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families("\n".join([*engine.metrics(), ""])):
        for one in family.samples:
            if "kvtier" in one.name and "le" not in one.labels:
                labels = [one.labels.get(name) for name in ("tier", "place", "reason")]
                found[one.name, next(filter(None, labels), "")] = one.value
    return found


def test_series_are_there_from_the_start_and_follow_the_engine(engine):
    before = samples(engine)
    for name in ("loads_total", "stores_total", "evictions_total", "read_bytes_total"):
        assert before[f"kvtier_{name}", "ram"] == before[f"kvtier_{name}", "nvme"] == 0
    assert before["kvtier_lookup_seconds_count", ""] == 0
    assert before["vllm:kvtier_missed_chunks_total", "cold"] == 0

    def ask(seed):
        tokens = range(CHUNKS * CHUNK + 1)
        engine.complete([100 + (seed * 97 + place * 31) % 1500 for place in tokens], max_tokens=2)

    for seed in [*range(8)] * 2:  # more than RAM and the GPU cache hold
        ask(seed)

    def told():
        ask(0)  # an engine tells when it takes a step, at most once a second
        now = samples(engine)
        loads = now["kvtier_loads_total", "ram"] + now["kvtier_loads_total", "nvme"]
        looked = now["kvtier_lookup_seconds_count", ""] >= 16
        return loads > 0 and looked and now["kvtier_evictions_total", "ram"] > 0

    wait_for(told, "the engine has told")
    now = samples(engine)
    assert now["kvtier_capacity_bytes", "ram"] > 0
    for name in ("held_bytes", "written_bytes_total", "spill_seconds_count"):
        assert now[f"kvtier_{name}", "nvme"] > 0
    assert now["kvtier_lifetime_written_bytes", "nvme"] > 0
    hit, seconds = (
        now[f"kvtier_{name}", "ram"] + now[f"kvtier_{name}", "nvme"]
        for name in ("hit_tokens_total", "load_seconds_sum")
    )
    ideal, asked = now["kvtier_ideal_tokens_total", ""], now["kvtier_asked_tokens_total", ""]
    assert CHUNK * CHUNKS < hit <= ideal < asked and seconds > 0
